"""MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2): a decoder layer of the target's own kind that looks one
token further ahead, and feeds itself to look further still.

The layer reads ``eh_proj [norm(embedding of the next token); norm(hidden)]``; the target's own output matrix makes a
hidden state into logits.  One module is chained to any depth: it reads its own hidden state where the target's is not
known yet, and is trained unrolled.  Where a target ships a module, ``from_target_checkpoint`` loads it as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from mtp.attention import AttentionPass
from mtp.drafters.base import TargetStates
from mtp.heads.autoregressive import AutoregressiveConfig, AutoregressiveHead, layer_sizes
from mtp.heads.base import TrainingBatch
from mtp.heads.layers import gather_positions
from mtp.heads.shipped import shipped_module
from mtp.heads.target_layer import ADVICE, TargetLayer, full_attention_layer
from mtp.heads.unrolling import Bases
from mtp.heads.warmstart import RidgeRegression
from mtp.packing import PackedLinears
from mtp.support import UnsupportedTargetError
from mtp.target import Target

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm")
# What a decoder layer adds to its residual stream goes through these.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "out_proj", "fc2")


@dataclass(frozen=True)
class MtpModuleConfig(AutoregressiveConfig):
    """Sizes of an MTP module; those of attention and MLP are the target's, and stand here for the record.

    Attributes:
        layer: which of the target's layers it is a copy of, in kind.
        chain_normed: a further step reads the hidden state after the last norm (Qwen3-Next, MiMo), not before it
            (DeepSeek-V3).
        hidden_first: ``eh_proj`` reads [hidden; embedding] (MiMo), not [embedding; hidden].
        precision: of its weights.
    """

    layer: int = 0
    chain_normed: bool = True
    hidden_first: bool = False
    precision: str = "float32"


class MtpModuleHead(AutoregressiveHead):
    """See the module's text."""

    family: ClassVar[str] = "mtp"
    config_class: ClassVar[type[MtpModuleConfig]] = MtpModuleConfig
    config: MtpModuleConfig

    def __init__(self, config: MtpModuleConfig, target: Target):
        super().__init__(config)
        norm = final_norm(target)
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm).requires_grad_(True) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = TargetLayer(target, config.layer)
        # Parameters only: rotary tables stay in the precision that they were made in.
        for parameter in self.parameters():
            parameter.data = parameter.data.to(getattr(torch, config.precision))
        self._output: tuple[nn.Linear, ...] = ()

    @classmethod
    def restore(cls, config: Any, target: Target) -> Self:
        return cls(config, target)

    @classmethod
    def from_target(cls, target: Target, draft_ids: Tensor, **sizes: Any) -> Self:
        config = MtpModuleConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_ids.numel(),
            **{"layer": full_attention_layer(target), **layer_sizes(target), **sizes},
        )
        head = cls(config, target).to(target.device).attach(target)
        head.set_draft_vocabulary(draft_ids)
        return head

    @classmethod
    def from_target_checkpoint(cls, target: Target, folder: str | Path, **sizes: Any) -> Self:
        """The module that the target's own checkpoint ships, as it is, over the whole vocabulary.

        Args:
            target: loaded from ``folder`` (Transformers leaves the module's weights out).
            folder: with the checkpoint's safetensors files, in the names of DeepSeek-V3 and GLM-4.5
                (``model.layers.N.*``), Qwen3-Next (``mtp.*``) or MiMo (``model.mtp_layers.0.*``).

        Raises:
            UnsupportedTargetError: if it ships none, or one that does not fit the target's layers.
        """
        shipped = shipped_module(target, folder)
        head = cls.from_target(
            target,
            torch.arange(target.vocab_size, device=target.device),
            chain_normed=shipped.style.chain_normed,
            hidden_first=shipped.style.hidden_first,
            precision=str(target.dtype).removeprefix("torch."),
            **sizes,
        )
        own = {"draft_ids": head.draft_ids}
        missing, unexpected = head.load_state_dict({**shipped.tensors, **own}, strict=False)
        if missing or unexpected:
            raise UnsupportedTargetError(
                f"The MTP module in {folder} ({shipped.style.name} names) does not fit a "
                f"{type(target.layers[head.config.layer]).__name__}: missing {', '.join(missing) or 'nothing'}; "
                f"unexpected {', '.join(unexpected) or 'nothing'}."
            )
        return head

    def attach(self, target: Target) -> Self:
        weight = target.output_matrix
        if type(weight) is not nn.Parameter or weight.device.type == "meta":
            raise UnsupportedTargetError(f"The target's output matrix is quantised or offloaded. {ADVICE}")
        self._output = ()
        return super().attach(target)

    def set_draft_vocabulary(self, draft_ids: Tensor) -> None:
        super().set_draft_vocabulary(draft_ids)
        self._output = ()

    def read_states(self, states: TargetStates) -> Tensor:
        return states.hidden.to(self.eh_proj.weight)

    def combine(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.enorm(embedding), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        x = x.to(self.eh_proj.weight.dtype)
        return x, x

    def guess(self, hidden: Tensor) -> Tensor:
        output = self._output_rows()
        return self.target.scale_logits(output(hidden if self.config.chain_normed else self.norm(hidden)))

    def _output_rows(self) -> nn.Linear:
        """The target's output matrix, its rows for the draft vocabulary; frozen, and no weights of the head's own."""
        if not self._output:
            layer = self.target.causal_lm.get_output_embeddings()
            rows = nn.Linear(
                self.config.hidden_size, self.draft_ids.numel(), bias=layer.bias is not None, device="meta"
            )
            kept = {name: weight.detach() for name, weight in layer.named_parameters()}
            if not torch.equal(self.draft_ids, torch.arange(self.config.vocab_size, device=self.draft_ids.device)):
                kept = {name: weight[self.draft_ids.to(weight.device)] for name, weight in kept.items()}
            kept = {name: weight.to(self.eh_proj.weight) for name, weight in kept.items()}
            rows.load_state_dict(kept, assign=True)
            self._output = (rows.requires_grad_(False),)
        return self._output[0]

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(nn.ModuleList([self, self._output_rows()]))

    def _hidden(self, streamed: Tensor) -> Tensor:
        """The layer's output as a further step reads it."""
        hidden: Tensor = self.norm(streamed) if self.config.chain_normed else streamed
        return hidden

    # ---- training -------------------------------------------------------------------------------------------------

    def unrolled(self, entries: Tensor, bases: Bases) -> Callable[[Tensor, Tensor, int], Tensor]:
        nothing = torch.zeros(entries.shape[0], dtype=torch.long, device=entries.device)
        cache = DynamicCache()
        true = self.layer(entries, AttentionPass.over_chain(entries.shape[1], nothing, 0), cache)
        visible = torch.arange(entries.shape[1], device=entries.device) <= bases.grid[:, :, None]

        def run(residual: Tensor, x: Tensor, step: int) -> Tensor:
            if step == 0:
                return self._hidden(true[bases.rows, bases.positions])
            streamed = self.layer.unrolled(bases.spread(x), bases.grid + step, visible, cache)
            return self._hidden(streamed[bases.place])

        return run

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """``eh_proj`` becomes the linear map onto the target's next final state; the layer starts as the identity.

        What is fitted is the state before the last norm, up to its length: the norm gives it back.
        """
        scale, shift = affine_of(self.norm, self.config.hidden_size)
        fit = RidgeRegression(2 * self.config.hidden_size, self.config.hidden_size, self.draft_ids.device)
        for batch in batches:
            rows, bases = batch.bases(2).nonzero(as_tuple=True)
            hidden = self.read_states(batch.states)
            parts = [self.enorm(self._embed(batch.states.tokens[rows, bases + 1])), self.hnorm(hidden[rows, bases])]
            fit.add(
                torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1),
                (hidden[rows, bases + 1] - shift) / scale,
            )
        if not fit.count:
            raise ValueError("A warm start needs at least one batch of training rows; found none.")
        self.eh_proj.weight.copy_(fit.solve())
        for name, parameter in self.layer.block.named_parameters():
            if any(part in OUTPUT_PROJECTIONS for part in name.split(".")):
                parameter.zero_()

    # ---- decoding -------------------------------------------------------------------------------------------------

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        states, cache = self.state.unread, self.state.cache
        assert states is not None
        last = (states.counts - 1)[:, None]
        following = torch.cat([states.tokens[:, 1:], pending[:, None]], dim=1).scatter(1, last, pending[:, None])
        _, x = self.combine(self._embed(following), self.read_states(states))
        cache.stage(x.shape[1])
        streamed = self.layer(x, AttentionPass.over_chain(x.shape[1], cache.lengths, cache.start), cache)
        cache.commit(None, states.counts, cache.longest_with(states.counts))
        self.state.unread = None
        hidden = self._hidden(gather_positions(streamed, last))
        return hidden, self.guess(hidden)

    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        cache = self.state.cache
        cache.stage(tokens.shape[1])
        _, x = self.combine(self._embed(tokens), carry)
        positions = (cache.lengths + (depth - 1))[:, None].expand_as(tokens)
        # Staged nodes' own positions matter to windows alone, and the layer sees everything.
        attention = AttentionPass(cache.lengths, cache.start, positions, seen, positions)
        hidden = self._hidden(self.layer(x, attention, cache))
        return hidden, self.guess(hidden)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.eh_proj.weight)


def final_norm(target: Target) -> nn.Module:
    """The norm behind the target's last layer."""
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(target.backbone, name, None), nn.Module):
            return norm
    raise UnsupportedTargetError(
        f"{type(target.backbone).__name__} has no final norm under any of the names {', '.join(FINAL_NORMS)}. {ADVICE}"
    )


def affine_of(norm: nn.Module, width: int) -> tuple[Tensor, Tensor]:
    """Scale and shift ``[H]`` that a norm applies, whatever it calls them (1 + weight, for some)."""
    weight = next(norm.parameters())
    probe = torch.ones(width, device=weight.device, dtype=weight.dtype)  # of unit variance, and mean 0
    probe[1::2] = -1
    plus, minus = norm(probe), norm(-probe)
    scale = (plus - minus) / 2 * probe
    return torch.where(scale.abs() < 1e-3, torch.full_like(scale, 1e-3), scale), (plus + minus) / 2
