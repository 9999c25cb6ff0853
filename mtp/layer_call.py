"""How a decoder calls its layers: recorded from one pass, for those who want to do a layer's work in its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache

BATCH, LENGTH = 5, 11  # of the pass that layers are traced with: sizes that no other dimension has


class LayerGraphError(Exception):
    """A layer that cannot be compiled; the message says why."""


@dataclass(frozen=True)
class LayerCall:
    """How a decoder calls a layer: recorded from a pass, and the same in every later one.

    Attributes:
        args, kwargs: as they were.
        output: what the layer returned.
        groups: linear layers in the order of their calls, those that read the same input together.
        cache_index: the layer's place in the cache.
        tensors: where among ``args`` and ``kwargs`` the tensors are that the graph reads.
        mask: where the mask is.
        cache: where the cache is.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    groups: tuple[tuple[nn.Linear, ...], ...]
    cache_index: int
    tensors: tuple[Place, ...]
    mask: Place
    cache: Place

    @classmethod
    def of(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        groups: tuple[tuple[nn.Linear, ...], ...],
        cache_indices: Sequence[int],
    ) -> LayerCall:
        """Find out where things are.

        Raises:
            LayerGraphError: if the layer is not called, or does not attend, as most do.
        """
        if len(cache_indices) != 1:
            raise LayerGraphError(f"it writes to the cache {len(cache_indices)} times in a pass (expected once)")
        leaves = list(_leaves(args, kwargs))
        masks = [place for place, leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype == torch.bool]
        caches = [place for place, leaf in leaves if isinstance(leaf, Cache)]
        if len(masks) != 1 or len(caches) != 1:
            raise LayerGraphError(f"it is handed {len(masks)} masks and {len(caches)} caches (expected one of each)")
        if sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(output)) != 1:
            raise LayerGraphError("it returns other tensors beside its hidden states")
        tensors = tuple(place for place, leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype != torch.bool)
        if sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))) != len(tensors) + len(masks):
            raise LayerGraphError("it is handed tensors inside of something else than a tuple")
        return cls(args, kwargs, output, groups, cache_indices[0], tensors, masks[0], caches[0])

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that the graph reads."""
        return [place.find(self.args, self.kwargs) for place in self.tensors]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other tensors in place of those that the graph reads."""
        replaced = dict(zip(self.tensors, tensors, strict=True))

        def put(place: Place, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(put(Place(place.key, at), each) for at, each in enumerate(value))
            return replaced.get(place, value)

        args = tuple(put(Place(at), value) for at, value in enumerate(self.args))
        return args, {key: put(Place(key), value) for key, value in self.kwargs.items()}


@dataclass(frozen=True)
class Place:
    """Where a value is among the arguments of a call: an index or a name, and an index into a tuple."""

    key: int | str
    within: int | None = None

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value = args[self.key] if isinstance(self.key, int) else kwargs[self.key]
        return value if self.within is None else value[self.within]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in places:
        if isinstance(value, tuple):
            yield from ((Place(key, at), each) for at, each in enumerate(value))
        else:
            yield Place(key), value


class Recorder:
    """Records how the layers of a model are called, in a pass inside ``active``."""

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = layers
        self._inputs: list[list[tuple[nn.Linear, Tensor]]] = [[] for _ in layers]
        self._cache_indices: list[list[int]] = [[] for _ in layers]
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self._current: int | None = None

    @contextmanager
    def active(self, cache: Cache) -> Iterator[None]:
        """Watch ``layers``, the linear layers in them, and ``cache``."""
        update = cache.update

        def watched_update(key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if self._current is not None:
                self._cache_indices[self._current].append(layer_idx)
            return update(key, value, layer_idx, *args, **kwargs)

        with ExitStack() as stack:
            for at, layer in enumerate(self.layers):
                stack.callback(layer.register_forward_pre_hook(self._entered(at), with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._left(at), with_kwargs=True).remove)
                for module in layer.modules():
                    if type(module) is nn.Linear:
                        stack.callback(module.register_forward_pre_hook(self._multiplied(at)).remove)
            cache.update = watched_update  # type: ignore[assignment]
            stack.callback(lambda: cache.__dict__.pop("update"))
            yield

    def call(self, at: int) -> LayerCall | LayerGraphError:
        """How layer ``at`` was called, or why it cannot be compiled."""
        if at not in self._calls:
            return LayerGraphError("it was not called")
        try:
            return LayerCall.of(*self._calls[at], grouped(self._inputs[at]), self._cache_indices[at])
        except LayerGraphError as error:
            return error

    def _entered(self, at: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._current = at
            self._calls[at] = (args, dict(kwargs), None)

        return hook

    def _left(self, at: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._current = None
            self._calls[at] = (*self._calls[at][:2], output)

        return hook

    def _multiplied(self, at: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._inputs[at].append((module, args[0]))  # type: ignore[arg-type]

        return hook


def grouped(called: Sequence[tuple[nn.Linear, Tensor]]) -> tuple[tuple[nn.Linear, ...], ...]:
    """Linear layers in the order in which they were ``called``, those that read the same input together."""
    linears = [linear for linear, _ in called]
    if len(set(linears)) < len(linears):  # one is called twice: each by itself
        return tuple((linear,) for linear in dict.fromkeys(linears))
    groups: list[list[nn.Linear]] = []
    last: Tensor | None = None
    for linear, x in called:
        if x is last:
            groups[-1].append(linear)
        else:
            groups.append([linear])
        last = x
    return tuple(map(tuple, groups))


def states_of(output: Any) -> Tensor:
    """The one tensor in what a layer returns."""
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
