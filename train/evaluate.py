"""How good a head is on rows it was not trained on: by its labels, and by the real decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor
from tqdm import tqdm

from mtp.heads import Head, Prediction, TrainingBatch
from mtp.model import SpeculativeModel
from mtp.planner import Planner
from mtp.stats import AcceptanceStats
from mtp.target import Target
from train.batches import training_batch
from train.calibrate import Reliability, Watching
from train.config import RunConfig
from train.data import Row, length_batches
from train.features import FeatureSource
from train.generation import left_padded
from train.losses import Labels, soft_cross_entropy
from train.processes import ALONE, Share

RANKS = 10


def evaluate(head: Head, held_out: FeatureSource, config: RunConfig, share: Share = ALONE) -> dict[str, Any]:
    """Losses and decoded acceptance on held-out rows; the head takes over what they say about its confidences.

    Args:
        share: what this process does of it; every process gets the numbers of all of them.
    """
    head.eval()
    batches = length_batches([len(row) for row in held_out.rows], config.optim.batch_positions, generator=None)
    ours = (training_batch(held_out, batch) for batch in share.of(batches))
    metrics = held_out_metrics(head, ours, config.head.steps, share)
    head.set_rank_accuracy(tuple(tuple(step) for step in metrics["rank_accuracy"]))
    head.set_calibration(())  # what is measured now is the head's own confidence
    acceptance = decode_acceptance(
        held_out.target,
        head,
        held_out.rows[: config.eval.rows],
        max_new_tokens=config.eval.max_new_tokens,
        batch_size=config.eval.batch_size,
        share=share,
    )
    head.set_calibration(tuple(tuple(curve) for curve in acceptance["calibration"]["curves"]))
    head.train()
    return {**acceptance, "held_out": metrics}


def teacher_probs(head: Head, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """The target's distribution over what the head can guess, wherever a trained token is predicted from.

    Returns:
        probs: ``[P, V']``, renormalised over the batch's vocabulary (``Head.vocabulary``).
        place: ``[B, T]`` the row of ``probs`` for each position; -1 where there is none.
    """
    vocabulary, needed = head.vocabulary(batch), batch.bases(1)
    place = torch.full(needed.shape, -1, device=needed.device)
    place[needed] = torch.arange(int(needed.sum()), device=needed.device)
    with torch.no_grad():
        logits = head.target.unembed(batch.states.hidden[needed], vocabulary.ids).float()
        vocabulary.rule_out_(logits, *needed.nonzero(as_tuple=True))
    return logits.softmax(-1), place


@dataclass
class HeldOutCounts:
    """What is counted over held-out rows, for each unrolled step; sums, so that counts of several parts can be added.

    Attributes:
        loss: ``[steps]`` float64, summed over positions.
        hits: ``[steps, RANKS]`` how often the token was the guess of each rank.
        positions: ``[steps]``.
        outside: tokens at step 0 that the head cannot guess.
    """

    loss: Tensor
    hits: Tensor
    positions: Tensor
    outside: int = 0

    @classmethod
    def zero(cls, steps: int) -> Self:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64)

        return cls(zeros(steps), zeros(steps, RANKS), zeros(steps))

    def add(self, other: HeldOutCounts) -> None:
        """Take in the counts of other rows."""
        self.loss += other.loss
        self.hits += other.hits
        self.positions += other.positions
        self.outside += other.outside

    def to_dict(self) -> dict[str, Any]:
        total = self.positions.clamp_min(1)
        return {
            "loss": [round(value, 4) for value in (self.loss / total).tolist()],
            "accuracy": [round(value, 4) for value in (self.hits[:, 0] / total).tolist()],
            "rank_accuracy": [[round(value, 5) for value in step] for step in (self.hits / total[:, None]).tolist()],
            "outside_draft_vocabulary": round(self.outside / float(total[0]), 4),
            "positions": int(self.positions[0]),
        }


def labels_of(head: Head, batch: TrainingBatch, prediction: Prediction, teacher: tuple[Tensor, Tensor]) -> Labels:
    """What the target and the text say where ``prediction`` was made; ``teacher`` is from ``teacher_probs``."""
    probs, place = teacher
    rows, positions = prediction.rows, prediction.positions
    at = place[rows, positions]
    # Behind a prompt every step predicts all trained tokens, in the same order: one distribution serves all of them.
    whole = len(at) == len(probs) and torch.equal(at, torch.arange(len(at), device=at.device))
    return Labels(
        probs=probs if whole else probs[at],
        tokens=head.vocabulary(batch).labels(batch.states.tokens, rows, positions),
        hidden=batch.states.hidden[rows, positions],
    )


@torch.no_grad()
def count_held_out(head: Head, batch: TrainingBatch, steps: int) -> HeldOutCounts:
    """Losses and hits of one batch.  A token that cannot be guessed counts as missed: it is never accepted."""
    counts = HeldOutCounts.zero(steps)
    vocabulary, (probs, place) = head.vocabulary(batch), teacher_probs(head, batch)
    for step, prediction in enumerate(head.unroll(batch, steps)):
        labels = vocabulary.labels(batch.states.tokens, prediction.rows, prediction.positions)
        teacher = probs[place[prediction.rows, prediction.positions]]
        counts.loss[step] = soft_cross_entropy(prediction.logits, teacher).sum().double().cpu()
        ranked = prediction.logits.topk(min(RANKS, prediction.logits.shape[1])).indices
        counts.hits[step, : ranked.shape[1]] = (ranked == labels[:, None]).sum(0).double().cpu()
        counts.positions[step] = len(labels)
        if step == 0:
            counts.outside = int((labels < 0).sum())
    return counts


def held_out_metrics(head: Head, batches: Iterable[TrainingBatch], steps: int, share: Share = ALONE) -> dict[str, Any]:
    """Per unrolled step: loss, and how often the token was the guess of each rank.

    Args:
        batches: those of this process.
        share: how many processes there are; the numbers are those of all, added up batch by batch.
    """
    parts = share.gather([count_held_out(head, batch, steps) for batch in batches])
    total = HeldOutCounts.zero(steps)
    for part in parts:
        total.add(part)
    return total.to_dict()


@dataclass
class DecodedChunk:
    """What the decoder counted on some rows of one category."""

    category: str
    stats: AcceptanceStats
    reliability: Reliability


def decode_acceptance(
    target: Target,
    head: Head,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    batch_size: int,
    nodes: int | None = None,
    progress: bool = True,
    share: Share = ALONE,
) -> dict[str, Any]:
    """Mean accepted length, greedy, of the real decoder on the prompts of ``rows``, by category and over all.

    Also how far the head's confidences could be believed there (``calibration``).

    Args:
        share: which part of ``rows`` this process decodes; the numbers are those of all processes, and the same
            for any number of them.
    """
    model = SpeculativeModel(target, head)
    nodes = nodes or model.default_nodes
    if target.max_positions is not None:
        rows = [row for row in rows if len(row.prompt_ids) + max_new_tokens <= target.max_positions]
    ours = share.of(chunks_by_category(rows, batch_size))
    counted = []
    with tqdm(
        total=sum(map(len, ours)), desc="acceptance", unit="row", disable=not progress or share.index > 0, leave=False
    ) as bar:
        for chunk in ours:
            counted.append(_decode(model, chunk, max_new_tokens, nodes))
            bar.update(len(chunk))
    total, categories, reliability = AcceptanceStats(), dict[str, AcceptanceStats](), Reliability()
    for decoded in share.gather(counted):
        total.add(decoded.stats)
        categories.setdefault(decoded.category, AcceptanceStats()).add(decoded.stats)
        reliability.add_all(decoded.reliability)
    return {
        **total.to_dict(),
        "categories": {name: categories[name].to_dict() for name in sorted(categories)},
        "calibration": {"curves": reliability.fit(), "reliability": reliability.table()},
        "nodes": nodes,
        "data": f"{len(rows)} held-out prompts",
        "settings": f"greedy, {max_new_tokens} new tokens, trees of {nodes} nodes",
    }


def chunks_by_category(rows: Sequence[Row], size: int) -> list[list[Row]]:
    """Rows in groups of at most ``size``, of one category and like length: counters of a batch are of one category."""
    ordered = sorted(rows, key=lambda row: (row.category, len(row.prompt_ids)))
    members = [list(group) for _, group in groupby(ordered, key=lambda row: row.category)]
    return [rows[start : start + size] for rows in members for start in range(0, len(rows), size)]


def _decode(model: SpeculativeModel, rows: Sequence[Row], max_new_tokens: int, nodes: int) -> DecodedChunk:
    planner = Watching(nodes)
    output = decode_greedily(model, rows, max_new_tokens, planner)
    return DecodedChunk(rows[0].category, output.acceptance, planner.reliability)


def decode_greedily(model: SpeculativeModel, rows: Sequence[Row], max_new_tokens: int, planner: Planner) -> Any:
    """A batch of prompts answered as the data was distilled: the ``SpeculativeOutput``."""
    tokens, mask = left_padded([row.prompt_ids for row in rows], model.target.device)
    return model.generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        repetition_penalty=1.0,  # answers are distilled without the target's own penalties
        no_repeat_ngram_size=0,
        max_new_tokens=max_new_tokens,
        planner=planner,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
