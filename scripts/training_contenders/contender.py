"""What a contender is: batches in an order, and a step of the optimiser on one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mtp.heads.eagle3 import Eagle3Head
from mtp.target import Target
from train.schedule import warmup_cosine

CLIP_NORM = 1.0


class Contender(ABC):
    """One way of training.

    Attributes:
        batches: of all passes, in order.
        parameters: that are trained.
        start_seconds: what went before the first step, as a warm start of the weights.
    """

    batches: list[list[int]]
    parameters: int
    start_seconds = 0.0
    target: Target

    @abstractmethod
    def step(self, batch: list[int]) -> tuple[int, float]:
        """One step of the optimiser: how many tokens it trained, and the share of right first guesses."""

    @abstractmethod
    def trained(self) -> Eagle3Head:
        """What was trained so far, as this library decodes it."""

    def prepare(self, weights: Iterable[Tensor], settings: dict[str, Any]) -> None:
        """AdamW on ``weights``, at learning rates that fall as ours do."""
        self.optimizer = torch.optim.AdamW(weights, lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warmup_cosine(len(self.batches), 0))

    def descend(self, weights: Iterable[Tensor]) -> None:
        """A step along gradients that were computed."""
        torch.nn.utils.clip_grad_norm_(weights, CLIP_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
