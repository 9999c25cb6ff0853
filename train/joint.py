"""Medusa-2 (Cai et al., arXiv 2401.10774): heads trained together with an adapter of the target.

The target learns to have hidden states that heads can read more from, and is held to what it said before: the
divergence from its own distribution without the adapter is part of the loss (the paper's self-distillation).  The heads
imitate the adapted target, since that is what will verify them.  They are trained alone first, so that the adapter does
not follow heads that know nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mtp.heads import Head, Prediction, TrainingBatch
from train.config import ConfigError, RunConfig
from train.features import FeatureSource, OnlineFeatures
from train.loop import Trainer
from train.losses import forward_kl
from train.processes import engine
from train.schedule import warmup_cosine


def check_adapter(config: RunConfig, accelerator: Accelerator) -> None:
    """Refuse recipes in which an adapter cannot be trained, before anything is loaded or computed.

    Raises:
        ConfigError: naming the setting.
    """
    if config.target.adapter.rank == 0:
        return
    if config.features.mode != "online":
        raise ConfigError(
            f"features.mode={config.features.mode}: the states of a target that is trained along change with every "
            "step; set features.mode=online, or target.adapter.rank=0."
        )
    if not isinstance(config.features.prompt_positions, str):
        raise ConfigError(
            f"features.prompt_positions={config.features.prompt_positions}: a target that is trained along reads whole "
            "prompts; set features.prompt_positions=all, or target.adapter.rank=0."
        )
    if config.bundle_target:
        raise ConfigError(
            "bundle_target=true: a checkpoint with an adapter holds the adapter and names its target; set "
            "bundle_target=false."
        )
    if (name := engine(accelerator)) in ("DeepSpeed ZeRO-3", "FSDP2"):
        raise ConfigError(
            f"target.adapter.rank={config.target.adapter.rank}: {name} would take the adapter apart, which the target "
            "needs whole; launch with configs/accelerate/ddp.yaml or zero2.yaml."
        )


class UnadaptedFeatures(OnlineFeatures):
    """States of the target without its adapter: those it is held to."""

    def compute(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        with self.target.model.disable_adapter():  # type: ignore[operator]  # PEFT's
            return super().compute(indices)


class Joint(nn.Module):
    """A head and the adapter of its target, as the one module that is trained.

    The target is not part of it: neither the optimiser nor a checkpoint needs what is frozen.
    """

    def __init__(self, head: Head):
        super().__init__()
        self.head = head
        self.adapter = nn.ParameterList(p for p in head.target.model.parameters() if p.requires_grad)

    def forward(self, batch: TrainingBatch, steps: int, heads_alone: bool) -> tuple[TrainingBatch, list[Prediction]]:
        """The batch with the adapted target's states in place of its own, and what the head makes of them.

        Args:
            heads_alone: keep the head's gradients from the adapter.
        """
        hidden, taps = self.head.target.encode(batch.states.tokens, self.head.taps, gradient=True)
        states = replace(batch.states, hidden=hidden.float(), taps=None if taps is None else taps.float())
        adapted = replace(batch, states=states)
        return adapted, self.head(_detached(adapted) if heads_alone else adapted, steps)


class JointTrainer(Trainer):
    """Trains a head and its target's adapter; its training rows have the states without it (``UnadaptedFeatures``)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heads_first = round(self.total_steps * self.config.target.adapter.heads_first)
        self._divergence = torch.zeros((), device=self.accelerator.device)

    def _trained(self) -> nn.Module:
        return Joint(self.head)

    def _collect_weights(self) -> None:
        """Nothing to collect: the head and the adapter are trained in place."""

    def _seen_states(self) -> FeatureSource:
        source = self.train
        return OnlineFeatures(self.target, source.rows, source.taps, source.dtype, source.prompt_positions)

    def _parameter_groups(self, trained: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": list(self.head.parameters()), "lr": self.config.optim.lr},
            {"params": list(trained.get_submodule("adapter").parameters()), "lr": self.config.target.adapter.lr},
        ]

    def _schedules(self) -> list[Callable[[int], float]]:
        """The adapter's begins where the heads have been trained alone."""
        (heads,) = super()._schedules()
        rest = self.total_steps - self.heads_first
        adapter = warmup_cosine(rest, round(rest * self.config.optim.warmup))
        return [heads, lambda step: 0.0 if step < self.heads_first else adapter(step - self.heads_first)]

    def _step(self, batches: list[list[int]]) -> dict[str, Any]:
        self._divergence.zero_()
        metrics = super()._step(batches)
        total = self.accelerator.reduce(self._divergence, "sum")
        return {**metrics, "divergence": round(float(total) / max(metrics["positions"], 1), 5)}

    def _loss(self, batch: TrainingBatch, counts: Tensor) -> tuple[Tensor, Tensor]:
        heads_alone = self.progress.step < self.heads_first
        with self.accelerator.autocast():
            adapted, predictions = self.module(batch, self.config.head.steps, heads_alone)
        loss, sums = self._head_loss(_detached(adapted), predictions, counts)
        divergence = self._divergence_from(batch, adapted)
        self._divergence += divergence.detach()
        mean = self.step_batches * divergence / max(float(counts[0]), 1.0)
        return loss + self.config.target.adapter.keep_weight * mean, sums

    def _divergence_from(self, batch: TrainingBatch, adapted: TrainingBatch) -> Tensor:
        """KL divergence of the adapted target from itself without the adapter, summed over the trained tokens."""
        trained = batch.bases(1)
        with torch.no_grad():
            own = self.target.unembed(batch.states.hidden[trained]).float().softmax(-1)
        return forward_kl(self.target.unembed(adapted.states.hidden[trained]), own).sum()


def _detached(batch: TrainingBatch) -> TrainingBatch:
    states = batch.states
    taps = None if states.taps is None else states.taps.detach()
    return replace(batch, states=replace(states, hidden=states.hidden.detach(), taps=taps))
