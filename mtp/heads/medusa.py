"""Medusa-1 (Cai et al., arXiv 2401.10774): heads that each guess one position further ahead, on a frozen target.

Head i reads the target's final hidden state at position t and guesses token ``t + 2 + i``.  It is ``layers`` residual
SiLU blocks and an output matrix of its own.  Heads do not see each other's guesses, so the tree is the same every
round: a static sparse tree over the ranks of their guesses, chosen from accuracies measured on held-out data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtp.drafters.base import Budget, Draw
from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.context_vocabulary import OutputRows
from mtp.heads.extending import ExtendingConfig, ExtendingHead
from mtp.heads.layers import ResidualBlock
from mtp.heads.warmstart import RidgeRegression
from mtp.packing import PackedLinears
from mtp.static_tree import best_static_tree, static_tree
from mtp.tree import TokenTree

RANKS = 10  # guesses of one head that a tree may hold


@dataclass(frozen=True)
class MedusaConfig(ExtendingConfig):
    """Sizes of a Medusa head.  ``steps`` is the number of heads.

    Attributes:
        layers: residual blocks of each head.
        rank_accuracy: ``[steps][RANKS]`` how often each head's guess of each rank was right on held-out data; what
            the tree is made from.  Until it is measured, a typical fall-off stands in.
    """

    layers: int = 1
    rank_accuracy: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(layers=0)

    def accuracies(self) -> tuple[tuple[float, ...], ...]:
        """``[steps][ranks]``, with no more ranks than the draft vocabulary has tokens."""
        ranks = min(RANKS, self.draft_vocab_size)
        if self.rank_accuracy:
            return tuple(tuple(step[:ranks]) for step in self.rank_accuracy)
        return tuple(tuple(0.4 * 0.75**step * 0.4**rank for rank in range(ranks)) for step in range(self.steps))


class MedusaHead(ExtendingHead):
    """See the module's text."""

    family: ClassVar[str] = "medusa"
    attends_to_prompt: ClassVar[bool] = False
    reads_embeddings: ClassVar[bool] = False
    config_class: ClassVar[type[MedusaConfig]] = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        width = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(config.layers))) for _ in range(config.steps)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False) for _ in range(config.steps)
        )
        if config.extends:  # where the target's rows would read each head's guess, which lm_heads read as it is
            self.context_maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(config.steps))
        self.add_context_weights(config.steps)

    def think(self, states: Tensor, step: int) -> Tensor:
        """``[..., H]`` behind the blocks of head ``step``, from final hidden states ``[..., H]``."""
        hidden: Tensor = self.blocks[step](states)
        return hidden

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        logits: Tensor = self.lm_heads[step](hidden)
        return logits

    def guess_context(self, hidden: Tensor, rows: OutputRows, step: int = 0) -> Tensor:
        return super().guess_context(self.context_maps[step](hidden), rows, step)

    def output_matrix(self, step: int) -> Tensor:
        """``[Vd, H]`` of head ``step``."""
        return self.lm_heads[step].get_parameter("weight")

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        added = self.added_by(self.vocabulary(batch))

        def guess(states: Tensor, step: int, rows: Tensor, at: Tensor) -> Tensor:
            return self.logits_of(self.think(states, step), step, added, rows, at)

        predictions = []
        states = batch.states.hidden.to(self.output_matrix(0).dtype)
        for step in range(min(steps, self.config.steps)):
            rows, bases = batch.bases(step + 2).nonzero(as_tuple=True)
            known = rows, bases + 1 + step
            predictions.append(Prediction(self.recomputed(guess, states[rows, bases], step, *known), *known))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Head i starts as a linear map of the final state at t onto that at ``t + 1 + i``, read by the target's own
        output matrix; the residual blocks start as the identity."""
        width = self.config.hidden_size
        device = self.draft_ids.device
        fits = [RidgeRegression(width, width, device) for _ in range(self.config.steps)]
        for batch in batches:
            for step, fit in enumerate(fits):
                rows, bases = batch.bases(step + 2).nonzero(as_tuple=True)
                hidden = batch.states.hidden
                fit.add(hidden[rows, bases], hidden[rows, bases + 1 + step])
        output = self.target.output.rows(self.draft_ids)[0].float()
        for step, fit in enumerate(fits):
            onto_next = fit.solve()
            self.output_matrix(step).copy_(output @ onto_next)
            if self.config.extends:
                self.context_maps[step].get_parameter("weight").copy_(onto_next)
        for parameter in self.blocks.parameters():
            parameter.zero_()

    def best_rule(self, temperature: float) -> str:
        """Its trees are static, drawn or not, and draws from all of its distribution reach further (measured)."""
        return "traversal"

    def set_rank_accuracy(self, rank_accuracy: tuple[tuple[float, ...], ...]) -> None:
        self.config = replace(self.config, rank_accuracy=rank_accuracy)

    # ---- decoding -------------------------------------------------------------------------------------------------

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(self)

    def refresh(self) -> None:
        self._packed.refresh()  # some optimisers change weights without counting it

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        if budget.costs is None:
            tree = static_tree(self.config.accuracies(), budget.nodes)
        else:
            tree = best_static_tree(self.config.accuracies(), budget.nodes, budget.costs)
        depth = max(tree.depths)
        if depth == 0:
            return TokenTree.root_only(pending)
        self.read_pending(pending)
        with self._packed.active():
            logits = torch.cat([self._guess(step) for step in range(depth)], dim=1).float()
        log_probs = logits.log_softmax(-1) if draw is None else draw.log_probs(logits)
        count = max(tree.ranks) + 1
        batch, device = pending.shape[0], pending.device
        depths = torch.tensor(tree.depths, device=device)
        ranks = torch.tensor(tree.ranks, device=device)
        if draw is None:
            choice = log_probs.topk(count).indices[:, depths[1:] - 1]
        else:
            # A node's children are its own draws, although all nodes of a depth draw from the same distribution:
            # traversal verification is not exact for nodes that share theirs.
            parents, place = torch.tensor(tree.parents[1:], device=device).unique(return_inverse=True)
            choice = draw.children(log_probs[:, depths[parents]], count)[:, place]
        picked = choice.gather(2, ranks[1:, None].expand(batch, -1, 1))[..., 0]
        log_q = log_probs[:, depths[1:] - 1].gather(2, picked[..., None])[..., 0]
        return TokenTree(
            tokens=torch.cat([pending[:, None], self.guessable[picked]], dim=1),
            parents=torch.tensor(tree.parents, device=device).expand(batch, -1),
            depths=depths.expand(batch, -1),
            valid=torch.ones(batch, len(tree.parents), dtype=torch.bool, device=device),
            log_q=torch.cat([log_q.new_zeros(batch, 1), log_q], dim=1),
            worth=torch.tensor(tree.worths, device=device).expand(batch, -1) if draw is None else None,
            q=None if draw is None else self._dense_q(log_probs, depths),
        )

    def _guess(self, step: int) -> Tensor:
        """``[B, 1, V']`` logits of head ``step``, for the text at hand."""
        hidden = self.think(self.state.hidden.to(self.output_matrix(step).dtype), step)
        return self.extended(self.guess(hidden, step), hidden, step)

    def _dense_q(self, log_probs: Tensor, depths: Tensor) -> Tensor:
        """``[B, N, V]``: what the children of each node were drawn from; zero at the deepest nodes, which have none."""
        batch, steps, _ = log_probs.shape
        dense = log_probs.new_zeros(batch, steps + 1, self.config.vocab_size)
        dense[:, :steps, self.guessable] = log_probs.exp()
        return dense[:, depths]
