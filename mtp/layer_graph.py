"""One decoder layer as a graph: what a compiler is given, and what the compiled layer asks for while it runs.

A layer of any architecture is traced through the library's own code, with two things left out of the graph.  Products
with packed weights are the operator ``mtp::packed_product``, and attention, the cache included, is ``mtp::attend``:
both ask the ``Site`` that is current on their thread, so that one graph serves all layers that are built alike.  What
is left in between (norms, rotary positions, activations, sums) is what a compiler fuses.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from mtp.attention import tree_attention
from mtp.layer_call import BATCH, LENGTH, LayerCall, LayerGraphError, Place, states_of
from mtp.packing import PackedProduct

TRACING_NAME = "mtp_layer_graph"  # of the attention function while a layer is traced

library = torch.library.Library("mtp", "DEF")
library.define("packed_product(Tensor x, int index, int width) -> Tensor")
library.define(
    "attend(Tensor query, Tensor key, Tensor value, float? scaling, float? softcap, Tensor? sinks) -> Tensor"
)


# ---- what a layer asks for while it runs ---------------------------------------------------------------------------


@dataclass(eq=False)
class Site:
    """Where a graph is at work: one layer of one pass.

    Attributes:
        products: with packed weights, by the index that the graph knows them by.
        cache_index: the layer's place in ``cache``.
        mask: ``[B, 1, T, S]`` of this pass, or None.
        cache: of this pass.
        module: that attends, for messages.
    """

    products: Sequence[PackedProduct]
    cache_index: int
    module: nn.Module
    mask: Tensor | None = None
    cache: Cache | None = None


class _Current(threading.local):
    site: Site
    tracing: _Tracing


current = _Current()


def _packed_product(x: Tensor, index: int, width: int) -> Tensor:
    return current.site.products[index](x)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    site = current.site
    assert site.cache is not None
    length, width = query.shape[2] if site.mask is None else site.mask.shape[2], query.shape[2]
    # Rows that fill the pass up are no tokens: nothing of them is kept, and nothing is attended to for them.
    query, key, value = (states[:, :, :length] for states in (query, key, value))
    key, value = site.cache.update(key, value, site.cache_index)
    attended = tree_attention(site.module, query, key, value, site.mask, scaling, softcap, sinks)[0]
    return attended if length == width else F.pad(attended, (0, 0, 0, 0, 0, width - length))


def _packed_product_shape(x: Tensor, index: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _attend_shape(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


library.impl("packed_product", _packed_product, "CPU")
library.impl("packed_product", _packed_product_shape, "Meta")
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
    return torch.ops.mtp.attend(query, key, value, scaling, softcap, s_aux), None


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
    """A layer as a function of its input tensors and of those weights that are not packed.

    Args:
        layer: of which nothing is kept as a submodule: weights are inputs, so that all layers share the graph.
        call: how it is called.
    """

    def __init__(self, layer: nn.Module, call: LayerCall):
        super().__init__()
        self._layer = [layer]
        self._call = call

    def forward(self, tensors: list[Tensor], weights: list[Tensor]) -> Tensor:
        layer, call = self._layer[0], self._call
        args, kwargs = call.with_tensors(tensors)
        args, kwargs = _without_cache(call.cache, args, kwargs)
        with products_as_operators(call.groups):
            output = torch.func.functional_call(
                layer, dict(zip(weight_names(layer, call), weights, strict=True)), args, kwargs
            )
        return states_of(output)


def _without_cache(
    place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(place.key, int):
        return (*args[: place.key], _EmptyCache(), *args[place.key + 1 :]), kwargs
    return args, {**kwargs, place.key: _EmptyCache()}


def weight_names(layer: nn.Module, call: LayerCall) -> list[str]:
    """Names of the parameters and buffers that are not packed, in the order in which the graph takes them."""
    packed = {id(linear) for group in call.groups for linear in group}
    inside = {
        f"{name}.{each}"
        for name, module in layer.named_modules()
        if id(module) in packed
        for each, _ in module.named_parameters()
    }
    names = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    return [name for name in names if name not in inside]


@contextmanager
def products_as_operators(groups: Sequence[Sequence[nn.Linear]]) -> Iterator[None]:
    """Inside the block these linear layers are ``mtp::packed_product``: one for each group, which shares an input."""

    def forward_of(index: int, group: Sequence[nn.Linear], shared: dict[str, Any], at: int) -> Any:
        widths = [linear.out_features for linear in group]

        def forward(x: Tensor) -> Tensor:
            if shared.get("input") is not x:
                shared["input"] = x
                shared["outputs"] = torch.ops.mtp.packed_product(x, index, sum(widths)).split(widths, dim=-1)
            return shared["outputs"][at]

        return forward

    linears = [linear for group in groups for linear in group]
    for index, group in enumerate(groups):
        shared: dict[str, Any] = {}
        for at, linear in enumerate(group):
            linear.__dict__["forward"] = forward_of(index, group, shared, at)
    try:
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)


def trace(layer: nn.Module, call: LayerCall, weights: list[Tensor]) -> torch.export.ExportedProgram:
    """The layer's graph for any number of rows and tokens, from a call with ``BATCH`` rows of ``LENGTH`` tokens.

    Raises:
        LayerGraphError: if it attends in a way that the graph would not show.
        Exception: whatever its code raises that cannot be traced.
    """
    batch, length = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=1, max=2**20)
    names = {BATCH: batch, LENGTH: length}
    tensors = [tensor.contiguous() for tensor in call.inputs]
    dynamic = [{at: names[size] for at, size in enumerate(tensor.shape) if size in names} for tensor in tensors]
    current.tracing = _Tracing(call.mask.find(call.args, call.kwargs))
    with torch.no_grad():
        program = torch.export.export(
            LayerGraph(layer, call), (tensors, weights), dynamic_shapes=(dynamic, [None] * len(weights)), strict=False
        )
    if current.tracing.attended != 1:
        raise LayerGraphError(f"it attends {current.tracing.attended} times (expected once)")
    return program
