"""A part of a drafter, compiled for CPUs: a function of a few tensors and of a module's weights.

Between two products a draft layer does a dozen small operations, each with its own way through the interpreter, which
takes as long as the products do at its size.  What is compiled is kept on disk, as the target's layers are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from mtp import kernels, packing
from mtp.errors import first_line
from mtp.layer_call import LayerGraphError, grouped
from mtp.layer_graph import Groups, call_with, export, weight_places, weights_of
from mtp.native import Native, has_hooks, made_of, native_function, shapes
from mtp.packing import PackedProduct, can_pack

logger = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}  # root mean squares, as a share of what the function gives


class CompiledPart:
    """Stands in for ``function``, which it calls where it cannot: with gradients, or where nothing was compiled.

    Args:
        owner: the module whose method ``function`` is.
        function: of tensors to a tuple of tensors, with nothing else that changes between two calls.
        example: of its tensors, no two the same, with ``layer_call.BATCH`` rows of ``layer_call.LENGTH`` tokens.
        settings: everything beside code and shapes that it depends on, as text.

    Attributes:
        reason: why it is not compiled; None where it is.
    """

    def __init__(self, owner: nn.Module, function: Function, example: Sequence[Tensor], settings: str):
        self._owner, self._function = owner, function
        self._dtypes = [tensor.dtype for tensor in example]  # native code would take others for these
        self._made_of = made_of(owner)
        self._native: Native | None = None
        self._products: list[PackedProduct] = []
        self._weights: list[Tensor] = []  # read at the first call of a generation
        self.reason: str | None = None
        try:
            self._compile(example, settings)
        except LayerGraphError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        self._native, self._products, self.reason = None, [], f"{self._function.__name__}: {why}"

    @torch.no_grad()
    def _compile(self, example: Sequence[Tensor], settings: str) -> None:
        if not packing.is_available() or any(tensor.device.type != "cpu" for tensor in example):
            raise LayerGraphError("only on a CPU whose products torch can pack weights for")
        assert len({tensor.data_ptr() for tensor in example}) == len(example)
        kernels.load()
        groups, expected = self._called(example)
        graph = _PartGraph(self._owner, self._function, groups, len(example))
        weights = weights_of(graph.call, groups)
        key = repr(
            (settings, self._function.__name__, shapes(self._owner), [(t.dtype, t.shape) for t in (*example, *weights)])
        )
        native = native_function(key, self._owner, lambda: export(graph, example, weights))
        if isinstance(native, LayerGraphError):
            raise native
        self._native = native
        self._places = weight_places(graph.call, groups)
        self._products = [PackedProduct(group) for group in groups]
        try:
            found = self(*example)
        except Exception as error:
            raise LayerGraphError(first_line(error)) from error
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape or not _rms(one - other) <= TOLERANCES[other.dtype] * _rms(other):
                raise LayerGraphError("compiled, it gives something else")

    def _called(self, example: Sequence[Tensor]) -> tuple[Groups, tuple[Tensor, ...]]:
        """The linear layers that a call runs through, and what it gives."""
        called: list[tuple[nn.Linear, Tensor]] = []
        thread = threading.get_ident()

        def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not isinstance(module, nn.Linear) or threading.get_ident() != thread:
                return
            if not can_pack(module):
                raise LayerGraphError(f"a {type(module).__name__} in it cannot be packed")
            called.append((module, args[0]))

        with ExitStack() as stack:
            stack.callback(nn.modules.module.register_module_forward_pre_hook(watch).remove)
            given = self._function(*example)
        return grouped(called), given

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        native = self._native if self._can_run(tensors) else None
        if native is None:
            return self._function(*tensors)
        if not self._weights:
            weights = [getattr(owner, name) for owner, name in self._places]
            self._weights = weights + [operand for product in self._products for operand in product.operands()]
        return tuple(native([*(tensor.contiguous() for tensor in tensors), *self._weights]))

    def _can_run(self, tensors: Sequence[Tensor]) -> bool:
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        return [tensor.dtype for tensor in tensors] == self._dtypes

    def refresh(self) -> None:
        """Notice weights that were changed or moved, and replaced modules: at the beginning of every generation."""
        if self._native is not None and (made_of(self._owner) != self._made_of or has_hooks(self._owner)):
            self._give_up("its weights or modules are others by now")
            logger.warning("a part of the drafter runs as it is from now on: %s", self.reason)
        for product in self._products:
            product.refresh()
        self._weights = []


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


class _Call(nn.Module):
    """A function of a module as a module's ``forward``, which is what weights can be handed to."""

    def __init__(self, owner: nn.Module, function: Function):
        super().__init__()
        self.owner = owner
        self._function = function

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self._function(*tensors)


class _PartGraph(nn.Module):
    """The function with its weights as inputs, behind its ``count`` tensors."""

    def __init__(self, owner: nn.Module, function: Function, groups: Groups, count: int):
        super().__init__()
        self._call = [_Call(owner, function)]  # in a list: no submodule, whose weights would become part of the graph
        self._groups, self._count = groups, count

    @property
    def call(self) -> nn.Module:
        return self._call[0]

    def forward(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        tensors, weights = inputs[: self._count], inputs[self._count :]
        result: tuple[Tensor, ...] = call_with(self.call, self._groups, weights, tuple(tensors), {})
        return result
