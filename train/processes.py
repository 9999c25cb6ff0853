"""How the processes of a launch share a run; a launch that is not what it seems is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    InitProcessGroupKwargs,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations import unset_hf_deepspeed_config

from mtp.heads import Head
from train.config import ConfigError, RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """What one of several processes does of work that is done once.

    Attributes:
        index: this process.
        count: all of them.
    """

    index: int = 0
    count: int = 1

    def of(self, items: Sequence[T]) -> list[T]:
        """Every ``count``-th item, from ``index`` on."""
        return list(items[self.index :: self.count])

    def gather(self, items: Sequence[T]) -> list[T]:
        """What all processes made of what ``of`` gave them, in the order of the whole; every process must call this."""
        if self.count == 1:
            return list(items)
        placed = [(self.index + at * self.count, item) for at, item in enumerate(items)]
        return [item for _, item in sorted(gather_object(placed), key=itemgetter(0))]


ALONE = Share()


def make_accelerator(config: RunConfig) -> Accelerator:
    """The accelerator of a recipe, for whatever ``accelerate launch`` was told.

    Raises:
        ConfigError: when the processes would train beside each other instead of together, which accelerate lets happen.
    """
    on_cpu = uses_cpu()
    deepspeed = _is_set("ACCELERATE_USE_DEEPSPEED")
    accelerator = Accelerator(
        # DeepSpeed is left out by accelerate when it is told to use the CPU, and then needs a backend by name.
        cpu=on_cpu and not deepspeed,
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")] if on_cpu and deepspeed else [],
        mixed_precision=config.mixed_precision,
        # One step of the schedule for a step of the optimiser, whatever the number of processes.
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        log_with=list(config.report_to) or None,
        project_dir=config.output,
    )
    check_launch(accelerator)
    if deepspeed:
        unset_hf_deepspeed_config()  # or ZeRO-3 would take the frozen target apart while it is loaded
    return accelerator


def uses_cpu() -> bool:
    """Whether this machine has nothing else, or the launch asked for no more."""
    return _is_set("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def check_launch(accelerator: Accelerator) -> None:
    """Refuse processes that do not know each other, and engines that were asked for and are not there."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != launched:
        raise ConfigError(
            f"{launched} processes were launched, but accelerate joined {accelerator.num_processes} of them: each "
            "would train a head of its own. Launch with a file of configs/accelerate."
        )
    for name, engine in (("FSDP", DistributedType.FSDP), ("DEEPSPEED", DistributedType.DEEPSPEED)):
        if _is_set(f"ACCELERATE_USE_{name}") and accelerator.distributed_type != engine:
            raise ConfigError(
                f"{name} was asked for, but accelerate trains with {accelerator.distributed_type.value}. On a CPU it "
                "has no FSDP (use configs/accelerate/cpu2.yaml or zero2.yaml), and --cpu switches DeepSpeed off."
            )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def prepare_engine(accelerator: Accelerator, batches: int, clip_norm: float) -> None:
    """Make ``batches`` batches of each process one step of the optimiser; call it before ``prepare``.

    The recipe decides, and not accelerate's configuration: DeepSpeed's copy of what both name is overwritten.
    """
    accelerator.gradient_accumulation_steps = batches
    # As everywhere else, weights stay in float32 and autocast narrows products: FSDP2 and DeepSpeed would by themselves
    # narrow the weights, and their norms with them.
    if accelerator.distributed_type == DistributedType.FSDP:
        accelerator.state.fsdp_plugin.mixed_precision_policy = None
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    precision = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
    settings |= {
        "gradient_accumulation_steps": batches,
        "gradient_clipping": clip_norm,
        "train_micro_batch_size_per_gpu": 1,  # batches are made here; DeepSpeed only wants a number
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": precision is not None,
            "dtype": precision or "float32",
            "lower_precision_safe_modules": [],  # of which gradients would be summed in half precision
        },
    }


def engine(accelerator: Accelerator) -> str:
    """Which engine keeps weights and optimiser, in words."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP2" if accelerator.distributed_type == DistributedType.FSDP else "replicated"


def trained_copy(accelerator: Accelerator, head: Head) -> Head:
    """A copy to train where the engine takes weights apart, so that ``head`` stays whole; elsewhere ``head``."""
    if engine(accelerator) not in ("DeepSpeed ZeRO-3", "FSDP2"):
        return head
    copy = head.of_sizes(head.config, head.target).to(head.target.device).attach(head.target)
    copy.load_state_dict(head.state_dict())
    return copy


@torch.no_grad()
def copy_weights(trained: nn.Module, head: Head) -> None:
    """Bring ``head`` up to date with its trained copy, if it has one; every process must call this."""
    if trained is not head:
        for ours, theirs in zip(head.parameters(), trained.parameters(), strict=True):
            ours.copy_(_whole(theirs))
        for buffer, source in zip(head.buffers(), trained.buffers(), strict=True):
            buffer.copy_(source)  # no engine shards them


def _whole(weight: Any) -> Tensor:
    if isinstance(weight, DTensor):
        return weight.full_tensor()
    from deepspeed.utils import safe_get_full_fp32_param

    whole: Tensor = safe_get_full_fp32_param(weight)
    return whole
