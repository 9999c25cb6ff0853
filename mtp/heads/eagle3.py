"""EAGLE-3 (Li et al., arXiv 2503.01840): one decoder layer that reads the target's hidden states.

Three tapped layers of the target are fused by ``fc`` into one hidden state.  The layer reads
``[norm(embedding of the next token); norm(hidden)]`` and gives a hidden state, from which the next token is guessed and
which takes the fused state's place at the next step.  Weights are named and used as vLLM and SGLang expect them.

Positions.  The entry at position t holds token ``t + 1`` and the target's states at t; it guesses token ``t + 2``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mtp.attention import AttentionPass, attend, mask_bias
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Draw, TargetStates
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.heads.base import Head, HeadConfig, Prediction, TrainingBatch
from mtp.heads.layers import GatedMLP, Rotary, gather_positions, rope_parameters, unit_scale
from mtp.heads.unrolling import attend_with_own, base_ranges, spread
from mtp.heads.warmstart import RidgeRegression, carry_linear_map
from mtp.packing import PackedLinears
from mtp.target import Target
from mtp.tree import TokenTree


@dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Sizes of an EAGLE-3 head; see ``HeadConfig`` for those every family has.

    Attributes:
        depth: longest path of drafted tokens in a tree.
        width: nodes expanded a level.
        calibration: for each depth from 1 on, offset and slope of the logit of being accepted over the logit of the
            head's own probability, fitted to held-out text; empty where that was not measured.
    """

    num_heads: int = 8
    head_dim: int = 64
    intermediate_size: int = 1536
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    depth: int = 6
    width: int = 6
    calibration: tuple[tuple[float, float], ...] = ()


class Eagle3Layer(nn.Module):
    """The draft layer.  Its input is twice as wide as its output."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        hidden, inner = config.hidden_size, config.num_heads * config.head_dim
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.q_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.k_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.v_proj = nn.Linear(2 * hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.mlp = GatedMLP(hidden, config.intermediate_size)

    def mix(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """``[..., 2H]`` what queries, keys and values are computed from."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], dim=-1)

    def split_heads(self, x: Tensor) -> Tensor:
        """``[B, T, heads * D] -> [B, heads, T, D]``."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual, output projection and MLP: ``hidden [..., H]``, ``attended [..., heads * D]`` to ``[..., H]``."""
        hidden = hidden + self.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass
class Eagle3State:
    """One generation: entries that were read, and the target's states that wait for the token after them."""

    cache: TreeCache
    unread: TargetStates | None


class Eagle3Head(Head):
    """See the module's text.  Drafts dynamic best-first trees, as EAGLE-2 (arXiv 2406.16858)."""

    family: ClassVar[str] = "eagle3"
    config_class: ClassVar[type[HeadConfig]] = Eagle3Config
    config: Eagle3Config
    state: Eagle3State
    tap_scale: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        if len(config.taps) != 3:
            raise ValueError(f"EAGLE-3 reads three layers of the target; found taps={config.taps}.")
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.register_buffer("tap_scale", torch.ones(3 * config.hidden_size))
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.head_dim, config.rope_parameters, config.max_positions)
        self._packed = PackedLinears(self)

    @classmethod
    def from_target(cls, target: Target, draft_ids: Tensor, **sizes: Any) -> Self:
        text = target.config
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        defaults: dict[str, Any] = {
            "taps": target.default_taps(),
            "num_heads": heads,
            "head_dim": head_dim,
            "intermediate_size": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            "max_positions": target.max_positions or Eagle3Config.max_positions,
            "rope_parameters": rope_parameters(target),
        }
        config = Eagle3Config(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_ids.numel(),
            **{**defaults, **sizes},
        )
        head = cls(config).to(target.device).attach(target)
        head.set_draft_vocabulary(draft_ids)
        return head

    def fuse(self, taps: Tensor) -> Tensor:
        """``[..., 3H] -> [..., H]``: the tapped states as one hidden state.

        Some dimensions of a residual stream are hundreds of times larger than others, and one step of the optimiser
        would move what they feed by as much; so ``fc`` reads every dimension at unit scale.  For engines that know no
        ``tap_scale``, ``fc.weight / tap_scale`` is the same map.
        """
        return self.fc(taps.to(self.tap_scale.dtype) / self.tap_scale).to(self.norm.weight.dtype)

    # ---- training -------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Training-time test: step s reads the hidden states that step s - 1 produced (EAGLE-3, section 3.2).

        At step s a base position sees the true entries up to itself and its own entries of steps 1 to s, exactly what
        a chain sees when it is drafted.
        """
        states, layer = batch.states, self.midlayer
        assert states.taps is not None
        # Under autocast projections give bfloat16; the residual stream stays in the weights' own precision.
        embeddings = self._embed(states.tokens)
        fused = self.fuse(states.taps[:, :-1])
        entries = layer.mix(embeddings[:, 1:], fused)
        everywhere = torch.arange(entries.shape[1], device=entries.device)[None]
        # Positions from which some step's guess is trained, as one range a row [B, P]; all work but attention itself is
        # done on the M real ones among them.
        ranges = base_ranges(batch, steps)
        bases = ranges.clamp(0, entries.shape[1] - 1)
        place = (ranges >= 0).nonzero(as_tuple=True)
        rows, positions = place[0], bases[place]
        key, value = layer.split_heads(layer.k_proj(entries)), layer.split_heads(layer.v_proj(entries))
        (key,) = self.rotary(everywhere, key)
        visible = everywhere[:, None] <= bases[:, :, None]
        hidden, x = fused[rows, positions], entries[rows, positions]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        predictions = []
        for step in range(steps):
            if step > 0:
                nodes = (positions + 1 + step).clamp_max(states.tokens.shape[1] - 1)
                x = layer.mix(embeddings[rows, nodes], hidden)
                own_key = layer.split_heads(spread(layer.k_proj(x), place, bases))
                own_keys.extend(self.rotary(bases + step, own_key))
                own_values.append(layer.split_heads(spread(layer.v_proj(x), place, bases)))
            query = layer.split_heads(spread(layer.q_proj(x), place, bases))
            (query,) = self.rotary(bases + step, query)
            attended = attend_with_own(query, key, value, visible, own_keys, own_values)
            hidden = layer.finish(hidden, attended[place])
            trained = batch.bases(step + 2)[rows, positions]
            logits = self.lm_head(self.norm(hidden[trained]))
            predictions.append(Prediction(logits, rows[trained], positions[trained] + 1 + step))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Fit the layer as a linear map onto the target's final states, and leave the MLP at zero.

        With u the target's final hidden state at unit scale, the layer is to compute ``u[t+1]`` from the next token's
        embedding and from its hidden input, so that a step can follow a step:

        1. ``u[t+1] ~ A e + M u[t]``, with e the normalised embedding of token t + 1; A and M - I become the value and
           output projections of attention heads that look only at their own position;
        2. ``u[t+1] - A e ~ W f``, with f the tapped states: what all three layers know about the next state;
        3. ``fc`` gives, from f, the hidden input whose image under M is closest to W f, near the estimate of u[t].
        """
        width, layer = self.config.hidden_size, self.midlayer
        fit = RidgeRegression(5 * width, width, device=self.fc.weight.device)
        scale = None
        for batch in batches:
            inputs, target = _fit_inputs(self, batch)
            scale = scale or unit_scale(target)
            inputs[:, width : 2 * width] /= scale
            fit.add(inputs, target / scale)
        if scale is None:
            raise ValueError("A warm start needs at least one batch of training rows; found none.")
        step = fit.solve(slice(0, 2 * width))
        a, m = step[:, :width], step[:, width:]
        residual = fit.cross - fit.gram[:, :width] @ a.T.double()
        w = fit.solve(slice(2 * width, None), cross=residual)
        current = fit.solve(slice(2 * width, None), cross=fit.gram[:, width : 2 * width])
        normal = m.T @ m + 0.1 * torch.eye(width, device=m.device)
        fused = current + torch.linalg.solve(normal, m.T @ (w - m @ current))
        self.tap_scale.copy_((fit.gram.diagonal()[2 * width :] / fit.count).sqrt())
        self.fc.weight.copy_(fused * self.tap_scale)
        layer.hidden_norm.weight.fill_(1.0)
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
        identity = torch.eye(width, device=m.device)
        carry_linear_map(layer, torch.cat([a, m - identity], dim=1))
        layer.mlp.down_proj.weight.zero_()
        self.norm.weight.fill_(1.0)
        self.lm_head.weight.copy_(self.target.output_matrix[self.draft_ids] * scale)

    # ---- decoding -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def start(self, states: TargetStates, capacity: int) -> None:
        staged = 2 * self.config.width * self.config.depth
        cache = TreeCache(1, states.tokens.shape[0], capacity + staged, self.fc.weight.device)
        self.state = Eagle3State(cache, states)

    @torch.no_grad()
    def observe(self, states: TargetStates) -> None:
        unread = self.state.unread
        self.state.unread = states if unread is None else unread.then(states)

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        cache = self.state.cache
        cache.select_rows(rows, int(cache.lengths[rows].max()))
        assert self.state.unread is not None
        self.state.unread = self.state.unread.select_rows(rows)

    @torch.no_grad()
    def rewind(self, length: int) -> int:
        """The entry at a position holds the token after it: the last one that is known to stay is one token short."""
        kept = max(min(length - 1, int(self.state.cache.lengths[0])), 0)
        self.state.cache.crop(kept)
        self.state.unread = None
        return kept

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        with self._packed.active():
            hidden, logits = self._read(pending)
            if draw is None:
                return self._grow_best_first(pending, budget, hidden, logits)
            return self._grow_drawn(pending, budget, hidden, logits, draw)

    def _read(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        """Enter what was committed since the last call, and guess what follows the pending tokens.

        Returns hidden states ``[B, 1, H]`` and logits ``[B, 1, Vd]`` of the roots.
        """
        states, layer, cache = self.state.unread, self.midlayer, self.state.cache
        assert states is not None
        assert states.taps is not None
        last = (states.counts - 1)[:, None]
        following = torch.cat([states.tokens[:, 1:], pending[:, None]], dim=1).scatter(1, last, pending[:, None])
        fused = self.fuse(states.taps)
        entries = layer.mix(self._embed(following), fused)
        cache.stage(entries.shape[1])
        attention = AttentionPass.over_chain(entries.shape[1], cache.lengths, cache.start)
        (key,) = self.rotary(attention.positions, layer.split_heads(layer.k_proj(entries)))
        key, value = cache.update(key, layer.split_heads(layer.v_proj(entries)), 0)
        # Only the last entry of a row guesses; the others are there to be looked back at.
        position = attention.positions.gather(1, last)
        (query,) = self.rotary(position, layer.split_heads(layer.q_proj(gather_positions(entries, last))))
        mask = attention.mask(None, query.device)
        mask = mask.gather(1, last[..., None].expand(-1, -1, mask.shape[2]))
        attended = attend(query, key, value, mask_bias(mask, 1, query.dtype), self.config.head_dim**-0.5).flatten(2)
        hidden = layer.finish(gather_positions(fused, last), attended)
        everything = torch.arange(entries.shape[1], device=entries.device).expand(entries.shape[0], -1)
        longest = int((cache.lengths + states.counts).max())
        cache.commit(everything, states.counts, longest)
        self.state.unread = None
        return hidden, self.lm_head(self.norm(hidden))

    def _grow_best_first(self, pending: Tensor, budget: Budget, hidden: Tensor, logits: Tensor) -> TokenTree:
        growth = BestFirstGrowth(pending, budget, self.config.width, self._calibrated)
        growth.add(torch.log_softmax(logits.float(), dim=-1), self.draft_ids)
        for depth in range(1, self.config.depth):
            if not growth.pays_to_go_on():
                break
            tokens, picked, mask = growth.frontier()
            hidden, logits = self._step(tokens, gather_positions(hidden, picked), mask, depth)
            growth.add(torch.log_softmax(logits.float(), dim=-1), self.draft_ids)
        self.state.cache.discard()
        return growth.tree()

    def _grow_drawn(self, pending: Tensor, budget: Budget, hidden: Tensor, logits: Tensor, draw: Draw) -> TokenTree:
        # The shape of a drawn tree must not depend on what is drawn, so costs cannot cut it: it has the head's size.
        nodes = budget.nodes if budget.costs is None else min(budget.nodes, self.config.nodes)
        branching, expanded = drawn_widths(nodes, min(self.config.depth, budget.levels or self.config.depth))
        if not expanded:
            return TokenTree.root_only(pending)
        growth = BestFirstGrowth(pending, budget, width=branching)
        for depth, width in enumerate(expanded):
            if depth > 0:
                tokens, picked, mask = growth.frontier(width)
                hidden, logits = self._step(tokens, gather_positions(hidden, picked), mask, depth)
            growth.add(draw.log_probs(logits), self.draft_ids, draw)
        self.state.cache.discard()
        return growth.drawn_tree(self.config.vocab_size)

    def _step(self, tokens: Tensor, parents_hidden: Tensor, staged_mask: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """One level of the tree: ``tokens [B, W]`` whose parents gave ``parents_hidden [B, W, H]``."""
        layer, cache = self.midlayer, self.state.cache
        cache.stage(tokens.shape[1])
        x = layer.mix(self._embed(tokens), parents_hidden)
        positions = (cache.lengths + (depth - 1))[:, None].expand_as(tokens)
        attention = AttentionPass(cache.lengths, cache.start, positions, staged_mask, positions)
        query, key = (layer.split_heads(project(x)) for project in (layer.q_proj, layer.k_proj))
        query, key = self.rotary(positions, query, key)
        key, value = cache.update(key, layer.split_heads(layer.v_proj(x)), 0)
        mask = attention.mask(None, x.device)
        attended = attend(query, key, value, mask_bias(mask, 1, query.dtype), self.config.head_dim**-0.5).flatten(2)
        hidden = layer.finish(parents_hidden, attended)
        return hidden, self.lm_head(self.norm(hidden))

    def _calibrated(self, log_q: Tensor, depth: int) -> Tensor:
        """Log-probability of being accepted, from the head's own; see ``Eagle3Config.calibration``."""
        if not self.config.calibration:
            return log_q
        offset, slope = self.config.calibration[min(depth, len(self.config.calibration)) - 1]
        return F.logsigmoid(offset + slope * torch.logit(log_q.exp(), eps=1e-6))

    def set_calibration(self, calibration: tuple[tuple[float, float], ...]) -> None:
        self.config = replace(self.config, calibration=calibration)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens).to(self.fc.weight)


def _fit_inputs(head: Eagle3Head, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """``[M, 5H]`` (normalised next embedding, final state, tapped states) and ``[M, H]`` (next final state)."""
    states = batch.states
    assert states.taps is not None
    rows, bases = batch.bases(2).nonzero(as_tuple=True)
    embedding = head.target.embed(states.tokens[rows, bases + 1]).float()
    embedding = embedding * torch.rsqrt(embedding.pow(2).mean(-1, keepdim=True) + head.config.rms_norm_eps)
    inputs = torch.cat([embedding, states.hidden[rows, bases], states.taps[rows, bases]], dim=-1)
    return inputs, states.hidden[rows, bases + 1]
