"""Drafters that need no training, and the interface that all drafters share."""

from __future__ import annotations

import re

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
SKIPPING = re.compile(r"early_exit:(\d+(?:,\d+)*)")


def drafter_by_name(name: str, own: Drafter | None = None) -> Drafter:
    """A drafter that needs no weights, or a mix: names joined by ``+``.

    Args:
        name: ``"early_exit:3,5"`` names the layers to leave out, as ``mtp.calibrate_early_exit`` has found them.
        own: what ``"head"`` stands for.

    Raises:
        ValueError: if there is no such drafter.
    """
    names = name.split("+")
    known = sorted(DRAFTERS) if own is None else [OWN, *sorted(DRAFTERS)]
    if unknown := [part for part in names if part not in known and not SKIPPING.fullmatch(part)]:
        hint = " A checkpoint's model has a head; this one has none." if unknown[0] == OWN else ""
        raise ValueError(
            f"No drafter {unknown[0]!r}; there are {', '.join(known)}, several of them joined by + ('recycling+...'), "
            f"'early_exit:3,5' for an early exit that skips these layers, or pass a Drafter object.{hint}"
        )
    if len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ValueError(f"drafter={name!r}: a mix names each drafter once, and not 'none', which guesses nothing.")
    parts = [own if part == OWN and own is not None else _made(part) for part in names]
    return parts[0] if len(parts) == 1 else MixedDrafter(parts)


def _made(name: str) -> Drafter:
    if (skipping := SKIPPING.fullmatch(name)) is not None:
        return EarlyExit(map(int, skipping[1].split(",")))
    return DRAFTERS[name]()


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
