"""Linear layers with weights packed once, for CPUs.

oneDNN repacks a weight matrix at every call of ``torch.nn.functional.linear`` with a few rows, which costs more than
the product itself: on two AVX-512 cores a 1536 x 576 product with 8 rows takes 0.36 ms unpacked and 0.16 ms packed.
Tree verification lives in exactly that range of rows.  A ``PackedLinears`` keeps a packed copy of a model's weights
beside the model and uses it only while it is active; the model itself stays as its owner left it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtp import kernels
from mtp.huge_pages import use_huge_pages

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
        and is_packable(module.weight)
    )


def is_packable(weight: Tensor) -> bool:
    """Whether a matrix is in the memory, precision and order that ``pack`` reads."""
    return (
        weight.device.type == "cpu"
        and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _multiplies_bfloat16()))
        and weight.layout == torch.strided
    )


def pack(weight: Tensor) -> Tensor:
    """``[out, in]`` as products read it: in panels where ``mtp.kernels`` multiplies, else in oneDNN's order."""
    if kernels.multiplies(weight):
        panels = kernels.panels_of(weight)
        use_huge_pages(panels.data_ptr(), panels.nbytes)
        return panels
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    use_huge_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] -> [..., out]``: the product with packed weights."""
    if not packed.is_mkldnn:
        return kernels.panel_linear(x, packed, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinears:
    """Packed copies of the weights of some linear layers.

    The copies cost as much memory as the weights.  A weight that was replaced or changed in place is packed again; one
    changed behind autograd's back (``weight.data += ...``, as merging an adapter does) is noticed by ``refresh``.

    Args:
        root: the model; every plain ``nn.Linear`` below it is packed at first use.
    """

    def __init__(self, root: nn.Module):
        linears = [module for module in root.modules() if can_pack(module)] if is_available() else []
        self._packed = [(module, PackedProduct([cast(nn.Linear, module)])) for module in linears]

    def __len__(self) -> int:
        return len(self._packed)

    def refresh(self) -> None:
        """Compare a sample of every weight with the one that was packed; costs some microseconds a layer."""
        for _, packed in self._packed:
            packed.refresh()

    def forget(self, modules: Collection[nn.Linear]) -> None:
        """Leave these layers as they are from now on: they are multiplied in another way."""
        forgotten = set(modules)
        self._packed = [(module, packed) for module, packed in self._packed if module not in forgotten]

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


class PackedProduct:
    """``[..., in] -> [..., sum of out]``: linear layers that read the same input, as one product with packed weights.

    Packed at the first call, and again when a weight or a bias was replaced or changed.

    Args:
        modules: all of which ``can_pack``, with inputs of the same size.
    """

    def __init__(self, modules: Sequence[nn.Linear]):
        # Weak: this object hangs on a module while active, and must not keep it alive in a circle.
        self._modules = [weakref.ref(module) for module in modules]
        # What was packed: every parameter (None: no bias) with its module's table and its name there, its version and
        # its memory.
        self._state: list[tuple[dict[str, Any], str, Tensor | None, int, int]] | None = None
        self._samples: list[Tensor] = []
        self._operands: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self._is_stale():
            self._pack()
        return multiply(x, *self._operands)

    def operands(self) -> list[Tensor]:
        """What ``x`` is multiplied with, for code that asks in every pass and has ``refresh`` called in between.

        The packed weights (which nothing but ``multiply`` can read), and the biases ``[sum of out]`` if there are any.
        """
        if self._state is None:
            self._pack()
        return self._operands

    @property
    def is_of_torch(self) -> bool:
        """Whether torch multiplies, and not ``mtp.kernels``."""
        return self.operands()[0].is_mkldnn

    def inputs(self, rows: int) -> Tensor:
        """``[rows, in]`` zeros, as what is multiplied."""
        weight = cast(nn.Linear, self._modules[0]()).weight
        return weight.new_zeros(rows, weight.shape[1])

    def _is_stale(self) -> bool:
        if self._state is None:
            return True
        for table, name, parameter, version, memory in self._state:  # a few times a layer and pass: plain and quick
            if table.get(name) is not parameter or _version(parameter) != version or _memory(parameter) != memory:
                return True
        return False

    def _pack(self) -> None:
        modules = [cast(nn.Linear, reference()) for reference in self._modules]
        weight, *bias = joined(modules)
        self._operands = [pack(weight), *bias]
        parameters = [(m._parameters, name, m._parameters[name]) for m in modules for name in ("weight", "bias")]
        self._state = [(table, name, p, _version(p), _memory(p)) for table, name, p in parameters]
        self._samples = [_sample(p) for *_, p in parameters if p is not None]

    def refresh(self) -> None:
        """Notice a parameter that was replaced or changed, also behind autograd's back: it is packed again."""
        if self._state is None:
            return
        if self._is_stale():
            self._state = None
            return
        packed = zip((p for _, _, p, *_ in self._state if p is not None), self._samples, strict=True)
        if any(not torch.equal(_sample(parameter), sample) for parameter, sample in packed):
            self._state = None


def _version(parameter: Tensor | None) -> int:
    return -1 if parameter is None or parameter.is_inference() else parameter._version


def _memory(parameter: Tensor | None) -> int:
    return 0 if parameter is None else parameter.data_ptr()


def joined(modules: Sequence[nn.Linear]) -> list[Tensor]:
    """``[sum of out, in]`` their weights, and ``[sum of out]`` their biases if there are any."""
    weights = [module.weight.detach() for module in modules]
    found = [weights[0] if len(weights) == 1 else torch.cat(weights)]
    if any(module.bias is not None for module in modules):
        biases = [_bias(module) for module in modules]
        found.append(biases[0] if len(biases) == 1 else torch.cat(biases))
    return found


def _bias(module: nn.Linear) -> Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias.detach()


def _sample(weight: Tensor) -> Tensor:
    flat = weight.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 64)].clone()
