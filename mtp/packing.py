"""Linear layers with weights packed once, for CPUs.

oneDNN repacks a weight matrix at every call of ``torch.nn.functional.linear`` with a few rows, which costs more than
the product itself: on two AVX-512 cores a 1536 x 576 product with 8 rows takes 0.36 ms unpacked and 0.16 ms packed.
Tree verification lives in exactly that range of rows.  A ``PackedLinears`` keeps a packed copy of a model's weights
beside the model and uses it only while it is active; the model itself stays as its owner left it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# The number of rows the packed layout is chosen for.  Measured: a layout for 16 rows serves 1 to 1024 rows as well as
# one made for each, while a layout for 1 row is slower everywhere else.
ROWS_HINT = 16


def is_available() -> bool:
    """Whether this build of torch can pack weights for CPU products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def can_pack(module: nn.Module) -> bool:
    """Whether ``module`` is a plain float linear layer on the CPU (not a quantised or adapted one)."""
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and module.weight.layout == torch.strided
    )


class PackedLinears:
    """Packed copies of the weights of some linear layers.

    The copies cost as much memory as the weights.  A weight that changes after packing is noticed (by its version
    counter and address) and packed again.

    Args:
        root: the model; every plain ``nn.Linear`` below it is packed at first use.
    """

    def __init__(self, root: nn.Module):
        linears = [module for module in root.modules() if can_pack(module)] if is_available() else []
        self._forwards = [(module, _packed_forward(module)) for module in linears]

    def __len__(self) -> int:
        return len(self._forwards)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the packed weights inside the block.  Only for inference: no gradient flows through them."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            yield
            return
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                module.__dict__.pop("forward", None)


def _packed_forward(module: nn.Module) -> Callable[[Tensor], Tensor]:
    state: dict[str, object] = {"key": None, "packed": None}
    # A weak reference: the closure hangs on the module while active, and must not keep it alive in a circle.
    reference = weakref.ref(module)

    def forward(x: Tensor) -> Tensor:
        linear = reference()
        assert linear is not None
        weight = cast(Tensor, linear.weight)
        key = (weight.data_ptr(), None if weight.is_inference() else weight._version)
        if state["key"] != key:
            state["packed"] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
            state["key"] = key
        return torch.ops.mkldnn._linear_pointwise(x, state["packed"], linear.bias, "none", [], "")

    return forward
