"""Loading the frozen target for training and distillation, whole on a device or spread over several.

An adapter on top of it is what is not frozen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available

from mtp.target import Target
from train.config import AdapterConfig, ConfigError, RunConfig, TargetConfig


class ShardedTarget(Target):
    """A target of which every process keeps a share; all of them have to run each pass together.

    The decoder's layers are sharded (FSDP2, arXiv 2304.11277): a pass fetches one, uses it and drops it.  Embeddings
    and the output matrix, which are read outside of passes too, stay whole on each process.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fingerprint = super().fingerprint()  # while the weights are whole

    def shard(self, device: torch.device) -> None:
        """Give up what the other processes keep, and move to ``device``."""
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh)
        self.model.to(device)  # type: ignore[arg-type]  # a decorator hides its type

    def fingerprint(self) -> str:
        return self._fingerprint


def load_target(config: TargetConfig, device: torch.device) -> Target:
    """The frozen target on ``device``; ``auto`` precision is the checkpoint's own, float32 on a CPU.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    dtype: torch.dtype | str = config.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    if dtype == "auto" and device.type == "cpu":
        dtype = torch.float32
    options: dict[str, Any] = {}
    if config.quantization is not None:
        options = {"quantization_config": _quantization(config.quantization), "device_map": {"": device}}
    if config.placement == "spread":
        options["device_map"] = "auto"
    with _explained(f"Cannot load the target {config.path}"):
        model = AutoModelForCausalLM.from_pretrained(
            os.path.expanduser(config.path),
            revision=config.revision,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    model.requires_grad_(False)
    if config.placement == "sharded":
        sharded = ShardedTarget(model)
        sharded.shard(device)
        return sharded
    return Target(model if "device_map" in options else model.to(device))  # type: ignore[arg-type]  # a decorator hides its type


def _quantization(name: str) -> BitsAndBytesConfig:
    if not is_bitsandbytes_available():
        raise ConfigError(f"target.quantization={name} needs bitsandbytes; install it (pip install bitsandbytes).")
    if name == "int4":
        return BitsAndBytesConfig(load_in_4bit=True)
    # Outliers are decided over all tokens of a pass; without them a token's logits do not depend on its neighbours.
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)


def check_placement(config: RunConfig, processes: int) -> None:
    """Refuse placements that do not go with the rest of the recipe or with this launch.

    Raises:
        ConfigError: saying what does.
    """
    placement = config.target.placement
    if placement == "spread" and processes > 1:
        raise ConfigError(
            f"target.placement=spread takes every device for one process; found {processes}. Launch one process "
            "(--num_processes 1), or set target.placement=sharded."
        )
    if placement != "sharded":
        return
    if processes == 1:
        raise ConfigError("target.placement=sharded needs several processes; found 1. Set it to replicated or spread.")
    for wanted, found in {
        "features.mode=online": config.features.mode != "online",  # processes fill different parts of a cache
        "bundle_target=false": config.bundle_target,
        "target.quantization=null": config.target.quantization is not None,
    }.items():
        if found:
            raise ConfigError(f"target.placement=sharded goes only with {wanted}.")


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
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # any number will do
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
    return Target(adapted)  # type: ignore[arg-type]  # PEFT's wrapper forwards what a target needs


def load_tokenizer(config: TargetConfig) -> Any:
    """The tokenizer of the same revision.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    with _explained(f"Cannot load the tokenizer of {config.path}"):
        return AutoTokenizer.from_pretrained(
            os.path.expanduser(config.path), revision=config.revision, trust_remote_code=config.trust_remote_code
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """What Transformers cannot load, as ``ConfigError`` in a line."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"{what}: {words} Expected the folder or Hub name of a causal language model.") from error
