"""Self-speculative decoding with trained multi-token heads: the target's own text in fewer of its passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mtp.checkpoint import (
    CheckpointError,
    load_head,
    load_target,
    load_tokenizer,
    read_acceptance,
    save_checkpoint,
)
from mtp.drafters import (
    DRAFTERS,
    Assistant,
    Drafter,
    EarlyExit,
    MixedDrafter,
    NgramDrafter,
    OutputStore,
    RecyclingDrafter,
)
from mtp.heads import HEADS, Head
from mtp.model import SpeculativeModel, SpeculativeOutput, speculate
from mtp.past import Past
from mtp.rules import available_rules
from mtp.skip_search import calibrate_early_exit
from mtp.stats import AcceptanceStats
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from mtp.traffic import TrafficError, TrafficLog
from mtp.tree import TokenTree

__version__ = "0.1.0"


def load(
    folder: str | Path,
    target: str | PreTrainedModel | Target | None = None,
    *,
    trust_remote_code: bool = False,
    **target_kwargs: Any,
) -> SpeculativeModel:
    """Load an augmented checkpoint, its head in the target's precision.

    Args:
        folder: what ``train/heads.py`` wrote (``RUN/best``).
        target: the target, loaded or by name, where it is not to be the one that the checkpoint names.
        trust_remote_code: allow code that comes with the target.
        target_kwargs: for the target's ``from_pretrained``: ``dtype``, ``device_map`` ...

    Raises:
        CheckpointError: if the folder is no checkpoint or the target is not the one it was trained on.
    """
    if target is None or isinstance(target, str):
        target = load_target(folder, target, trust_remote_code=trust_remote_code, **target_kwargs)
    elif not isinstance(target, Target):
        target = Target(target)
    tokenizer = load_tokenizer(folder, target, trust_remote_code=trust_remote_code)
    head = load_head(folder, target, dtype=target.dtype)
    return SpeculativeModel(target, head, tokenizer, read_acceptance(folder))


def available_heads() -> list[str]:
    """Families of trained heads."""
    return sorted(HEADS)


def available_drafters() -> list[str]:
    """Drafters that need no training; several joined by ``+`` draft together, with ``"head"`` for a model's own."""
    return sorted(DRAFTERS)


__all__ = [
    "AcceptanceStats",
    "Assistant",
    "CheckpointError",
    "Drafter",
    "EarlyExit",
    "Head",
    "MixedDrafter",
    "NgramDrafter",
    "OutputStore",
    "Past",
    "RecyclingDrafter",
    "SpeculativeModel",
    "SpeculativeOutput",
    "Target",
    "TokenTree",
    "TrafficError",
    "TrafficLog",
    "UnsupportedTargetError",
    "available_drafters",
    "available_heads",
    "available_rules",
    "calibrate_early_exit",
    "load",
    "save_checkpoint",
    "speculate",
]
