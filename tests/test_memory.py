"""What a training step of a head takes in memory: nothing that grows with a row's square, and less where asked to."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import mtp.heads.unrolling
from mtp.heads import HEADS, Head, TrainingBatch
from mtp.target import Target
from tests.memory import CountedBytes
from tests.tiny import random_prompts, tiny_head, tiny_target
from train.batches import trained_positions, training_batch
from train.config import ConfigError, OptimConfig
from train.data import Row
from train.features import OnlineFeatures
from train.fitting import refuse_unfit_objective
from train.objective import objective

FAMILIES = sorted(HEADS)
RECOMPUTING = [family for family in FAMILIES if HEADS[family].recomputes]
STEPS = 3
SIZES = {"mtp": {}, "assistant": {}, "block": {"layers": 2}}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def rows_of(*lengths: int, prompt: int = 7) -> list[Row]:
    return [Row(tuple(ids[:prompt]), tuple(ids[prompt:])) for ids in random_prompts(lengths, seed=5)]


def batch_of(target: Target, head: Head, rows: list[Row]) -> TrainingBatch:
    return training_batch(OnlineFeatures(target, rows, head.taps), range(len(rows)))


def take_step(head: Head, batch: TrainingBatch, rows: list[Row], narrow: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The loss of a training step and its gradients; what is drawn at random is drawn alike every time."""
    torch.manual_seed(1)
    head.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if narrow else nullcontext():
        predictions = head(batch, STEPS)
    loss, _ = objective(head, batch, predictions, OptimConfig(), trained_positions(rows, STEPS))
    del predictions
    loss.backward()
    return loss.detach(), [weight.grad.clone() for weight in head.parameters() if weight.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_of_a_step_grows_with_the_square_of_a_row(
    family: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp.heads.unrolling, "QUERIES", 16)
    head = tiny_head(family, target, **SIZES.get(family, {})).train()
    largest, peak = [], []
    for length in (256, 512):
        rows = rows_of(length)
        batch = batch_of(target, head, rows)
        with CountedBytes() as count:
            take_step(head, batch, rows)
        largest.append(count.largest)
        peak.append(count.peak)
    assert largest[1] <= 2.1 * largest[0]
    assert peak[1] <= 2.1 * peak[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_in_many_blocks_trains_as_in_one(family: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_head(family, target, **SIZES.get(family, {})).train()
    rows = rows_of(40, 23, 9)
    batch = batch_of(target, head, rows)
    loss, gradients = take_step(head, batch, rows)
    monkeypatch.setattr(mtp.heads.unrolling, "QUERIES", 5)
    again, blocked = take_step(head, batch, rows)
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(blocked, gradients)


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("family", RECOMPUTING)
def test_activation_checkpointing_gives_the_very_same_gradients(family: str, narrow: bool, target: Target) -> None:
    head = tiny_head(family, target, **SIZES.get(family, {})).train()
    rows = rows_of(40, 23, 9)
    batch = batch_of(target, head, rows)
    if head.follows_own_tokens:
        batch = TrainingBatch(batch.states, batch.trained, own_tokens=0.5)
    loss, gradients = take_step(head, batch, rows, narrow)
    head.activation_checkpointing = True
    again, recomputed = take_step(head, batch, rows, narrow)
    assert torch.equal(again, loss)
    assert len(recomputed) == len(gradients) > 0
    for one, other in zip(recomputed, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", RECOMPUTING)
def test_the_very_first_step_can_be_computed_again(family: str, target: Target) -> None:
    rows = rows_of(23, 9)
    losses = []
    for asked in (True, False):
        head = tiny_head(family, target, draft_vocab=8, **SIZES.get(family, {})).train()
        head.activation_checkpointing = asked
        loss, _ = take_step(head, batch_of(target, head, rows), rows)
        losses.append(loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", RECOMPUTING)
def test_activation_checkpointing_takes_less_memory(
    family: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp.heads.unrolling, "QUERIES", 32)
    head = tiny_head(family, target, **SIZES.get(family, {})).train()
    rows = rows_of(200, 180)
    batch = batch_of(target, head, rows)
    peaks = []
    for asked in (False, True):
        head.activation_checkpointing = asked
        take_step(head, batch, rows)  # gradients exist, and tables that are made once
        with CountedBytes() as count:
            take_step(head, batch, rows)
        peaks.append(count.peak)
    assert peaks[1] < 0.9 * peaks[0]


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(RECOMPUTING)))
def test_activation_checkpointing_is_refused_where_a_head_has_none(family: str) -> None:
    with pytest.raises(ConfigError, match=r"optim.activation_checkpointing=true: the layers of a \w+ head"):
        refuse_unfit_objective(HEADS[family], STEPS, OptimConfig(activation_checkpointing=True))


def test_what_is_counted_is_what_exists() -> None:
    with CountedBytes() as count:
        kept = torch.zeros(1000)
        view, _ = kept[:10], torch.zeros(500)
        kept.add_(1)
        del _
        (kept + 1).sum()
    assert count.peak == 4 * (1000 + 1000) + 4  # the sum's result is there while its input is
    assert count.largest == 4000
    assert count.alive == 4000
    assert view.sum() == 10
