"""Why acceptance is what it is: the loss on held-out and training rows taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp.heads import Head
from train.batches import training_batch
from train.causes import Breakdown, causes, decoded, verdict
from train.data import length_batches
from train.evaluate import teacher_probs
from train.features import FeatureSource
from train.losses import soft_cross_entropy

SAMPLE = 32  # rows of each side: a few thousand positions, enough for a hundredth
CONTEXTS = (64, 256, 1024, 4096)  # edges of the classes of context length, in tokens


@dataclass(frozen=True)
class Guesses:
    """Every guess that a head makes about some rows along their true text, one entry each.

    Attributes:
        step: ``[M]`` unrolled step.
        loss: ``[M]`` nats.
        floor: ``[M]`` entropy of the target's own distribution over what can be guessed, which no head gets below.
        right: ``[M]`` whether the likeliest guess was the token.
        agreed: ``[M]`` whether the target's own likeliest token (among what can be guessed) was the token.
        outside: ``[M]`` whether the token cannot be guessed: it is neither in the draft vocabulary nor, for heads
            that take up tokens of the text, in the text so far.
        confidence: ``[M]`` probability of the likeliest guess.
        context: ``[M]`` tokens before the guessed one.
        category: ``[M]`` of the row.
    """

    step: NDArray[Any]
    loss: NDArray[Any]
    floor: NDArray[Any]
    right: NDArray[Any]
    agreed: NDArray[Any]
    outside: NDArray[Any]
    confidence: NDArray[Any]
    context: NDArray[Any]
    category: NDArray[Any]


@torch.no_grad()
def observe(head: Head, source: FeatureSource, rows: Sequence[int], steps: int, positions: int) -> Guesses:
    """What ``head`` guesses about ``rows`` of ``source``.

    Args:
        steps: unrolled steps.
        positions: padded positions of a batch.
    """
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in Guesses.__dataclass_fields__}
    for batch in length_batches([len(source.rows[row]) for row in rows], positions, generator=None):
        indices = [rows[at] for at in batch]
        states = training_batch(source, indices)
        names = np.array([source.rows[index].category for index in indices])
        cut = [len(source.rows[index].prompt_ids) - source.response_start(index) for index in indices]
        vocabulary, (probs, place) = head.vocabulary(states), teacher_probs(head, states)
        for step, prediction in enumerate(head.unroll(states, steps)):
            labels = vocabulary.labels(states.states.tokens, prediction.rows, prediction.positions)
            teacher = probs[place[prediction.rows, prediction.positions]]
            rows_at = prediction.rows.cpu().numpy()
            confidence, best = prediction.logits.float().softmax(-1).max(-1)
            found: dict[str, Tensor | NDArray[Any]] = {
                "step": torch.full_like(labels, step),
                "loss": soft_cross_entropy(prediction.logits, teacher),
                "floor": torch.special.entr(teacher).sum(-1),
                "right": best == labels,
                "agreed": teacher.argmax(-1) == labels,
                "outside": labels < 0,
                "confidence": confidence,
                "context": prediction.positions.cpu().numpy() + 1 + np.array(cut)[rows_at],
                "category": names[rows_at],
            }
            for name, values in found.items():
                columns[name].append(values.cpu().numpy() if isinstance(values, Tensor) else values)
    return Guesses(**{name: np.concatenate(values) for name, values in columns.items()})


def break_down(guesses: Guesses) -> Breakdown:
    """Sum ``guesses`` up."""
    first = guesses.step == 0
    steps = range(int(guesses.step.max()) + 1)

    def by_step(values: NDArray[Any]) -> tuple[float, ...]:
        return tuple(round(float(values[guesses.step == step].mean()), 4) for step in steps)

    def part(mask: NDArray[Any]) -> dict[str, float]:
        return {
            "accuracy": round(float(guesses.right[mask].mean()), 4),
            "loss": round(float(guesses.loss[mask].mean()), 4),
            "guesses": int(mask.sum()),
        }

    classes = np.searchsorted(CONTEXTS, guesses.context, side="right")
    names = [*(f"to {edge}" for edge in CONTEXTS), f"over {CONTEXTS[-1]}"]
    return Breakdown(
        guesses=int(first.sum()),
        loss=by_step(guesses.loss),
        floor=by_step(guesses.floor),
        accuracy=by_step(guesses.right),
        confidence=by_step(guesses.confidence),
        agreed=round(float(guesses.agreed[first].mean()), 4),
        outside=round(float(guesses.outside[first].mean()), 4),
        categories={str(name): part(first & (guesses.category == name)) for name in sorted(set(guesses.category))},
        contexts={
            name: part(first & (classes == at)) for at, name in enumerate(names) if (first & (classes == at)).any()
        },
    )


def diagnose(
    head: Head,
    train: FeatureSource,
    held_out: FeatureSource,
    acceptance: dict[str, Any],
    *,
    steps: int,
    positions: int,
) -> dict[str, Any]:
    """Take the loss on a sample of rows of both sides apart, and name the likeliest cause of low acceptance.

    Args:
        acceptance: what ``train.evaluate.decode_acceptance`` gave for the same head.
        steps: unrolled steps.
        positions: padded positions of a batch.
    """
    sides = [break_down(observe(head, source, sample(source), steps, positions)) for source in (held_out, train)]
    run = decoded(acceptance)
    found = causes(sides[0], sides[1], run)
    return {
        "verdict": verdict(found),
        "held_out": asdict(sides[0]),
        "train": asdict(sides[1]),
        "decoded": asdict(run),
        "causes": [{**asdict(cause), "lost": round(cause.lost, 4)} for cause in found],
    }


def sample(source: FeatureSource) -> list[int]:
    """``SAMPLE`` rows at equal distances; the same ones at every evaluation."""
    count = len(source.rows)
    return sorted({at * count // SAMPLE for at in range(SAMPLE)}) if count > SAMPLE else list(range(count))


def as_text(diagnosis: dict[str, Any]) -> str:
    """The diagnosis as a table for the terminal."""
    held_out, train, run = diagnosis["held_out"], diagnosis["train"], diagnosis["decoded"]
    lines = [f"{'':28}{'held out':>10}{'training':>10}"]

    def line(name: str, ours: float, theirs: float | None = None) -> None:
        lines.append(f"{name:28}{ours:10.3f}" + ("" if theirs is None else f"{theirs:10.3f}"))

    for step, loss in enumerate(held_out["loss"]):
        line(f"step {step + 1} loss", loss, train["loss"][step])
        line("  of it the target's own", held_out["floor"][step], train["floor"][step])
        line("  accuracy", held_out["accuracy"][step], train["accuracy"][step])
        line("  confidence", held_out["confidence"][step], train["confidence"][step])
    line("target's own first choice", held_out["agreed"], train["agreed"])
    line("outside draft vocabulary", held_out["outside"], train["outside"])
    for kind, title in (("categories", ""), ("contexts", "context ")):
        for name, values in held_out[kind].items():
            other = train[kind].get(name)
            line(f"accuracy {title}{name}"[:26], values["accuracy"], other["accuracy"] if other else None)
    line("accepted length", run["mean_accepted_length"])
    line("  promised by confidences", run["promised"])
    lines.append(f"likeliest cause: {diagnosis['verdict']}")
    return "\n".join(lines)
