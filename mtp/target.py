"""The target: any frozen Transformers causal language model, behind a few calls."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from mtp.anatomy import find_decoder, text_config, unwrap_adapter
from mtp.attention import ATTENTION_NAME, AttentionPass
from mtp.cache import TreeCache
from mtp.compat import cache_argument
from mtp.compiled import CompiledLayers, CompileReport
from mtp.compiling import captured_passes, compile_layers
from mtp.fingerprint import fingerprint
from mtp.graphs import Capture, CapturedPasses, CudaCapture, shape_of
from mtp.offload import execution_device
from mtp.output_matrix import OutputMatrix
from mtp.packing import PackedLinears
from mtp.patches import attention_implementation, evaluation_mode, output_kept, stream_into, without_layers
from mtp.support import MASKED_BY_ARGUMENT, UnsupportedTargetError, position_limit, refuse_unsupported

FINAL = -1  # key of the final hidden states among those captured in a pass


@dataclass(frozen=True)
class TargetOutput:
    """What one pass of the target gives.

    Attributes:
        logits: ``[B, T', V]`` for the positions asked for (all of them unless ``logits_at`` was given).
        hidden: ``[B, T, H]`` last hidden states, after the final norm: what the output matrix reads.
        taps: ``[B, T, len(layers) * H]`` outputs of the tapped layers side by side, or None when none are tapped.
    """

    logits: Tensor
    hidden: Tensor
    taps: Tensor | None


@dataclass
class Target:
    """A causal LM that is read but never changed.

    While one of our passes runs, the model attends through ``mtp.attention`` and, on a CPU, multiplies with packed
    weights; before and after it is exactly as its owner left it.

    Args:
        model: a loaded Transformers causal LM, possibly with a PEFT adapter on top.

    Raises:
        UnsupportedTargetError: for models whose state cannot be rolled back, or whose attention cannot be replaced.
    """

    model: PreTrainedModel
    layers: nn.ModuleList = field(init=False)

    def __post_init__(self) -> None:
        self.causal_lm = unwrap_adapter(self.model)
        self.config = text_config(self.causal_lm.config)
        refuse_unsupported(self.causal_lm, self.config)
        self.backbone, self.layers = find_decoder(self.causal_lm, self.config.num_hidden_layers)
        self.configs = list({id(m.config): m.config for m in self.causal_lm.modules() if hasattr(m, "config")}.values())
        self.output = OutputMatrix(self.causal_lm, self.config)
        self._packed = PackedLinears(self.causal_lm)
        self._compiled: CompiledLayers | None = None
        self._captured: CapturedPasses | None = None
        self._cache_argument = cache_argument(type(self.causal_lm))
        self.masks_by_argument = self.config.model_type in MASKED_BY_ARGUMENT
        self._position_limit = position_limit(self.config)
        # A model has one attention implementation at a time: passes of several threads take turns.
        self._lock = threading.RLock()

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix."""
        return self.output.weight.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that can be verified in trees, where there is a limit.

        It is the length the target was made for, or the first at which its rotary angles would change.
        """
        made_for = getattr(self.config, "max_position_embeddings", None)
        return min((limit for limit in (made_for, self._position_limit) if limit is not None), default=None)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        embedding = self.causal_lm.get_input_embeddings()
        return execution_device(embedding, embedding.weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.weight.dtype

    @property
    def eos_token_ids(self) -> list[int]:
        """All ids that end a text, from the generation config (which may name several) or the config."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config is not None else None
        ids = self.config.eos_token_id if ids is None else ids
        return [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [ids]

    def default_taps(self) -> tuple[int, int, int]:
        """A low, a middle and a high layer (EAGLE-3, arXiv 2503.01840).

        Layer id k names the residual stream that *enters* layer k, Transformers' ``hidden_states[k]``: the raw output
        of layer k - 1.  These are the ids that vLLM and SGLang guess when a checkpoint does not say.
        """
        low, middle, high = 2, self.num_layers // 2, self.num_layers - 3
        return (min(low, self.num_layers), max(middle, 1), max(high, 1))

    def embed(self, ids: Tensor) -> Tensor:
        """``[...] -> [..., H]`` the target's own input embeddings, scaling included."""
        return self.causal_lm.get_input_embeddings()(ids)

    def unembed(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """``[..., H]`` last hidden states (after the final norm) to logits ``[..., V]``, or over ``token_ids`` only."""
        return self.output.logits(hidden, token_ids)

    def compile(self, progress: bool = True) -> CompileReport:
        """Make passes shorter for this machine; see ``mtp.compiling``.

        On a CPU layers are compiled: ten seconds or so for each kind of layer the first time; what was compiled is kept
        on disk.  On a GPU passes over trees are recorded from now on, each shape when it first comes, and replayed
        (``mtp.graphs``).  Where neither can be done (no compiler, another device) the report says why, and passes run
        as before.
        """
        if self.device.type == "cuda":
            return self.capture(CudaCapture(self.device))
        with self._lock:
            return compile_layers(self, progress)

    def capture(self, capture: Capture) -> CompileReport:
        """Record passes over trees with ``capture`` from now on."""
        report, self._captured = captured_passes(self, capture)
        return report

    def multiply_with(self, packed: PackedLinears, compiled: CompiledLayers | None) -> None:
        """Run passes with these packed weights and compiled layers from now on."""
        self._packed, self._compiled = packed, compiled

    @property
    def replays(self) -> str:
        """How many graphs were recorded so far, or why none is replayed."""
        if self._captured is None:
            return "nothing is recorded"
        return self._captured.describe()

    @property
    def num_compiled(self) -> int:
        """Layers that run compiled."""
        return 0 if self._compiled is None else self._compiled.report.compiled

    @property
    def runs_as(self) -> str:
        """How passes are run, as far as what they cost depends on it."""
        return f"{self.num_compiled} layers compiled" + (", replayed" if self.is_replayed else "")

    @property
    def is_replayed(self) -> bool:
        """Whether passes over trees are replayed from graphs."""
        return self._captured is not None and self._captured.reason is None

    def refresh(self) -> None:
        """Notice what was changed in place since the last generation (a merged adapter, say)."""
        with self._lock:  # not in the middle of another thread's pass, which packs what it finds unpacked
            self._packed.refresh()
            if self._compiled is not None:
                self._compiled.refresh()
            if self._captured is not None:
                self._captured.refresh()

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """An empty cache for ``batch_size`` rows: the beginning of a generation."""
        self.refresh()
        if self._captured is not None:
            return self._captured.take(self.num_layers, batch_size, capacity, self.device)
        return TreeCache(self.num_layers, batch_size, capacity, self.device)

    def give_back(self, cache: TreeCache) -> None:
        """Say that nobody will read ``cache``, of ``new_cache``, any more."""
        if self._captured is not None:
            self._captured.give_back(cache)

    @torch.no_grad()
    def forward(
        self,
        ids: Tensor,
        cache: TreeCache,
        attention: AttentionPass,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
        skip: Collection[int] = (),
    ) -> TargetOutput:
        """One pass over ``ids [B, T]``, staged in ``cache`` at the positions that ``attention`` names.

        Args:
            taps: layer ids whose entering residual stream is wanted (see ``default_taps``).
            logits_at: ``[n]`` indices into T for which logits are wanted; None for all.  Must not be empty.
            skip: layers that are left out: what enters them leaves them, and they stage no keys and values.
        """
        if self._captured is not None and self._can_replay(attention, cache, logits_at, skip):
            with self._lock:
                outputs = self._captured(ids, cache, attention, tuple(taps))
            if outputs is not None:
                return TargetOutput(outputs[0], outputs[1], outputs[2] if taps else None)
        cache.stage(ids.shape[1])
        return self.run_pass(ids, cache, attention, taps, logits_at, skip)

    def _can_replay(
        self, attention: AttentionPass, cache: TreeCache, logits_at: Tensor | None, skip: Collection[int]
    ) -> bool:
        """Whether this is a pass over whole trees, all logits wanted, and short of where angles change."""
        queries, staged = attention.positions.shape[1], attention.staged_positions.shape[1]
        limit = self._position_limit
        near = limit is not None and shape_of(attention.start, queries, cache.capacity)[1] > limit
        return not (attention.causal or skip or near) and logits_at is None and queries == staged

    def run_pass(
        self,
        ids: Tensor,
        cache: TreeCache,
        attention: AttentionPass,
        taps: Sequence[int] = (),
        logits_at: Tensor | None = None,
        skip: Collection[int] = (),
    ) -> TargetOutput:
        """``forward`` over tokens that are staged already."""
        length = ids.shape[1]
        keep = 0 if logits_at is None else logits_at
        filling = 0 if attention.causal or skip else self._filling(*ids.shape)
        with self._ours(attention, taps, skip, compiled=True) as captured:
            output = self.causal_lm(
                input_ids=F.pad(ids, (0, filling)),
                position_ids=F.pad(attention.positions, (0, filling)),
                use_cache=True,
                logits_to_keep=keep,
                **self._mask_argument(attention),
                **{self._cache_argument: cache},
            )
        streams = [captured[layer][:, :length].to(self.device) for layer in taps]
        return TargetOutput(
            logits=output.logits[:, :length],
            hidden=captured[FINAL][:, :length].to(self.device),
            taps=torch.cat(streams, dim=-1) if streams else None,
        )

    def _filling(self, batch: int, length: int) -> int:
        """Rows behind the ``length`` tokens of each text with which a pass takes less time than without them."""
        if self._compiled is None or (rows := self._compiled.fullest.get(batch * length)) is None:
            return 0
        return rows // batch - length if self._compiled.is_whole else 0

    def encode(self, ids: Tensor, taps: Sequence[int] = (), *, gradient: bool = False) -> tuple[Tensor, Tensor | None]:
        """Hidden states ``[B, T, H]`` and taps of right-padded rows ``ids [B, T]``, without logits or a cache.

        Padding sits behind the real tokens, which under causal attention never see it.

        Args:
            gradient: let gradients flow to weights that ask for them (an adapter's).
        """
        lengths = torch.zeros(ids.shape[0], dtype=torch.long, device=ids.device)
        attention = AttentionPass.over_chain(ids.shape[1], lengths, start=0)
        self.refresh()
        with torch.set_grad_enabled(gradient), self._ours(attention, taps) as captured:
            self.backbone(
                input_ids=ids, position_ids=attention.positions, use_cache=False, **self._mask_argument(attention)
            )
        streams = [captured[layer].to(self.device) for layer in taps]
        return captured[FINAL].to(self.device), torch.cat(streams, dim=-1) if streams else None

    def _mask_argument(self, attention: AttentionPass) -> dict[str, Tensor]:
        """The mask, for an architecture that attends by itself; all others ask ``mtp.attention`` for it."""
        return {"attention_mask": attention.additive_mask(self.dtype, self.device)} if self.masks_by_argument else {}

    @cached_property
    def needed_layers(self) -> frozenset[int]:
        """Layers that no pass can leave out: others read their keys and values (Gemma 4)."""
        shares = [getattr(getattr(layer, "self_attn", None), "store_full_length_kv", False) for layer in self.layers]
        return frozenset(layer for layer, is_shared in enumerate(shares) if is_shared)

    @cached_property
    def _layers_return_tuples(self) -> bool:
        """Whether a layer returns its hidden states as the first of several things, as some architectures have it."""
        found: list[bool] = []

        def look(module: nn.Module, args: Any, output: Any) -> None:
            found.append(isinstance(output, tuple))

        handle = self.layers[0].register_forward_hook(look)
        try:
            self.encode(torch.zeros(1, 1, dtype=torch.long, device=self.device))
        finally:
            handle.remove()
        return found[0]

    @contextmanager
    def _ours(
        self, attention: AttentionPass, taps: Sequence[int], skip: Collection[int] = (), compiled: bool = False
    ) -> Iterator[dict[int, Tensor]]:
        """Everything that is different during one of our passes, and nothing after it.

        Yields a dict that the pass fills: the stream that enters each tapped layer, and under ``FINAL`` the last.
        """
        captured: dict[int, Tensor] = {}
        self._refuse_changing_angles(attention)
        as_tuple = bool(skip) and self._layers_return_tuples  # found out by a pass of its own, before this one begins
        with ExitStack() as stack:
            stack.enter_context(self._lock)
            stack.enter_context(attention.active())
            stack.enter_context(self._packed.active())
            if compiled and self._compiled is not None:
                stack.enter_context(self._compiled.active())
            if not self.masks_by_argument:
                stack.enter_context(attention_implementation(self.configs, ATTENTION_NAME))
            stack.enter_context(evaluation_mode(self.causal_lm))
            if skip:
                stack.enter_context(without_layers([self.layers[at] for at in skip], as_tuple))
            for layer in taps:
                stack.enter_context(stream_into(layer, self.layers, captured))
            stack.enter_context(output_kept(self.backbone, FINAL, captured))
            yield captured
        layers = self.num_layers - len(skip)
        if not self.masks_by_argument and attention.calls < layers:
            raise UnsupportedTargetError(
                f"{type(self.causal_lm).__name__} called its attention function {attention.calls} times in a pass over "
                f"{layers} layers: some layers attend by themselves and did not see the tree."
            )

    def _refuse_changing_angles(self, attention: AttentionPass) -> None:
        limit = self._position_limit
        if limit is None or attention.end <= limit:  # no token's position is past its slot
            return
        if (length := int(attention.positions.max()) + 1) > limit:
            raise UnsupportedTargetError(
                f"A text of {length} tokens: {type(self.causal_lm).__name__} turns all keys anew when a text grows "
                f"past {limit} tokens (config.rope_parameters), and those in the cache would not fit. Ask for fewer "
                "new tokens, or generate without mtp."
            )

    def fingerprint(self) -> str:
        """Identify the target; see ``mtp.fingerprint``."""
        return fingerprint(self.causal_lm, self.config)
