"""Linear layers with weights packed once, for CPUs.

oneDNN repacks a weight matrix at every call of ``torch.nn.functional.linear`` with a few rows, which costs more than
the product itself: on two AVX-512 cores a 1536 x 576 product with 8 rows takes 0.36 ms unpacked and 0.16 ms packed.
Tree verification lives in exactly that range of rows.  A ``PackedLinears`` keeps a packed copy of a model's weights
beside the model and uses it only while it is active; the model itself stays as its owner left it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

import torch
from torch import Tensor, nn

# The number of rows the packed layout is chosen for.  Measured: a layout for 16 rows serves 1 to 1024 rows as well as
# one made for each, while a layout for 1 row is slower everywhere else.
ROWS_HINT = 16


def is_available() -> bool:
    """Whether this build of torch can pack weights for CPU products."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@cache
def _multiplies_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(module: nn.Module) -> bool:
    """Whether ``module`` is a plain float linear layer on the CPU (not a quantised or adapted one)."""
    return (
        type(module) is nn.Linear
        and type(module.weight) is nn.Parameter  # torchao swaps the weight, not the layer
        and module.weight.device.type == "cpu"
        and (module.weight.dtype == torch.float32 or (module.weight.dtype == torch.bfloat16 and _multiplies_bfloat16()))
        and module.weight.layout == torch.strided
    )


class PackedLinears:
    """Packed copies of the weights of some linear layers.

    The copies cost as much memory as the weights.  A weight that was replaced or changed in place is packed again; one
    changed behind autograd's back (``weight.data += ...``, as merging an adapter does) is noticed by ``refresh``.

    Args:
        root: the model; every plain ``nn.Linear`` below it is packed at first use.
    """

    def __init__(self, root: nn.Module):
        linears = [module for module in root.modules() if can_pack(module)] if is_available() else []
        self._packed = [(module, _PackedLinear(module)) for module in linears]

    def __len__(self) -> int:
        return len(self._packed)

    def refresh(self) -> None:
        """Compare a sample of every weight with the one that was packed; costs some microseconds a layer."""
        for _, packed in self._packed:
            packed.refresh()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the packed weights inside the block.  Only for inference: no gradient flows through them.

        A layer that has moved to another device since, or whose ``forward`` somebody has replaced already (a hook of
        accelerate, a test, an outer block of this kind), is left as it is.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            yield
            return
        ours = [(m, packed) for m, packed in self._packed if "forward" not in m.__dict__ and can_pack(m)]
        for module, packed in ours:
            module.__dict__["forward"] = packed
        try:
            yield
        finally:
            for module, _ in ours:
                module.__dict__.pop("forward", None)


class _PackedLinear:
    """Stands in for one layer's ``forward``."""

    def __init__(self, module: nn.Module):
        # Weak: this object hangs on the module while active, and must not keep it alive in a circle.
        self._module = weakref.ref(module)
        self._weight: Tensor | None = None
        self._version = (0, -1)
        self._sample: Tensor | None = None
        self._packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        linear = self._module()
        assert linear is not None
        weight = cast(Tensor, linear.weight)
        version = (weight.data_ptr(), -1 if weight.is_inference() else weight._version)
        if weight is not self._weight or version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS_HINT)
            self._weight, self._version, self._sample = weight, version, _sample(weight)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, linear.bias, "none", [], "")

    def refresh(self) -> None:
        if self._weight is None or self._sample is None:
            return
        if not torch.equal(_sample(self._weight), self._sample):
            self._weight = None


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()
