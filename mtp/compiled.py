"""A target's decoder layers, compiled for CPUs.

Of a pass over a few tokens a third is spent between the products: hundreds of small operations, each with its own way
through the interpreter.  ``CompiledLayers`` turns each kind of layer into one native function (``torch.export`` and
AOTInductor), which all layers of that kind share: weights are arguments.  What was compiled is kept on disk, so that
compiling takes place once for each architecture, size and version of the libraries.

A layer that cannot be compiled, or whose compiled function does not give what the layer gives, runs as it always did.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from mtp.attention import AttentionPass
from mtp.errors import first_line
from mtp.layer_call import LayerCall, LayerGraphError, states_of
from mtp.layer_graph import Site, trace, weight_places
from mtp.native import (
    Native,
    config_settings,
    configs_of,
    has_hooks,
    made_of,
    native_function,
    settings_of,
    structure,
)
from mtp.packing import PackedProduct, can_pack

logger = logging.getLogger(__name__)

# How far a compiled layer may be from the layer itself, as a share of what enters it, leaves it and is added in it.
ALIKE = 0.99  # of the values; where thousands are summed up, single ones round off further
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# And a whole pass, as a share of its hidden states (a wrong one is off by all of them): rounding adds up over layers.
PASS_TOLERANCES = {torch.float64: 1e-2, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}

MOST_ROWS = 8  # for which it is measured whether more of them would take less time
WORTH_FILLING = 0.95  # of the time: less is noise
REPEATS = 3


@dataclass(frozen=True)
class CompileReport:
    """What came of compiling.

    Attributes:
        layers: of the target.
        compiled: of them that run compiled.
        reasons: why others do not, with how many each holds for.
    """

    layers: int
    compiled: int
    reasons: dict[str, int]

    def __str__(self) -> str:
        line = f"{self.compiled} of {self.layers} layers run compiled"
        why = "; ".join(f"{count} do not: {reason}" for reason, count in self.reasons.items())
        return f"{line} ({why})" if why else line


@dataclass(frozen=True)
class RecordedPass:
    """An ordinary pass, to compile layers from and to compare them with.

    Attributes:
        tokens: ``[B, T]`` of the pass.
        attention: what they saw.
        calls: how each layer was called and what it gave, or why it cannot be compiled.
        hidden: ``[B, T, H]`` what came of it.
    """

    tokens: Tensor
    attention: AttentionPass
    calls: Sequence[LayerCall | LayerGraphError]
    hidden: Tensor


class CompiledLayers:
    """Native functions in place of the layers of a target, while ``active``.

    Args:
        layers: the decoder's.
        passes: the first over ``layer_call.BATCH`` rows of ``layer_call.LENGTH`` tokens; functions are compiled from
            it, and compared with the layers themselves on all.
        tracing: makes a block in which the model attends through ``layer_graph.TRACING_NAME``.
        progress: show a progress bar.

    Attributes:
        report: what came of it.
        fullest: for some numbers of rows (tokens of all texts together), the larger one that takes less time: torch's
            products work on several rows at once, and are at their best with as many.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        passes: Sequence[RecordedPass],
        tracing: Callable[[], AbstractContextManager[None]],
        progress: bool = True,
    ):
        self._functions: list[_CompiledLayer] = []
        self._changed = 0
        layers = list(layers)
        self._configs = list({id(c): c for layer in layers for c in configs_of(layer)}.values())
        self._settings = list(map(config_settings, self._configs))
        natives: dict[str, Native | LayerGraphError] = {}
        reasons: Counter[str] = Counter()
        bar = tqdm(layers, "compiling layers", unit="layer", leave=False, disable=not progress)
        for at, layer in enumerate(bar):
            try:
                call = _called(passes[0], at)
                _refuse_unpacked(call)
                _refuse_loose_tensors(layer)
                key = structure(layer, call)
                if key not in natives:
                    natives[key] = native_function(key, layer, partial(_trace, tracing, layer, call))
                function = _CompiledLayer(layer, call, _known(natives[key]))
                for each in passes:
                    _compare(function, each.attention, _called(each, at))
                self._functions.append(function)
            except LayerGraphError as error:
                reasons[str(error)] += 1
        self.report = CompileReport(len(passes[0].calls), len(self._functions), dict(reasons))
        products = [product for function in self._functions for product in function.products]
        self.fullest = fullest([product for product in products if product.is_of_torch])

    def compare(self, run: Callable[[Tensor, AttentionPass], Tensor], recorded: RecordedPass) -> None:
        """Use none of the functions if a pass with all of them does not give what was recorded.

        Each layer's own output has been compared; this is for what layers hand to one another on other ways.

        Args:
            run: the pass again, to its hidden states.
        """
        try:
            found, reason = run(recorded.tokens, recorded.attention).float(), "compiled, a pass gives something else"
        except Exception as error:
            found, reason = torch.full_like(recorded.hidden, float("nan")).float(), first_line(error)
        expected = recorded.hidden.float()
        off = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        if not float(off) <= PASS_TOLERANCES[recorded.hidden.dtype]:
            self._functions = []
            self.report = CompileReport(self.report.layers, 0, {reason: self.report.layers})

    @property
    def linears(self) -> list[nn.Linear]:
        """The linear layers that are multiplied here."""
        return [linear for function in self._functions for linear in function.linears]

    def refresh(self) -> None:
        """Notice what was changed since the last generation: weights, parts of layers, hooks on them, configs."""
        is_as_it_was = list(map(config_settings, self._configs)) == self._settings
        for function in self._functions:
            function.refresh()
            function.is_usable &= is_as_it_was
        changed = sum(not function.is_usable for function in self._functions)
        if changed > self._changed:
            logger.warning("%d compiled layers were changed: they run as they are, and slower", changed)
        self._changed = changed

    @property
    def is_whole(self) -> bool:
        """Whether all layers run compiled."""
        return len(self._functions) == self.report.layers and all(map(_CompiledLayer.can_stand_in, self._functions))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run compiled inside the block.  Only for inference with a cache.

        A layer whose ``forward`` somebody has replaced (a hook of accelerate, say), or that has hooks inside, runs as
        it is.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            yield
            return
        ours = [each for each in self._functions if each.can_stand_in()]
        for function in ours:
            function.layer.__dict__["forward"] = function
        try:
            yield
        finally:
            for function in ours:
                function.layer.__dict__.pop("forward", None)


def _called(recorded: RecordedPass, at: int) -> LayerCall:
    call = recorded.calls[at]
    if isinstance(call, LayerGraphError):
        raise call
    return call


def _trace(
    tracing: Callable[[], AbstractContextManager[None]], layer: nn.Module, call: LayerCall
) -> torch.export.ExportedProgram:
    with tracing():
        return trace(layer, call)


def _known(native: Native | LayerGraphError) -> Native:
    if isinstance(native, LayerGraphError):
        raise native
    return native


def _refuse_unpacked(call: LayerCall) -> None:
    for linear in (linear for group in call.groups for linear in group):
        if not can_pack(linear):
            kind = f"{type(linear).__name__} over a {linear.weight.dtype} {type(linear.weight).__name__}"
            raise LayerGraphError(f"a {kind} in it cannot be packed")


def _refuse_loose_tensors(layer: nn.Module) -> None:
    """Raise ``LayerGraphError`` for tensors that are no inputs of the graph: their values would be fixed in it."""
    for name, module in layer.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor):
                path = f"{name}.{attribute}".lstrip(".")
                raise LayerGraphError(f"its {path} is a tensor, but neither a parameter nor a buffer")


def _compare(function: _CompiledLayer, attention: AttentionPass, call: LayerCall) -> None:
    """Raise ``LayerGraphError`` if the compiled layer does not give what the layer gave in ``call``."""
    try:
        with torch.no_grad(), attention.active():
            found = states_of(function(*call.args, **call.kwargs)).float()
    except Exception as error:
        raise LayerGraphError(first_line(error)) from error
    expected = states_of(call.output).float()
    if found.shape != expected.shape:
        raise LayerGraphError(f"compiled, it gives {tuple(found.shape)} in place of {tuple(expected.shape)}")
    entered = call.inputs[0].float()
    # Rounding is relative to the largest value on the way: what enters, what leaves, and what is added.
    scale = entered.abs() + expected.abs() + (expected - entered).square().mean().sqrt()
    allowed = TOLERANCES[states_of(call.output).dtype] * scale
    if float(((found - expected).abs() <= allowed).float().mean()) < ALIKE:
        raise LayerGraphError(f"compiled, it is off by up to {float((found - expected).abs().max()):.2g}")


class _CompiledLayer:
    """Stands in for one layer's ``forward``."""

    def __init__(self, layer: nn.Module, call: LayerCall, native: Native):
        self.is_usable = True
        self.layer = layer
        self.linears = [linear for group in call.groups for linear in group]
        self._native = native
        self.products = [PackedProduct(group) for group in call.groups]
        self._site = Site(call.cache_index, layer)
        self._places = weight_places(layer, call.groups)
        self._weights: list[Tensor] = []
        # Of the call only places are kept: its tensors, and the cache among them, are let go.
        self._tensors, self._mask, self._cache = call.tensors, call.mask, call.cache
        leaves, self._spec = pytree.tree_flatten(call.output)
        self._at = next(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        self._is_plain = isinstance(call.output, Tensor)
        self._before, self._behind = leaves[: self._at], leaves[self._at + 1 :]
        self._made_of = self._parts()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site = self._site
        site.mask, site.cache = self._mask.find(args, kwargs), self._cache.find(args, kwargs)
        inputs = [place.find(args, kwargs).contiguous() for place in self._tensors]
        weights = self._weights or self._read_weights()
        site.enter()
        try:
            (states,) = self._native(inputs + weights)
        except BaseException:
            site.leave()
            raise
        site.mask = site.cache = None  # of one pass: nothing of it is kept
        return states if self._is_plain else pytree.tree_unflatten([*self._before, states, *self._behind], self._spec)

    def can_stand_in(self) -> bool:
        """Whether nothing was changed that the function does not know of."""
        return self.is_usable and "forward" not in self.layer.__dict__

    def refresh(self) -> None:
        changed = self._parts() != self._made_of or has_hooks(self.layer)
        self.is_usable = not changed and all(map(can_pack, self.linears))
        for product in self.products:
            product.refresh()
        self._weights = []  # read again in the next pass, and for all of the generation

    def _read_weights(self) -> list[Tensor]:
        self._weights = [getattr(owner, name) for owner, name in self._places]
        self._weights += [operand for product in self.products for operand in product.operands()]
        return self._weights

    def _parts(self) -> Any:
        return settings_of(self.layer), made_of(self.layer)


@torch.no_grad()
def fullest(products: Sequence[PackedProduct]) -> dict[int, int]:
    """For numbers of rows up to ``MOST_ROWS``, a larger number that takes less time, where there is one; measured."""
    if not products:
        return {}
    seconds = dict.fromkeys(range(1, MOST_ROWS + 1), float("inf"))
    for _ in range(REPEATS):
        for rows in seconds:  # in turn, so that what else happens on the machine does not fall on one number alone
            inputs = [product.inputs(rows) for product in products]
            started = time.perf_counter()
            for product, x in zip(products, inputs, strict=True):
                product(x)
            seconds[rows] = min(seconds[rows], time.perf_counter() - started)
    found = {}
    for rows, taken in seconds.items():
        best = min(range(rows, MOST_ROWS + 1), key=seconds.__getitem__)
        if seconds[best] < WORTH_FILLING * taken:
            found[rows] = best
    return found
