"""Which rows make which batch and when: one order for a run, whatever the number of processes that share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from mtp.heads import TrainingBatch
from train.data import Row, length_batches
from train.features import FeatureSource


@dataclass(frozen=True)
class BatchOrder:
    """Every batch of a run, one after the other; the same for the same rows, seed and size of a batch.

    Attributes:
        rows: training rows.
        positions: budget of a batch in padded positions.
        epochs: passes over the rows; each has batches of its own.
        seed: of the shuffling.
    """

    rows: Sequence[Row]
    positions: int
    epochs: int
    seed: int

    def epoch(self, epoch: int) -> list[list[int]]:
        """The batches of one pass, as indices of rows."""
        generator = np.random.default_rng([self.seed, epoch])
        return length_batches([len(row) for row in self.rows], self.positions, generator)

    def count(self) -> int:
        """Batches of the whole run."""
        return sum(len(self.epoch(epoch)) for epoch in range(self.epochs))

    def steps(self, size: int, first: int = 0) -> Iterator[list[list[int]]]:
        """The run in optimiser steps of ``size`` batches, from step ``first`` on.

        Steps go on across the end of a pass; what is left at the end of the run and fills no step is not trained on.
        """
        every = (batch for epoch in range(self.epochs) for batch in self.epoch(epoch))
        batches = islice(every, first * size, None)
        while len(step := list(islice(batches, size))) == size:
            yield step

    def sample(self, positions: int) -> list[list[int]]:
        """Batches, short rows first, of random rows with at least so many response positions (or of all rows)."""
        chosen: list[int] = []
        for index in np.random.default_rng(self.seed).permutation(len(self.rows)).tolist():
            if positions <= 0:
                break
            chosen.append(index)
            positions -= len(self.rows[index].response_ids)
        batches = length_batches([len(self.rows[index]) for index in chosen], self.positions, generator=None)
        return [[chosen[at] for at in batch] for batch in batches]


def trained_positions(rows: Sequence[Row], steps: int) -> Tensor:
    """``[steps]`` how many tokens of ``rows`` each unrolled step trains: those of a response from position 2 + s on.

    It follows from lengths alone, so that every process knows the count of all of them without asking.
    """
    first = torch.arange(steps) + 2
    starts = torch.tensor([len(row.prompt_ids) for row in rows])
    ends = torch.tensor([len(row) for row in rows])
    return (ends[:, None] - torch.maximum(starts[:, None], first)).clamp_min(0).sum(0)


def training_batch(features: FeatureSource, indices: Sequence[int]) -> TrainingBatch:
    """Rows ``indices`` with their states; exactly the response tokens are marked for training."""
    states = features.batch(indices)
    position = torch.arange(states.tokens.shape[1], device=states.tokens.device)
    starts = torch.tensor([features.response_start(i) for i in indices], device=states.tokens.device)
    return TrainingBatch(states, (position >= starts[:, None]) & states.valid)
