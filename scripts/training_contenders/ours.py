"""The training of this library, as train/heads.py does it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from mtp.heads.eagle3 import Eagle3Head
from mtp.target import Target
from scripts.training_contenders.contender import CLIP_NORM, Contender
from scripts.training_contenders.shop import Shop
from train.config import DataConfig, HeadSection, OptimConfig, RunConfig, TargetConfig
from train.features import FeatureSource
from train.loop import Trainer


class FromMemory(FeatureSource):
    """States that were computed before."""

    def __init__(self, shop: Shop, target: Target):
        super().__init__(target, shop.rows, shop.settings["taps"])
        self.shop = shop

    def _states(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        _, hidden, taps, _ = self.shop.padded(indices)
        return hidden.to(self.target.device), taps.to(self.target.device)


class Ours(Contender):
    """The step of train/heads.py, with everything around it: counts, clipping, schedule, metrics."""

    warm_start_positions = 0

    def __init__(self, shop: Shop):
        settings, accelerator = shop.settings, Accelerator(mixed_precision="no")
        self._log = tempfile.TemporaryDirectory()  # nobody reads it
        target = shop.target()
        target.causal_lm.to(accelerator.device)
        config = RunConfig(
            output=self._log.name,
            target=TargetConfig(path=settings["target"]),
            data=DataConfig(path="memory"),
            head=HeadSection(steps=settings["steps"], warm_start_positions=self.warm_start_positions),
            optim=OptimConfig(
                epochs=settings["passes"],
                batch_positions=settings["positions"],
                lr=settings["lr"],
                warmup=0.0,
                clip_norm=CLIP_NORM,
            ),
        )
        torch.manual_seed(0)
        head = Eagle3Head.from_target(
            target, shop.draft_ids.to(target.device), steps=settings["steps"], context_vocabulary=False
        )
        features = FromMemory(shop, target)
        self.trainer, self.target = Trainer(config, accelerator, target, head, features, features), target
        started = time.perf_counter()
        self.trainer.begin()
        self.start_seconds = time.perf_counter() - started
        self.batches = [batch for (batch,) in self.trainer.order.steps(1)]
        self.parameters = head.num_trainable_parameters()

    def step(self, batch: list[int]) -> tuple[int, float]:
        metrics = self.trainer._step([batch])
        return metrics["positions"], metrics["accuracy"][0]

    def trained(self) -> Eagle3Head:
        assert isinstance(self.trainer.head, Eagle3Head)
        return self.trainer.head


class OursWithStart(Ours):
    """As recipes have it: the weights start from least squares on the rows to train on."""

    warm_start_positions = HeadSection.warm_start_positions
