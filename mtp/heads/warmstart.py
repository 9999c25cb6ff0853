"""Least-squares starts: a linear map fitted to the target's own states in one pass, before any gradient step.

On little data a head that starts from such a fit is ahead of one that starts from random weights by a whole pass, and
far ahead of one that starts from a copy of the target's last layer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


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
        """
        gram = self.gram[columns, columns]
        right = (self.cross if cross is None else cross)[columns]
        scale = gram.diagonal().clamp_min(1e-12).sqrt()
        normalised = gram / scale[:, None] / scale
        normalised.diagonal().add_(ridge)
        return (torch.linalg.solve(normalised, right / scale[:, None]) / scale[:, None]).T.float()


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
