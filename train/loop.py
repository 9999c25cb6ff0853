"""The training loop: frozen target, head, optimiser; evaluate, checkpoint, resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn

from mtp.checkpoint import save_checkpoint
from mtp.files import restore_folder, write_json
from mtp.heads import Head, Prediction, TrainingBatch
from mtp.heads.warmstart import TooFewRowsError
from mtp.target import Target
from train.batches import BatchOrder, trained_positions, training_batch
from train.checkpoints import Progress, batches_per_step, check_resumable, find_checkpoint, load_state, save_state
from train.config import RunConfig, to_dict
from train.data import DataError
from train.diagnosis import as_text, diagnose
from train.evaluate import evaluate
from train.features import FeatureSource
from train.interrupts import Interrupts
from train.objective import metrics_of, objective
from train.processes import ALONE, Share, copy_weights, engine, prepare_engine, trained_copy
from train.run_log import RunLog
from train.schedule import warmup_cosine
from train.target import ShardedTarget
from train.tracking import log_samples, sample_answers

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """One run.

    Args:
        config: the recipe.
        accelerator: from accelerate; decides devices and precision.
        target: frozen.
        head: to be trained, attached to the target.
        train: states of the training rows.
        held_out: states of the rows for evaluation.
        tokenizer: saved beside the head; may be None.
        prepared: seconds that the states took before, for the log.
    """

    config: RunConfig
    accelerator: Accelerator
    target: Target
    head: Head
    train: FeatureSource
    held_out: FeatureSource
    tokenizer: Any = None
    prepared: float = 0.0
    progress: Progress = field(default_factory=Progress)
    interrupts: Interrupts = field(default_factory=Interrupts)
    _stop_agreed: bool = False

    def __post_init__(self) -> None:
        self.output = Path(self.config.output)
        optim, world = self.config.optim, self.accelerator.num_processes
        self.checkpoint = find_checkpoint(self.output, self.config.resume)
        #: Batches of an optimiser step, over all processes: a run keeps it wherever it is continued.
        self.step_batches = batches_per_step(self.checkpoint, optim.accumulate * world, world)
        self.order = BatchOrder(self.train.rows, optim.batch_positions, optim.epochs, optim.seed)
        batches = self.order.count()
        self.total_steps = batches // self.step_batches
        if self.total_steps == 0 and optim.epochs != 0:
            raise DataError(
                f"{len(self.train.rows)} training rows make {batches} batches, but a step takes {self.step_batches} "
                f"({world} processes); use more rows, or a smaller optim.batch_positions or optim.accumulate."
            )
        self.log = RunLog(self.accelerator, self.output, self.config.report_to)
        self.share = Share(self.accelerator.process_index, world)

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end of the recipe (or to an interrupt) and return the last evaluation."""
        self.begin()
        with self.interrupts, self.log.bar(range(self.total_steps), "training", "step", self.progress.step) as bar:
            before = replace(self.progress)
            for batches in self.order.steps(self.step_batches, self.progress.step):
                started = time.perf_counter()
                metrics = self._step(batches)
                self.progress.seconds += time.perf_counter() - started
                bar.update()
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", acc=f"{metrics['accuracy'][0]:.3f}")
                if self.progress.step % self.config.log_every == 0:
                    metrics["tokens_per_second"] = round(self.progress.rate_since(before), 1)
                    before = replace(self.progress)
                    self.log.event({"event": "step", **metrics}, self.progress)
                if self._stop_agreed:
                    self._save_state()
                    self.log.say(
                        f"Interrupted: checkpoint at step {self.progress.step} written; the same command resumes."
                    )
                    raise SystemExit(130)
                if self.config.eval.every and self.progress.step % self.config.eval.every == 0:
                    self._evaluate()
                if self.progress.step % self.config.checkpoint_every == 0:
                    self._save_state()
        self._save_state()  # before the evaluation: whatever happens there, no step is lost
        result = self._evaluate()
        self._export("last", result)
        return result

    def _step(self, batches: list[list[int]]) -> dict[str, Any]:
        """One step of the optimiser on ``batches`` (of all processes); returns the metrics of all of them."""
        counts = trained_positions([self.train.rows[i] for batch in batches for i in batch], self.config.head.steps)
        first = self.progress.step * self.step_batches
        # Steps that follow the head's own guesses become more frequent as it learns.
        own_tokens = self.config.optim.own_tokens * self.progress.step / self.total_steps
        sums = torch.zeros(4, self.config.head.steps, device=self.accelerator.device)
        for number, batch in self.share.of(list(enumerate(batches, start=first))):
            # What a head draws belongs to the batch, and not to the process or to what was computed before.
            seed_everything(int(np.random.SeedSequence([self.config.optim.seed, number]).generate_state(1)[0]))
            with self.accelerator.accumulate(self.module):
                loss, added = self._loss(replace(training_batch(self.train, batch), own_tokens=own_tokens), counts)
                sums += added
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.optim.clip_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        self.progress.step += 1
        self.progress.positions += int(counts[0])
        return {
            **metrics_of(self._sum_over_processes(sums), self.config.optim),
            "positions": int(counts[0]),
            "gradient_norm": None if norm is None else round(float(norm), 4),
            "lr": self.scheduler.get_last_lr()[0],
        }

    def _loss(self, batch: TrainingBatch, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of one of the step's batches, and its sums; see ``objective``."""
        with self.accelerator.autocast():
            predictions = self.module(batch, self.config.head.steps)
        return self._head_loss(batch, predictions, counts)

    def _head_loss(self, batch: TrainingBatch, predictions: list[Prediction], counts: Tensor) -> tuple[Tensor, Tensor]:
        """``_loss`` of what the head predicted for ``batch``."""
        share, sums = objective(self.head, batch, predictions, self.config.optim, counts)
        # Gradients are averaged over the batches of a process and over processes, but the means are sums already.
        return self.step_batches * share, sums

    def _sum_over_processes(self, sums: Tensor) -> Tensor:
        """``[4, steps]`` of all processes; on the same occasion they agree whether any of them was asked to stop."""
        asked = sums.new_full((1,), float(self.interrupts.requested))
        total = self.accelerator.reduce(torch.cat([sums.flatten(), asked]), "sum").cpu()
        self._stop_agreed = bool(total[-1] > 0)
        return total[:-1].view_as(sums)

    def _warm_start(self) -> None:
        """Least-squares start on some of the rows; every process does the same, so all agree."""
        batches = self.order.sample(self.config.head.warm_start_positions)
        bar = self.log.bar(batches, "warm start", "batch")
        try:
            self.head.warm_start(training_batch(self.train, batch) for batch in bar)
        except TooFewRowsError as error:
            raise DataError(str(error)) from error

    # ---- evaluation and checkpoints -------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, Any]:
        """Losses and decoded acceptance on held-out rows, which the processes share; the numbers are those of all.

        The best head so far is kept in ``output/best``.
        """
        self._collect_weights()
        share = self.decoding_share
        result = {**evaluate(self.head, self.held_out, self.config, share), "step": self.progress.step}
        self.log.event({"event": "evaluation", **result, "stages": result["seconds"]}, self.progress)
        tau, counted = result["mean_accepted_length"], result["held_out"]
        self.log.say(
            f"step {self.progress.step}: mean accepted length {tau:.3f} on {result['data']}, held-out loss "
            f"{counted['loss']}, accuracy {counted['accuracy']}"
        )
        # Where the target is whole the main process looks by itself.
        if share is ALONE or self.accelerator.is_main_process:
            self._diagnose(result)
        if tau >= self.progress.best:
            self.progress.best = tau
            self._export("best", result)
        self.accelerator.wait_for_everyone()
        return result

    @property
    def decoding_share(self) -> Share:
        """The part of an evaluation that this process does."""
        # The processes of a sharded target run each pass together, so all of them do all of the work.
        return ALONE if isinstance(self.target, ShardedTarget) else self.share

    def _seen_states(self) -> FeatureSource:
        """The training rows' states as the head reads them."""
        return self.train

    def _diagnose(self, acceptance: dict[str, Any]) -> None:
        """Say why acceptance is what it is, in the log, on the terminal and in the run's folder, and show answers."""
        optim, steps = self.config.optim, self.config.head.steps
        self.head.eval()
        found = diagnose(
            self.head, self._seen_states(), self.held_out, acceptance, steps=steps, positions=optim.batch_positions
        )
        self.log.event({"event": "diagnosis", **found}, self.progress)
        if self.accelerator.is_main_process:
            write_json(self.output / "diagnosis.json", {"step": self.progress.step, **found})
        if not self.config.dry_run:  # of one batch, and of no interest
            self.log.say(as_text(found))
        rows = self.held_out.rows[: self.config.eval.samples] if self.tokenizer is not None else []
        samples = sample_answers(self.head, rows, self.tokenizer, self.config.eval.max_new_tokens)
        self.log.event({"event": "samples", "samples": samples}, self.progress)
        log_samples(self.accelerator, samples, self.progress.step)
        self.head.train()

    def _export(self, name: str, acceptance: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            training = {
                "recipe": to_dict(self.config),
                "steps": self.progress.step,
                "trained_positions": self.progress.positions,
                "seconds": round(self.progress.seconds),
            }
            save_checkpoint(
                self.output / name,
                self.head,
                tokenizer=self.tokenizer,
                acceptance=acceptance,
                training=training,
                bundle_target=self.config.bundle_target,
            )

    def _save_state(self) -> None:
        """Write everything a resumed run needs, and drop the oldest checkpoints."""
        save_state(self.accelerator, self.output, self.progress, self.config, self.step_batches)

    # ---- set-up and reporting -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Hand the head to the engine, at the newest checkpoint or freshly started."""
        started = time.perf_counter()
        if self.accelerator.is_main_process:
            restore_folder(self.output / "best")
        if self.checkpoint is not None:
            check_resumable(self.accelerator, self.checkpoint, self.config)
        elif self.config.start.head is None and self.config.head.warm_start_positions > 0:
            self._warm_start()  # first: some engines take a copy of the weights when they are handed them
        warmed = time.perf_counter() - started
        self.module, self.optimizer, self.scheduler = self._prepare()
        if self.checkpoint is not None:
            self.progress = load_state(self.accelerator, self.checkpoint)
            self.log.say(f"resuming from {self.checkpoint}, step {self.progress.step} of {self.total_steps}")
        spent = {"features_seconds": round(self.prepared, 3), "warm_start_seconds": round(warmed, 3)}
        self.log.event({"event": "start", **spent}, self.progress)
        world, each = self.accelerator.num_processes, self.accelerator.gradient_accumulation_steps
        self.log.say(
            f"{engine(self.accelerator)}, {world} x {self.accelerator.device.type}: {self.total_steps} steps of {each} "
            f"batch{'es' if each > 1 else ''} in each process"
        )

    def _prepare(self) -> tuple[Any, Any, Any]:
        optim = self.config.optim
        prepare_engine(self.accelerator, self.step_batches // self.accelerator.num_processes, optim.clip_norm)
        trained = self._trained()
        for module in trained.modules():
            if isinstance(module, Head):
                module.activation_checkpointing = optim.activation_checkpointing
        optimizer = torch.optim.AdamW(
            self._parameter_groups(trained),
            betas=(optim.beta1, optim.beta2),
            weight_decay=optim.weight_decay,
            fused=True,  # one pass over weights and moments instead of ten
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedules())
        return self.accelerator.prepare(trained, optimizer, scheduler)

    def _trained(self) -> nn.Module:
        """What the engine is handed."""
        return trained_copy(self.accelerator, self.head)

    def _collect_weights(self) -> None:
        """Bring ``head`` up to date with what is trained; every process must call this."""
        copy_weights(self.accelerator.unwrap_model(self.module), self.head)

    def _parameter_groups(self, trained: nn.Module) -> list[dict[str, Any]]:
        """What the optimiser is handed, with peak learning rates."""
        return [{"params": list(trained.parameters()), "lr": self.config.optim.lr}]

    def _schedules(self) -> list[Callable[[int], float]]:
        """Of each group, the factor on its peak learning rate at a step."""
        return [warmup_cosine(self.total_steps, round(self.total_steps * self.config.optim.warmup))]


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike in every process: fresh weights must agree."""
    set_seed(seed)
