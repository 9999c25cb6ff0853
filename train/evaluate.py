"""How good a head is on rows it was not trained on: by its labels, and by the real decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mtp.heads import Head, Prediction, TrainingBatch
from mtp.model import SpeculativeModel
from mtp.stats import AcceptanceStats
from mtp.target import Target
from train.calibrate import Watching
from train.data import Row
from train.generation import left_padded
from train.losses import Labels, soft_cross_entropy

RANKS = 10


def teacher_probs(head: Head, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
    """The target's distribution over the draft vocabulary wherever a trained token is predicted from.

    Returns:
        probs: ``[P, Vd]``, renormalised over the draft vocabulary.
        place: ``[B, T]`` the row of ``probs`` for each position; -1 where there is none.
    """
    needed = batch.bases(1)
    place = torch.full(needed.shape, -1, device=needed.device)
    place[needed] = torch.arange(int(needed.sum()), device=needed.device)
    with torch.no_grad():
        logits = head.target.unembed(batch.states.hidden[needed], head.draft_ids)
    return logits.float().softmax(-1), place


def labels_of(head: Head, batch: TrainingBatch, prediction: Prediction, teacher: tuple[Tensor, Tensor]) -> Labels:
    """What the target and the text say where ``prediction`` was made; ``teacher`` is from ``teacher_probs``."""
    probs, place = teacher
    rows, positions = prediction.rows, prediction.positions
    return Labels(
        probs=probs[place[rows, positions]],
        tokens=head.draft_index(batch.states.tokens[rows, positions + 1]),
        hidden=batch.states.hidden[rows, positions],
    )


@torch.no_grad()
def held_out_metrics(head: Head, batches: Iterable[TrainingBatch], steps: int) -> dict[str, Any]:
    """Per unrolled step: loss, and how often the token was the guess of each rank.

    A token outside the draft vocabulary counts as missed: it can never be accepted.
    """
    loss = torch.zeros(steps, dtype=torch.float64)
    hits = torch.zeros(steps, RANKS, dtype=torch.float64)
    counts = torch.zeros(steps, dtype=torch.float64)
    outside = 0
    for batch in batches:
        probs, place = teacher_probs(head, batch)
        for step, prediction in enumerate(head.unroll(batch, steps)):
            labels = batch.states.tokens[prediction.rows, prediction.positions + 1]
            teacher = probs[place[prediction.rows, prediction.positions]]
            loss[step] += soft_cross_entropy(prediction.logits, teacher).sum().double().cpu()
            ranked = head.draft_ids[prediction.logits.topk(min(RANKS, prediction.logits.shape[1])).indices]
            hits[step, : ranked.shape[1]] += (ranked == labels[:, None]).sum(0).double().cpu()
            counts[step] += len(labels)
            if step == 0:
                outside += int((~torch.isin(labels, head.draft_ids)).sum())
    total = counts.clamp_min(1)
    return {
        "loss": [round(value, 4) for value in (loss / total).tolist()],
        "accuracy": [round(value, 4) for value in (hits[:, 0] / total).tolist()],
        "rank_accuracy": [[round(value, 5) for value in step] for step in (hits / total[:, None]).tolist()],
        "outside_draft_vocabulary": round(outside / float(total[0]), 4),
        "positions": int(counts[0]),
    }


def decode_acceptance(
    target: Target,
    head: Head,
    rows: Sequence[Row],
    *,
    max_new_tokens: int,
    batch_size: int,
    nodes: int | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Mean accepted length, greedy, of the real decoder on the prompts of ``rows``, by category and over all.

    Also how far the head's confidences could be believed there (``calibration``).
    """
    model = SpeculativeModel(target, head)
    planner = Watching(nodes or model.default_nodes)
    if target.max_positions is not None:
        rows = [row for row in rows if len(row.prompt_ids) + max_new_tokens <= target.max_positions]
    total = AcceptanceStats()
    categories: dict[str, AcceptanceStats] = {}
    # Rows of one category share a batch, so that the counters of a batch belong to one category.
    order = sorted(range(len(rows)), key=lambda index: (rows[index].category, len(rows[index].prompt_ids)))
    with tqdm(total=len(rows), desc="acceptance", unit="row", disable=not progress, leave=False) as bar:
        for category in sorted({row.category for row in rows}):
            members = [index for index in order if rows[index].category == category]
            for start in range(0, len(members), batch_size):
                chunk = [rows[index].prompt_ids for index in members[start : start + batch_size]]
                tokens, mask = left_padded(chunk, target.device)
                output = model.generate(
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
                total.add(output.acceptance)
                categories.setdefault(category, AcceptanceStats()).add(output.acceptance)
                bar.update(len(chunk))
                bar.set_postfix(tau=f"{total.mean_accepted_length:.2f}")
    return {
        **total.to_dict(),
        "categories": {name: stats.to_dict() for name, stats in categories.items()},
        "calibration": {"curves": planner.reliability.fit(), "reliability": planner.reliability.table()},
        "nodes": planner.nodes,
        "data": f"{len(rows)} held-out prompts",
        "settings": f"greedy, {max_new_tokens} new tokens, trees of {planner.nodes} nodes",
    }
