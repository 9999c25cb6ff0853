"""One decoder layer as a graph: what a compiler is given, and what the compiled layer asks for while it runs.

A layer of any architecture is traced through the library's own code, with two things left out of the graph.  Products
with packed weights are operators, ``mtp::panel_linear`` or ``mtp::packed_linear``, which take these as inputs, as the
graph does with all weights, so that one graph serves all layers that are built alike.  Attention, the cache included,
is ``mtp::attend_cached`` or ``mtp::attend``, which asks the ``Site`` that is current on its thread.  What is left in
between (norms, rotary positions, activations, sums) is what a compiler fuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from mtp import kernels
from mtp.attention import current_pass, tree_attention
from mtp.cache import TreeCache
from mtp.layer_call import BATCH, LENGTH, LayerCall, LayerGraphError, Place, states_of
from mtp.packing import joined, multiply

Groups = Sequence[Sequence[nn.Linear]]  # linear layers, those that read the same input together

TRACING_NAME = "mtp_layer_graph"  # of the attention function while a layer is traced

library = torch.library.Library("mtp", "DEF")
library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
library.define(
    "attend(Tensor query, Tensor key, Tensor value, float? scaling, float? softcap, Tensor? sinks) -> Tensor"
)


# ---- what a layer asks for while it runs ---------------------------------------------------------------------------


@dataclass(eq=False)
class Site:
    """Where a graph is at work: one layer of one pass.

    Attributes:
        cache_index: the layer's place in ``cache``.
        mask: ``[B, 1, T, S]`` of this pass, or None.
        cache: of this pass.
        module: that attends, for messages.
        is_counted: this layer counts as one that attended, since native code is expected to do it.
    """

    cache_index: int
    module: nn.Module
    mask: Tensor | None = None
    cache: Cache | None = None
    is_counted: bool = False

    def enter(self) -> None:
        """Be where the thread's graph is at work."""
        current.site = self
        self.is_counted = False
        if kernels.is_loaded():
            kernels.expect(*self._buffers())

    def leave(self) -> None:
        """Keep nothing of a pass that went wrong."""
        self.mask = self.cache = None
        if kernels.is_loaded():
            kernels.expect(None, None, None)

    def _buffers(self) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """What native code attends to by itself, without asking for it; None where it has to ask."""
        mask, cache = self.mask, self.cache
        if mask is None or mask.dtype != torch.bool or not isinstance(cache, TreeCache):
            return None, None, None
        keys, values = cache.tree_layers[self.cache_index].staged
        if keys is None or values is None or mask.shape[3] != cache.end:
            return None, None, None
        if mask.shape[2] > kernels.MOST_QUERIES or keys.dtype not in kernels.DTYPES:
            return None, None, None
        attention = current_pass()
        attention.calls += 1
        self.is_counted = True
        return keys, values, attention.bias(mask, 1, keys.dtype, keys.device)


class _Current(threading.local):
    site: Site
    tracing: _Tracing


current = _Current()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    site = current.site
    assert site.cache is not None
    if site.is_counted:  # native code could not do it, and has asked
        current_pass().calls -= 1
    length, width = query.shape[2] if site.mask is None else site.mask.shape[2], query.shape[2]
    if length < width:  # rows that fill the pass up are no tokens: nothing of them is kept, and nothing attended to
        query, key, value = query.narrow(2, 0, length), key.narrow(2, 0, length), value.narrow(2, 0, length)
    key, value = site.cache.update(key, value, site.cache_index)
    attended = tree_attention(site.module, query, key, value, site.mask, scaling, softcap, sinks)[0]
    return attended if length == width else F.pad(attended, (0, 0, 0, 0, 0, width - length))


def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _attend_shape(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


library.impl("packed_linear", multiply, "CPU")
library.impl("packed_linear", multiply, "MkldnnCPU")  # packed weights are tensors of a kind of their own
library.impl("packed_linear", _packed_linear_shape, "Meta")
library.impl("attend", _attend, "CPU")
library.impl("attend", _attend_shape, "Meta")


# ---- tracing -------------------------------------------------------------------------------------------------------


@dataclass
class _Tracing:
    """What must be so in a layer while it is traced.

    Attributes:
        mask: that its attention has to be handed as it came.
        cached: keys and values that were given to the cache last, and have to be what is attended to.
        attended: how often it attended.
    """

    mask: Tensor
    cached: tuple[Tensor | None, Tensor | None] = (None, None)
    attended: int = 0


def _traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    tracing = current.tracing
    if attention_mask is not tracing.mask:
        raise LayerGraphError("it changes the mask before it attends")
    if key is not tracing.cached[0] or value is not tracing.cached[1]:
        raise LayerGraphError("it keeps something else than the keys and values that it attends to")
    if any(kwargs.get(name) is not None for name in ("position_bias", "head_mask")):
        raise LayerGraphError("it adds terms to its attention scores")
    tracing.attended += 1
    attend = torch.ops.mtp.attend_cached if kernels.is_loaded() else torch.ops.mtp.attend
    return attend(query, key, value, scaling, softcap, s_aux), None


AttentionInterface.register(TRACING_NAME, _traced_attention)


class _EmptyCache(Cache):
    """Hands back what it is given: ``mtp::attend`` asks the real one."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        current.tracing.cached = (key, value)
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        raise LayerGraphError("it asks how long the text in the cache is")


class LayerGraph(nn.Module):
    """A layer as a function of its input tensors and its weights: those of ``weight_names``, then the packed ones.

    Args:
        layer: of which nothing is kept as a submodule: weights are inputs, so that all layers share the graph.
        call: how it is called.
    """

    def __init__(self, layer: nn.Module, call: LayerCall):
        super().__init__()
        self._layer = [layer]
        self._call = call

    def forward(self, inputs: list[Tensor]) -> Tensor:
        call, count = self._call, len(self._call.tensors)
        args, kwargs = call.with_tensors(inputs[:count])
        args, kwargs = _without_cache(call.cache, args, kwargs)
        return states_of(call_with(self._layer[0], call.groups, inputs[count:], args, kwargs))


def call_with(
    module: nn.Module, groups: Groups, weights: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What ``module`` returns with these ``weights`` in place of its own, in the order of ``weights_of``."""
    names = weight_names(module, groups)
    with products_as_operators(groups, weights[len(names) :]):
        return torch.func.functional_call(module, dict(zip(names, weights, strict=False)), args, kwargs)


def _without_cache(
    place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(place.key, int):
        return (*args[: place.key], _EmptyCache(), *args[place.key + 1 :]), kwargs
    return args, {**kwargs, place.key: _EmptyCache()}


def weights_of(module: nn.Module, groups: Groups) -> list[Tensor]:
    """All weights that a graph takes: those that are not packed, then those that will be, not packed yet."""
    places = weight_places(module, groups)
    return [getattr(*place) for place in places] + [operand for group in groups for operand in joined(group)]


def weight_places(module: nn.Module, groups: Groups) -> list[tuple[nn.Module, str]]:
    """Where the weights are that are not packed: read anew for every generation, so that they are never stale."""
    paths = [name.rpartition(".") for name in weight_names(module, groups)]
    return [(module.get_submodule(path), name) for path, _, name in paths]


def weight_names(module: nn.Module, groups: Groups) -> list[str]:
    """Names of the parameters and buffers that are not packed, in the order in which a graph takes them."""
    packed = {id(linear) for group in groups for linear in group}
    inside = {
        f"{name}.{each}"
        for name, part in module.named_modules()
        if id(part) in packed
        for each, _ in part.named_parameters()
    }
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return [name for name in names if name not in inside]


@contextmanager
def products_as_operators(groups: Groups, operands: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block these linear layers are operators, one for each group, which shares an input.

    Args:
        operands: for each group its weights, and its biases where it has any.
    """

    def forward_of(group: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None, shared: dict[str, Any]) -> Any:
        widths = [linear.out_features for linear in group]
        product = torch.ops.mtp.panel_linear if kernels.multiplies(weight) else torch.ops.mtp.packed_linear

        def forward(at: int, x: Tensor) -> Tensor:
            if shared.get("input") is not x:
                shared["input"] = x
                shared["outputs"] = product(x, weight, bias).split(widths, dim=-1)
            return shared["outputs"][at]

        return forward

    linears = [linear for group in groups for linear in group]
    unused = iter(operands)
    for group in groups:
        weight = next(unused)
        bias = next(unused) if any(linear.bias is not None for linear in group) else None
        forward = forward_of(group, weight, bias, {})
        for at, linear in enumerate(group):
            linear.__dict__["forward"] = partial(forward, at)
    try:
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)


def trace(layer: nn.Module, call: LayerCall) -> torch.export.ExportedProgram:
    """The layer's graph for any number of rows and tokens, from a call with ``BATCH`` rows of ``LENGTH`` tokens.

    It takes one list: the tensors of ``call``, then the weights.

    Raises:
        LayerGraphError: if it attends in a way that the graph would not show.
        Exception: whatever its code raises that cannot be traced.
    """
    current.tracing = _Tracing(call.mask.find(call.args, call.kwargs))
    program = export(LayerGraph(layer, call), call.inputs, weights_of(layer, call.groups))
    if current.tracing.attended != 1:
        raise LayerGraphError(f"it attends {current.tracing.attended} times (expected once)")
    return program


@torch.no_grad()
def export(graph: nn.Module, tensors: Sequence[Tensor], weights: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """The graph for any number of rows and tokens: ``BATCH`` and ``LENGTH`` among the sizes of ``tensors``."""
    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=1, max=2**20)
    names = {BATCH: batch, LENGTH: length}
    tensors = [tensor.contiguous() for tensor in tensors]
    dynamic = [{at: names[size] for at, size in enumerate(tensor.shape) if size in names} for tensor in tensors]
    shapes = (dynamic + [None] * len(weights),)
    return torch.export.export(graph, ([*tensors, *weights],), dynamic_shapes=shapes, strict=False)
