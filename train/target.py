"""Loading the frozen target for training and distillation."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp.target import Target
from train.config import TargetConfig


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """The frozen target on ``device``; ``auto`` precision is the checkpoint's own, float32 on a CPU."""
    dtype: torch.dtype | str = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        os.path.expanduser(config.path),
        revision=config.revision,
        dtype=dtype,
        trust_remote_code=config.trust_remote_code,
    )
    model.requires_grad_(False)
    return Target(model.to(device))


def load_tokenizer(config: TargetConfig) -> Any:
    """The tokenizer of the same revision."""
    return AutoTokenizer.from_pretrained(
        os.path.expanduser(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code
    )
