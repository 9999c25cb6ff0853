"""Drafters that need no training, and the interface that all drafters share."""

from __future__ import annotations

from mtp.drafters.assistant import Assistant
from mtp.drafters.base import Budget, Drafter, Draw, RoundCosts, TargetStates
from mtp.drafters.early_exit import EarlyExit
from mtp.drafters.plain import PlainDrafter

DRAFTERS: dict[str, type[Drafter]] = {"none": PlainDrafter, "early_exit": EarlyExit}


def drafter_by_name(name: str) -> Drafter:
    """A drafter that needs no weights.

    Raises:
        ValueError: if there is no such drafter.
    """
    if name not in DRAFTERS:
        raise ValueError(f"No drafter {name!r}; there are {', '.join(sorted(DRAFTERS))}, or pass a Drafter object.")
    return DRAFTERS[name]()


__all__ = [
    "DRAFTERS",
    "Assistant",
    "Budget",
    "Drafter",
    "Draw",
    "EarlyExit",
    "PlainDrafter",
    "RoundCosts",
    "TargetStates",
    "drafter_by_name",
]
