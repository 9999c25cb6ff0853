"""ReDrafter (Cheng et al., arXiv 2403.09919): one recurrent head, used again for every drafted token.

Its state starts at zero and takes in the embedding of one token after the other, the pending one first:
``s <- silu(rnn_w(embedding) + rnn_u(s))``.  A guess is made from the target's last hidden state, the same for the whole
tree, and the state beside it: ``lm_head(input_proj([hidden; s]))``.

The paper searches with beams and folds their common prefixes into a tree.  Here the tree grows best-first from the same
joint probabilities: it holds what a beam as wide would expand, and may keep any candidate that the beam would drop.

Weights are named as in Apple's ``Drafter``: ``input_proj``, ``lm_head.{i}.linear``, ``lm_head.{layers}.weight``,
``rnn_u`` and ``rnn_w``.  What differs: ``lm_head`` guesses over the draft vocabulary and is as wide as the target, and
inputs are divided by ``input_scale``, which ``input_proj.weight`` and ``rnn_w.weight`` can take over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.growing import GrowingConfig, GrowingHead
from mtp.heads.layers import ResidualBlock
from mtp.heads.unrolling import Bases
from mtp.heads.warmstart import ChainRegression, RidgeRegression

GAIN = 0.5  # root mean square of what the activation reads after a warm start: silu(x) is nearly x / 2 there


@dataclass(frozen=True)
class RecurrentConfig(GrowingConfig):
    """Sizes of a ReDrafter head.  ``steps`` is the number of tokens it is trained to draft; trees may be deeper.

    Attributes:
        layers: residual blocks before the output matrix.
    """

    layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(layers=0)


class RecurrentHead(GrowingHead):
    """See the module's text."""

    family: ClassVar[str] = "redrafter"
    attends_to_prompt: ClassVar[bool] = False
    config_class: ClassVar[type[RecurrentConfig]] = RecurrentConfig
    config: RecurrentConfig
    input_scale: Tensor

    def __init__(self, config: RecurrentConfig):
        super().__init__(config)
        width = config.hidden_size
        self.input_proj = nn.Linear(2 * width, width)
        self.rnn_u = nn.Linear(width, width)
        self.rnn_w = nn.Linear(width, width, bias=False)
        blocks = [ResidualBlock(width) for _ in range(config.layers)]
        self.lm_head = nn.Sequential(*blocks, nn.Linear(width, config.draft_vocab_size, bias=False))
        self.add_context_weights()
        self.register_buffer("input_scale", torch.ones(2 * width))

    def take_in(self, tokens: Tensor, state: Tensor) -> Tensor:
        """The recurrent state ``[..., H]`` after ``tokens [...]``, from the one before."""
        embeddings = self.target.embed(tokens).to(self.input_scale) / self.input_scale[self.config.hidden_size :]
        return F.silu(self.rnn_w(embeddings.to(self.rnn_w.weight.dtype)) + self.rnn_u(state))

    def ending(self, hidden: Tensor) -> Tensor:
        """Final hidden states ``[..., H]`` as ``read`` takes them."""
        scaled = hidden.to(self.input_scale) / self.input_scale[: self.config.hidden_size]
        return scaled.to(self.rnn_w.weight.dtype)

    def read(self, ending: Tensor, state: Tensor) -> Tensor:
        """``[..., H]`` what a guess is made from: how the text ends, and the recurrent state."""
        hidden: Tensor = self.lm_head[:-1](self.input_proj(torch.cat([ending, state], dim=-1)))
        return hidden

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        logits: Tensor = self.lm_head[-1](hidden)
        return logits

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        tokens, bases = batch.states.tokens, Bases.of(batch, steps)
        rows, positions = bases.rows, bases.positions
        ending = self.ending(batch.states.hidden[rows, positions])
        state = torch.zeros_like(ending)
        added = self.added_by(self.vocabulary(batch))

        def guess(ending: Tensor, state: Tensor, rows: Tensor, at: Tensor) -> Tensor:
            return self.logits_of(self.read(ending, state), 0, added, rows, at)

        predictions = []
        for step in range(steps):
            following = tokens[rows, (positions + 1 + step).clamp_max(tokens.shape[1] - 1)]
            state = self.recomputed(self.take_in, following, state)
            trained = batch.bases(step + 2)[rows, positions]
            known = rows[trained], positions[trained] + 1 + step
            predictions.append(Prediction(self.recomputed(guess, ending[trained], state[trained], *known), *known))
        return predictions

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Fit the recurrence as a linear one, in the range where its activation nearly is.

        1. ``h[t+1] ~ M h[t] + A e[t+1]``, by least squares;
        2. ``x <- M x + A e``, from zero, is what the tokens taken in add to the next hidden state;
        3. one map of ``[h; x]`` for all steps onto the hidden state that a step guesses from, by least squares.

        The state carries x in a range where ``silu(z) = z / 2 + z^2 / 4`` is nearly ``z / 2``; the mean that the second
        term adds is taken off behind ``input_proj``.
        """
        width = self.config.hidden_size
        fit = ChainRegression(width, self.config.steps, self.input_scale.device)
        for batch in batches:
            bases = Bases.of(batch, self.config.steps)
            fit.add(batch, bases, batch.states.hidden[bases.rows, bases.positions], self.target.embed)
        self.input_scale.copy_(fit.input_scale())
        scale = fit.output_scale()
        transition, entry = fit.solve(0).split(width, dim=1)
        readout, power = _fit_readout(fit, transition.double(), entry.double())
        from_hidden, from_state = (readout / scale).split(width, dim=1)
        from_state = from_state * (2 * scale / GAIN)
        self.rnn_w.weight.copy_(entry * self.input_scale[width:] * (GAIN / scale))
        self.rnn_u.weight.copy_(2 * transition)
        self.rnn_u.bias.zero_()
        self.input_proj.weight.copy_(torch.cat([from_hidden * self.input_scale[:width], from_state], dim=1))
        self.input_proj.bias.copy_(-from_state @ (power * (GAIN / scale) ** 2 / 4))
        for block in self.lm_head:
            if isinstance(block, ResidualBlock):
                block.start_small()
        self.lm_head[-1].get_parameter("weight").copy_(self.target.output.rows(self.draft_ids)[0] * scale)
        if self.config.extends:
            self.context_scale.fill_(scale)

    # ---- decoding -------------------------------------------------------------------------------------------------

    def first(self, pending: Tensor) -> tuple[Tensor, Tensor]:
        return self._after(pending[:, None], torch.zeros_like(self.ending(self.state.hidden)))

    def then(self, tokens: Tensor, carry: Tensor, seen: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return self._after(tokens, carry)

    def _after(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.take_in(tokens, state)
        hidden = self.read(self.ending(self.state.hidden).expand_as(state), state)
        return state, self.extended(self.guess(hidden), hidden)


def _fit_readout(fit: ChainRegression, transition: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The map ``[H, 2H]`` of ``[h[t]; x]`` onto the hidden state that follows, fitted to all steps at once.

    Every x is linear in the embeddings whose moments were taken, so that this needs no second pass over the data.

    Returns:
        the map, and the mean square ``[H]`` of x over all steps.
    """
    width, gram = fit.width, fit.moments.gram
    joint = RidgeRegression(2 * width, width, gram.device)
    joint.count = fit.moments.count * fit.steps
    # Row blocks of ``inputs``: h[t] and x, in terms of the chain's [h[t]; e[t + 1]; ...].
    inputs = gram.new_zeros(2 * width, gram.shape[0])
    inputs[:width, :width].fill_diagonal_(1.0)
    for step in range(fit.steps):
        x = transition @ inputs[width:]
        x[:, fit.block(step + 1)] += entry
        inputs[width:] = x
        joint.gram += inputs @ gram @ inputs.T
        joint.cross += inputs @ fit.moments.cross[:, fit.block(step)]
    power = joint.gram.diagonal()[width:] / joint.count
    return joint.solve(), power.float()
