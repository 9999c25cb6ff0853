"""Making a target's passes shorter: compiled layers on a CPU (``mtp.compiled``), graphs on a GPU (``mtp.graphs``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mtp import kernels, packing
from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.compiled import CompiledLayers, CompileReport, RecordedPass
from mtp.graphs import Capture, CapturedPasses
from mtp.layer_call import BATCH, LENGTH, LayerGraphError, Recorder
from mtp.layer_graph import TRACING_NAME
from mtp.packing import PackedLinears
from mtp.patches import attention_implementation, evaluation_mode
from mtp.tree import TokenTree

if TYPE_CHECKING:
    from mtp.target import Target


def compile_layers(target: Target, progress: bool) -> CompileReport:
    """Compile a target's layers for passes over trees and prompts; nobody else may run one meanwhile."""
    if target.device.type != "cpu" or not packing.is_available():
        why = f"on {target.device.type}" if target.device.type != "cpu" else "this build of torch cannot pack weights"
        return CompileReport(target.num_layers, 0, {why: target.num_layers})
    kernels.load()
    compiled: CompiledLayers | None = None
    with evaluation_mode(target.causal_lm), torch.autocast("cpu", enabled=False):
        # While passes are recorded nothing is packed: what is compiled packs for itself, and one copy is enough.
        target.multiply_with(PackedLinears(nn.Module()), None)
        try:
            passes = [_recorded(target, BATCH, LENGTH), _recorded(target, 1, 1, prefix=2)]
            compiled = CompiledLayers(
                target.layers, passes, lambda: attention_implementation(target.configs, TRACING_NAME), progress
            )
            target.multiply_with(PackedLinears(nn.Module()), compiled)
            compiled.compare(lambda tokens, attention: _hidden(target, tokens, attention), passes[0])
        except BaseException:  # an interrupt, say: what was not compared to its end is not used
            compiled = None
            raise
        finally:
            packed = PackedLinears(target.causal_lm)
            packed.forget([] if compiled is None else compiled.linears)
            target.multiply_with(packed, compiled)
    return compiled.report


def _hidden(target: Target, tokens: Tensor, attention: AttentionPass) -> Tensor:
    """Last hidden states of a pass over empty rows."""
    cache = TreeCache(target.num_layers, tokens.shape[0], tokens.shape[1], target.device)
    return target.forward(tokens, cache, attention).hidden


def _recorded(target: Target, batch: int, length: int, prefix: int = 0) -> RecordedPass:
    """An ordinary pass over chains of tokens behind some others, and what every layer was called with in it."""
    tokens = torch.arange(batch * length, device=target.device).reshape(batch, length) % target.vocab_size
    tree = TokenTree.from_parents(tokens, torch.arange(-1, length - 1, device=target.device).expand(batch, -1))
    cache = TreeCache(target.num_layers, batch, prefix + length, target.device)
    if prefix:
        before = tokens[:, :1].expand(-1, prefix)
        target.forward(before, cache, AttentionPass.over_chain(prefix, cache.lengths, start=0))
        cache.commit(None, torch.full_like(cache.lengths, prefix), longest=prefix)
    attention = AttentionPass.over_tree(tree, cache.lengths, cache.start)
    recorder = Recorder(list(target.layers))
    with recorder.active(cache):
        output = target.forward(tokens, cache, attention)
    calls = [recorder.call(at) for at in range(target.num_layers)]
    for at in target.needed_layers:
        calls[at] = LayerGraphError("other layers read its keys and values")
    return RecordedPass(tokens, attention, calls, output.hidden)


def captured_passes(target: Target, capture: Capture) -> tuple[CompileReport, CapturedPasses | None]:
    """What records a target's passes over trees with ``capture``; None where that cannot be."""
    devices = sorted({str(weight.device) for weight in target.causal_lm.parameters()})
    if len(devices) > 1 or target.masks_by_argument:
        why = "it takes a mask of its own" if target.masks_by_argument else f"its weights are on {', '.join(devices)}"
        return CompileReport(target.num_layers, 0, {f"passes cannot be recorded: {why}": target.num_layers}), None

    def run(ids: Tensor, cache: TreeCache, attention: AttentionPass, taps: tuple[int, ...]) -> tuple[Tensor, ...]:
        output = target.run_pass(ids, cache, attention, taps)
        return (output.logits, output.hidden, *(() if output.taps is None else (output.taps,)))

    report = CompileReport(target.num_layers, 0, {"whole passes are replayed from graphs": target.num_layers})
    return report, CapturedPasses(target.causal_lm, run, capture)
