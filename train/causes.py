"""The likeliest cause of low acceptance, by rules of thumb over what ``train.diagnosis`` counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FEWEST = 50  # guesses in a category or class of length, below which nothing is concluded from it


@dataclass(frozen=True)
class Breakdown:
    """Means over guesses; those by category and by context length are of the first guess alone.

    Attributes:
        guesses: first guesses counted.
        loss: by unrolled step, nats.
        floor: by step, the part of the loss that is the target's own uncertainty.
        accuracy: by step.
        confidence: by step.
        agreed: share of the tokens that are the target's own first choice.
        outside: share of the tokens that the draft vocabulary lacks.
        categories: accuracy, loss and number of guesses of each.
        contexts: the same by tokens before the guessed one.
    """

    guesses: int
    loss: tuple[float, ...]
    floor: tuple[float, ...]
    accuracy: tuple[float, ...]
    confidence: tuple[float, ...]
    agreed: float
    outside: float
    categories: dict[str, dict[str, float]]
    contexts: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Decoded:
    """What the decoder did, against what was to be expected of it.

    Attributes:
        mean_accepted_length: committed tokens a pass of the target.
        promised: what the head's own confidences promised of the very trees, in the same unit.
        first: share of the rounds in which the first guessed token was kept; a tree holds the likeliest guess and
            others, so that it should not be far below the first step's accuracy.
    """

    mean_accepted_length: float
    promised: float
    first: float


def decoded(acceptance: dict[str, Any]) -> Decoded:
    """Read ``Decoded`` off what ``train.evaluate.decode_acceptance`` gives."""
    rounds = max(acceptance["target_passes"], 1)
    tables = acceptance["calibration"]["reliability"]
    kept = sum(each["guesses"] * each["accepted"] for depth in tables for each in depth)
    promised = sum(each["guesses"] * each["confidence"] for depth in tables for each in depth)
    tau = acceptance["mean_accepted_length"]
    # Both counts leave out rounds' last tokens alike, so that their difference is what confidences are off by.
    return Decoded(tau, round(tau + (promised - kept) / rounds, 4), (acceptance["acceptance_by_position"] or [0.0])[0])


@dataclass(frozen=True)
class Cause:
    """A reason for low acceptance.

    Attributes:
        name: in a word or two.
        lost: points of accuracy that it costs, roughly, as a share.
        usual: what it costs in a sound run.
        advice: what was found and what to do.
    """

    name: str
    lost: float
    usual: float
    advice: str


def causes(held_out: Breakdown, train: Breakdown, run: Decoded) -> list[Cause]:
    """Everything that may hold acceptance down, as points of accuracy; the worst beyond what is usual first.

    What is usual is a rule of thumb from heads on a model of 135 M parameters, sound ones and such as had been spoiled
    on purpose.
    """
    accuracy = held_out.accuracy[0]
    agreed = held_out.agreed + held_out.outside  # tokens that the draft vocabulary lacks are a cause of their own
    worst_category, category = _weakest(held_out.categories)
    worst_context, context = _weakest(held_out.contexts)
    found = [
        Cause(
            "decoding",
            accuracy - run.first,
            0.05,
            f"decoding keeps the first guess in {run.first:.0%} of the rounds, though {accuracy:.0%} are right along "
            "the true text: the decoder does not see what training saw. Compare hidden layers, positions and template.",
        ),
        Cause(
            "answers",
            1 - agreed,
            0.1,
            f"the target itself would have chosen only {agreed:.0%} of the tokens: the answers were sampled hot, or "
            "are another model's or of another precision. Distil them again with this target, greedily or cooler.",
        ),
        Cause(
            "draft vocabulary",
            held_out.outside,
            0.08,
            f"{held_out.outside:.0%} of the tokens are outside the draft vocabulary and never accepted: raise "
            "head.draft_vocab_size.",
        ),
        Cause(
            "overfitting",
            train.accuracy[0] - accuracy,
            0.05,
            f"accuracy is {train.accuracy[0]:.0%} on training rows and {accuracy:.0%} on held-out rows: distil more "
            "answers, or take fewer optim.epochs.",
        ),
        Cause(
            "later steps",
            accuracy - held_out.accuracy[-1],
            0.15,
            f"accuracy falls from {accuracy:.0%} at the first step to {held_out.accuracy[-1]:.0%} at the last: train "
            "longer, raise optim.step_weight, or draft less deep.",
        ),
        Cause(
            "category",
            category,
            0.2,
            f"{worst_category!r} is far behind the mean: distil more prompts of that kind.",
        ),
        Cause(
            "context length",
            context,
            0.15,
            f"texts of length class {worst_context!r} are far behind the mean: distil rows of that length, and let the "
            "head see the whole prompt (features.prompt_positions=all).",
        ),
        Cause(
            "calibration",
            abs(held_out.confidence[0] - accuracy),
            0.1,
            f"the head is sure of {held_out.confidence[0]:.0%} on average and right in {accuracy:.0%}: the curves in "
            "acceptance.json correct it; refit them on text like yours.",
        ),
        Cause(
            "underfitting",
            train.agreed - train.accuracy[0],
            0.3,
            f"accuracy on the training rows themselves is {train.accuracy[0]:.0%} of {train.agreed:.0%} possible: "
            "train longer, try another optim.lr, or a larger head.",
        ),
    ]
    return sorted(found, key=lambda cause: cause.usual - cause.lost)


def _weakest(parts: dict[str, dict[str, float]]) -> tuple[str, float]:
    """The part with the lowest accuracy among those of some size, and how far it is below the mean."""
    large = {name: values for name, values in parts.items() if values["guesses"] >= FEWEST}
    if len(large) < 2:
        return "", 0.0
    mean = sum(v["accuracy"] * v["guesses"] for v in large.values()) / sum(v["guesses"] for v in large.values())
    name = min(large, key=lambda each: large[each]["accuracy"])
    return name, mean - large[name]["accuracy"]


def verdict(found: Sequence[Cause]) -> str:
    """The likeliest cause, in a sentence."""
    worst = found[0]
    if worst.lost <= worst.usual:
        return "nothing stands out: more data and more steps are what is left."
    return f"{worst.name}: {worst.advice}"
