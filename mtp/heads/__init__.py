"""Trained drafters: one file a family, one registry."""

from __future__ import annotations

from mtp.heads.assistant import AssistantHead
from mtp.heads.base import Head, HeadConfig, Prediction, TrainingBatch
from mtp.heads.block import BlockHead
from mtp.heads.eagle import EagleHead
from mtp.heads.eagle3 import Eagle3Head
from mtp.heads.hydra import HydraHead, HydraPlusHead
from mtp.heads.medusa import MedusaHead
from mtp.heads.mtp_module import MtpModuleHead
from mtp.heads.recurrent import RecurrentHead

FAMILIES: tuple[type[Head], ...] = (
    AssistantHead,
    BlockHead,
    EagleHead,
    Eagle3Head,
    HydraHead,
    HydraPlusHead,
    MedusaHead,
    MtpModuleHead,
    RecurrentHead,
)
HEADS: dict[str, type[Head]] = {head.family: head for head in FAMILIES}


def head_class(family: str) -> type[Head]:
    """The class of a head family.

    Raises:
        ValueError: if there is no such family.
    """
    if family not in HEADS:
        raise ValueError(f"No head family {family!r}; there are {', '.join(sorted(HEADS))}.")
    return HEADS[family]


__all__ = ["HEADS", "Head", "HeadConfig", "Prediction", "TrainingBatch", "head_class"]
