"""Least-squares starts: a linear map fitted to the target's own states in one pass, before any gradient step.

On little data a head that starts from such a fit is ahead of one that starts from random weights by a whole pass, and
far ahead of one that starts from a copy of the target's last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from mtp.heads.base import TrainingBatch
from mtp.heads.unrolling import Bases


class TooFewRowsError(ValueError):
    """A warm start saw no position that it could be fitted to.

    Args:
        missing: what answers there must be, behind "answers".
    """

    def __init__(self, missing: str):
        super().__init__(
            f"A warm start needs answers {missing}; found none among the training rows given. Use more or longer rows, "
            "fewer head.steps, or head.warm_start_positions=0."
        )


class RidgeRegression:
    """Accumulates ``X'X`` and ``X'Y`` over batches and solves for the map from some columns of X to Y.

    Args:
        inputs: columns of X.
        outputs: columns of Y.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | str = "cpu"):
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64, device=device)
        self.cross = torch.zeros(inputs, outputs, dtype=torch.float64, device=device)
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Take in observations ``x [M, inputs]``, ``y [M, outputs]``."""
        x, y = x.float(), y.float()
        self.gram += x.T @ x
        self.cross += x.T @ y
        self.count += x.shape[0]

    def solve(self, columns: slice = slice(None), cross: Tensor | None = None, ridge: float = 1e-2) -> Tensor:
        """``W [outputs, len(columns)]`` minimising ``|X[:, columns] W' - Y|^2`` plus a ridge.

        Args:
            columns: which inputs to use.
            cross: another right-hand side ``X'Y`` ``[inputs, outputs]``; for example with a part of Y explained away.
            ridge: penalty relative to each input's own variance, so that inputs of any scale are treated alike.

        Raises:
            TooFewRowsError: if nothing was taken in.
        """
        if not self.count:
            raise TooFewRowsError("long enough for every head.step")
        gram = self.gram[columns, columns]
        right = (self.cross if cross is None else cross)[columns]
        scale = gram.diagonal().clamp_min(1e-12).sqrt()
        normalised = gram / scale[:, None] / scale
        normalised.diagonal().add_(ridge)
        return (torch.linalg.solve(normalised, right / scale[:, None]) / scale[:, None]).T.float()


class ChainRegression:
    """How the target's next final states follow, linearly, from one of them and from the tokens in between.

    The moments of ``[x[t]; e[t + 1]; ...; e[t + steps]]`` and ``h[t + 1], ..., h[t + steps]``, where e are embeddings,
    h the target's final hidden states, and x what a head reads in their place.  One pass gives the fits of all steps.

    Args:
        width: of each state.
        steps: length of the chain.
    """

    def __init__(self, width: int, steps: int, device: torch.device | str = "cpu"):
        self.width, self.steps = width, steps
        self.moments = RidgeRegression((1 + steps) * width, steps * width, device)
        self._power = 0.0

    def add(self, batch: TrainingBatch, bases: Bases, states: Tensor, embed: Callable[[Tensor], Tensor]) -> None:
        """Take in the base positions whose whole chain is trained; ``states [M, H]`` are the x at all of them."""
        tokens, hidden = batch.states.tokens, batch.states.hidden
        whole = (batch.bases(2) & batch.bases(self.steps + 1))[bases.rows, bases.positions]
        rows, positions = bases.rows[whole], bases.positions[whole]
        chain = range(1, self.steps + 1)
        inputs = [states[whole], *(embed(tokens[rows, positions + k]) for k in chain)]
        following = torch.cat([hidden[rows, positions + k] for k in chain], dim=-1)
        self.moments.add(torch.cat(inputs, dim=-1), following)
        self._power += float(following.float().pow(2).sum())

    def block(self, first: int, count: int = 1) -> slice:
        """Columns of ``count`` states or embeddings from the ``first`` on; 0 is x."""
        return slice(first * self.width, (first + count) * self.width)

    def input_scale(self) -> Tensor:
        """``[2H]`` root mean square of each dimension of x, and of each of an embedding.

        Raises:
            TooFewRowsError: if nothing was taken in.
        """
        if self.moments.count == 0:
            raise TooFewRowsError(f"of at least {self.steps} tokens")
        power = self.moments.gram.diagonal().unflatten(0, (1 + self.steps, self.width)) / self.moments.count
        return torch.cat([power[0], power[1:].mean(0)]).clamp_min(1e-12).sqrt().float()

    def output_scale(self) -> float:
        """Root mean square over all entries of the states that follow."""
        return (self._power / (self.moments.count * self.steps * self.width)) ** 0.5

    def solve(self, step: int) -> Tensor:
        """``[H, (step + 2) H]``: ``h[t + 1 + step]`` from x and the embeddings of the tokens up to it."""
        return self.moments.solve(self.block(0, step + 2), cross=self.moments.cross[:, self.block(step)])


class AttentionProjections(Protocol):
    """What ``carry_linear_map`` needs of a layer."""

    num_heads: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


@torch.no_grad()
def carry_linear_map(layer: AttentionProjections, linear_map: Tensor) -> None:
    """Make two thirds of the heads carry ``linear_map [H, 2H]`` of a position's own input; leave the rest free.

    A carrying head has equal query and key projections of the embedding half: a position's score with itself is then
    the largest, since other tokens' embeddings are nearly orthogonal and the rotation sets repeats of the same token
    apart.  Its values and output are a slice of the map's singular vectors.  Free heads start with an output of zero.
    """
    heads, dim = layer.num_heads, layer.head_dim
    width = linear_map.shape[0]
    carrying = max(1, (2 * heads) // 3)
    rank = min(carrying * dim, width)
    left, singular, right = torch.linalg.svd(linear_map, full_matrices=False)
    root = singular[:rank].sqrt()
    layer.v_proj.weight.normal_(0, (2 * width) ** -0.5)
    layer.o_proj.weight.zero_()
    layer.v_proj.weight[:rank] = root[:, None] * right[:rank]
    layer.o_proj.weight[:, :rank] = left[:, :rank] * root
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.normal_(0, (2 * width) ** -0.5)
    sharpness = 16.0  # a position's score with itself, before the softmax
    basis = torch.linalg.qr(torch.randn(width, min(width, carrying * dim), device=linear_map.device)).Q.T
    for head in range(carrying):
        part = basis[torch.arange(head * dim, (head + 1) * dim) % basis.shape[0]]
        block = torch.zeros(dim, 2 * width, device=linear_map.device)
        block[:, :width] = part * (sharpness * dim**-0.5) ** 0.5
        for projection in (layer.q_proj, layer.k_proj):
            projection.weight[head * dim : (head + 1) * dim] = block
