"""Loading the frozen target for training and distillation, and putting an adapter on it that is not."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp.target import Target
from train.config import AdapterConfig, ConfigError, TargetConfig


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


def with_lora(target: Target, adapter: AdapterConfig) -> Target:
    """``target`` with a fresh LoRA adapter on it, which changes nothing yet; the same in every process.

    Raises:
        ConfigError: if it cannot be put on this model, or heads could not read the model any more.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            f"target.adapter.rank={adapter.rank} trains an adapter, which takes the package peft: pip install "
            "'mtp[peft]', or set target.adapter.rank=0."
        ) from error
    lora = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    model = target.causal_lm
    with torch.random.fork_rng():
        torch.manual_seed(0)
        try:
            adapted = get_peft_model(model, lora)
        except ValueError as error:
            raise ConfigError(f"target.adapter.modules: {error}") from error
    for name, layer in (("output", model.get_output_embeddings()), ("input", model.get_input_embeddings())):
        if hasattr(layer, "base_layer"):
            raise ConfigError(
                f"target.adapter.modules={list(adapter.modules)} names the {name} embeddings, whose weights heads read "
                "as they are; name other layers, or none for all linear ones."
            )
    return Target(adapted)


def load_tokenizer(config: TargetConfig) -> Any:
    """The tokenizer of the same revision."""
    return AutoTokenizer.from_pretrained(
        os.path.expanduser(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code
    )
