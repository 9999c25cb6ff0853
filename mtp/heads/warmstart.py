"""Least-squares starts: a linear map fitted to the target's own states in one pass, before any gradient step.

On little data a head that starts from such a fit is ahead of one that starts from random weights by a whole pass, and
far ahead of one that starts from a copy of the target's last layer.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
