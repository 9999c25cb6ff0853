"""Drafters that need no training, and the interface that all drafters share."""

from __future__ import annotations

from mtp.drafters.assistant import Assistant
from mtp.drafters.base import Budget, Drafter, Draw, RoundCosts, TargetStates
from mtp.drafters.early_exit import EarlyExit
from mtp.drafters.mixed import MixedDrafter
from mtp.drafters.ngram import NgramDrafter, OutputStore
from mtp.drafters.plain import PlainDrafter
from mtp.drafters.prediction import PredictionDrafter
from mtp.drafters.recycle import RecyclingDrafter

DRAFTERS: dict[str, type[Drafter]] = {
    "early_exit": EarlyExit,
    "ngram": NgramDrafter,
    "none": PlainDrafter,
    "recycling": RecyclingDrafter,
}
OWN = "head"  # in a mix, the drafter that a model already has


def drafter_by_name(name: str, own: Drafter | None = None) -> Drafter:
    """A drafter that needs no weights, or a mix: names joined by ``+``.

    Args:
        own: what ``"head"`` stands for.

    Raises:
        ValueError: if there is no such drafter.
    """
    names = name.split("+")
    known = sorted(DRAFTERS) if own is None else [OWN, *sorted(DRAFTERS)]
    if (unknown := next((part for part in names if part not in known), None)) is not None:
        hint = " A checkpoint's model has a head; this one has none." if unknown == OWN else ""
        raise ValueError(
            f"No drafter {unknown!r}; there are {', '.join(known)}, several of them joined by + ('recycling+...'), or "
            f"pass a Drafter object.{hint}"
        )
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(f"drafter={name!r}: a mix names each drafter once, and not 'none', which guesses nothing.")
    parts = [own if part == OWN and own is not None else DRAFTERS[part]() for part in names]
    return parts[0] if len(parts) == 1 else MixedDrafter(parts)


__all__ = [
    "DRAFTERS",
    "OWN",
    "Assistant",
    "Budget",
    "Drafter",
    "Draw",
    "EarlyExit",
    "MixedDrafter",
    "NgramDrafter",
    "OutputStore",
    "PlainDrafter",
    "PredictionDrafter",
    "RecyclingDrafter",
    "RoundCosts",
    "TargetStates",
    "drafter_by_name",
]
