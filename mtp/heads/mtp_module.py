"""MTP module (DeepSeek-V3, arXiv 2412.19437, section 2.2): a decoder layer of the target's own kind that looks one
token further ahead, and feeds itself to look further still.

The layer reads ``eh_proj [norm(embedding of the next token); norm(hidden)]``; the target's own output matrix makes a
hidden state into logits.  One module is chained to any depth: it reads its own hidden state where the target's is not
known yet, and is trained unrolled.  Where a target ships a module, ``from_target_checkpoint`` loads it as it is; in a
recipe ``head.sizes.shipped=true`` says so, and with ``optim.epochs=0`` it is measured and kept, and not trained.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from mtp.attention import AttentionPass
from mtp.drafters.base import TargetStates
from mtp.heads.autoregressive import Past, UnrolledLayer
from mtp.heads.base import TrainingBatch
from mtp.heads.caching import CachingConfig
from mtp.heads.layers import LayerSizes, gather_positions
from mtp.heads.shipped import checkpoint_folder, shipped_module
from mtp.heads.target_layer import ADVICE, TargetLayer, full_attention_layer
from mtp.heads.target_output import TargetOutputHead
from mtp.heads.unrolling import Bases
from mtp.heads.warmstart import RidgeRegression
from mtp.support import UnsupportedTargetError
from mtp.target import Target

FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm")
# What a decoder layer adds to its residual stream goes through these.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "out_proj", "fc2")


@dataclass(frozen=True)
class MtpModuleConfig(CachingConfig):
    """Sizes of an MTP module; those of attention and MLP are the target's, and stand here for the record.

    Attributes:
        layer: which of the target's layers it is a copy of, in kind.
        chain_normed: a further step reads the hidden state after the last norm (Qwen3-Next, MiMo), not before it
            (DeepSeek-V3).
        hidden_first: ``eh_proj`` reads [hidden; embedding] (MiMo), not [embedding; hidden].
        shipped: it begins as the module that the target's own checkpoint holds.
        precision: of its weights.
    """

    layer: int = 0
    chain_normed: bool = True
    hidden_first: bool = False
    shipped: bool = False
    precision: Literal["float32", "bfloat16", "float16"] = "float32"


class MtpModuleHead(TargetOutputHead):
    """See the module's text."""

    family: ClassVar[str] = "mtp"
    fixed_sizes: ClassVar[frozenset[str]] = frozenset({"taps", *(size.name for size in fields(LayerSizes))})
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

    @classmethod
    def of_sizes(cls, config: Any, target: Target) -> Self:
        return cls(config, target)

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().default_sizes(target, asked), "layer": full_attention_layer(target)}

    @classmethod
    def from_target(cls, target: Target, draft_ids: Tensor, shipped: bool = False, **sizes: Any) -> Self:
        """See ``Head.from_target``.

        Args:
            shipped: take the module of the target's own checkpoint, wherever on this machine that lies.

        Raises:
            UnsupportedTargetError: if it is wanted and there is none.
        """
        if shipped:
            folder = checkpoint_folder(target)
            return cls.from_target_checkpoint(target, folder, draft_ids, **{"precision": "float32", **sizes})
        return super().from_target(target, draft_ids, **sizes)

    @classmethod
    def from_target_checkpoint(
        cls, target: Target, folder: str | Path, draft_ids: Tensor | None = None, **sizes: Any
    ) -> Self:
        """The module that the target's own checkpoint ships, as it is.

        Args:
            target: loaded from ``folder`` (Transformers leaves the module's weights out).
            folder: with the checkpoint's safetensors files, in the names of DeepSeek-V3 and GLM-4.5
                (``model.layers.N.*``), Qwen3-Next (``mtp.*``) or MiMo (``model.mtp_layers.0.*``).
            draft_ids: ``[Vd]`` the draft vocabulary; the whole one by default.

        Raises:
            UnsupportedTargetError: if it ships none, or one that does not fit the target's layers.
        """
        shipped = shipped_module(target, folder)
        of_module = {"chain_normed": shipped.style.chain_normed, "hidden_first": shipped.style.hidden_first}
        head = super().from_target(
            target,
            torch.arange(target.vocab_size, device=target.device) if draft_ids is None else draft_ids,
            **{"precision": str(target.dtype).removeprefix("torch."), **sizes, **of_module, "shipped": True},
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

    def read_states(self, states: TargetStates) -> Tensor:
        return states.hidden.to(self.eh_proj.weight)

    def combine(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.enorm(embedding), self.hnorm(hidden)]
        x = self.eh_proj(torch.cat(parts[::-1] if self.config.hidden_first else parts, dim=-1))
        x = x.to(self.eh_proj.weight.dtype)
        return x, x

    def readable(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.chain_normed else self.norm(hidden)

    def _hidden(self, streamed: Tensor) -> Tensor:
        """The layer's output as a further step reads it."""
        hidden: Tensor = self.norm(streamed) if self.config.chain_normed else streamed
        return hidden

    # ---- training -------------------------------------------------------------------------------------------------

    def unrolled(self, entries: Tensor, bases: Bases) -> UnrolledLayer:
        length = entries.shape[1]

        def run(residual: Tensor, x: Tensor, step: int, past: Past) -> tuple[Tensor, Past]:
            """``past``: keys and values of the text and of the steps so far."""
            cache = DynamicCache()
            if step == 0:
                nothing = torch.zeros(entries.shape[0], dtype=torch.long, device=entries.device)
                streamed = self.layer(entries, AttentionPass.over_chain(length, nothing, 0), cache)
                streamed = streamed[bases.rows, bases.positions]
            else:
                key, value = past
                cache.update(key, value, 0)
                streamed = self.layer.unrolled(bases.spread(x), bases.grid + step, bases.grid, length, cache)
                streamed = streamed[bases.place]
            layer: Any = cache.layers[0]
            return self._hidden(streamed), (layer.keys, layer.values)

        return run

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """``eh_proj`` becomes the linear map onto the target's next final state; the layer starts as the identity.

        What is fitted is the state before the last norm, up to its length: the norm gives it back.  A module that the
        target ships stays as it is.
        """
        if self.config.shipped:
            return
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
        self.eh_proj.weight.copy_(fit.solve())
        for name, parameter in self.layer.block.named_parameters():
            if any(part in OUTPUT_PROJECTIONS for part in name.split(".")):
                parameter.zero_()

    # ---- decoding -------------------------------------------------------------------------------------------------

    def compile_parts(self) -> list[str]:
        """Nothing: its layer runs as the library has it."""
        return []

    def entered(self, embedding: Tensor, hidden: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        cache, (_, x) = self.state.cache, self.combine(embedding, hidden)
        cache.stage(x.shape[1])
        streamed = self.layer(x, AttentionPass.over_chain(x.shape[1], cache.lengths, cache.start), cache)
        cache.commit(None, counts, cache.longest_with(counts))
        after = self._hidden(gather_positions(streamed, (counts - 1)[:, None]))
        return after, self.guess(after)

    def staged(self, embedding: Tensor, hidden: Tensor, attention: AttentionPass) -> tuple[Tensor, Tensor]:
        _, x = self.combine(embedding, hidden)
        after = self._hidden(self.layer(x, attention, self.state.cache))
        return after, self.guess(after)


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
