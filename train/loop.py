"""The training loop: frozen target, head, optimiser; evaluate, checkpoint, resume."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from tqdm import tqdm

from mtp.checkpoint import save_checkpoint
from mtp.files import write_json
from mtp.heads import Head, TrainingBatch
from mtp.target import Target
from train.checkpoints import Progress, find_checkpoint, load_state, save_state
from train.config import RunConfig, to_dict
from train.data import DataError, length_batches
from train.diagnosis import as_text, diagnose
from train.evaluate import decode_acceptance, held_out_metrics, teacher_probs
from train.features import FeatureSource
from train.losses import soft_cross_entropy
from train.tracking import flatten, log_samples, sample_answers

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
    """

    config: RunConfig
    accelerator: Accelerator
    target: Target
    head: Head
    train: FeatureSource
    held_out: FeatureSource
    tokenizer: Any = None
    progress: Progress = field(default_factory=Progress)
    _stop_requested: bool = False

    def __post_init__(self) -> None:
        self.output = Path(self.config.output)
        self.batches_per_epoch = len(self._epoch_batches(0))
        self.total_steps = max(1, self.config.optim.epochs * self.batches_per_epoch // self.config.optim.accumulate)
        self.module, self.optimizer, self.scheduler = self._prepare()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end of the recipe (or to an interrupt) and return the last evaluation."""
        self._resume()
        if self.progress.step == 0 and self.config.head.warm_start_positions > 0:
            self._warm_start()
        with self._interruptible(), self._bar() as bar:
            before = replace(self.progress)
            for batch in self._remaining_batches():
                started = time.perf_counter()
                metrics = self._step(batch)
                self.progress.seconds += time.perf_counter() - started
                if metrics is None:  # a batch of an unfinished accumulation
                    continue
                bar.update()
                bar.set_postfix(loss=f"{metrics['loss']:.3f}", acc=f"{metrics['accuracy'][0]:.3f}")
                if self.progress.step % self.config.log_every == 0:
                    metrics["tokens_per_second"] = round(self.progress.rate_since(before), 1)
                    before = replace(self.progress)
                    self._log({"event": "step", **metrics})
                if self._stop_is_agreed():
                    self._save_state()
                    self._say(
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

    def _step(self, batch: TrainingBatch) -> dict[str, Any] | None:
        """One forward and backward pass, and an optimiser step when enough batches came together."""
        with self.accelerator.accumulate(self.module):
            loss, metrics = self._loss(batch)
            self.accelerator.backward(loss)
            norm = None
            if self.accelerator.sync_gradients:
                norm = self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.optim.clip_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.progress.positions += metrics["positions"] * self.accelerator.num_processes
        if not self.accelerator.sync_gradients:
            return None
        self.progress.step += 1
        metrics["gradient_norm"] = round(float(norm), 4) if norm is not None else None
        metrics["lr"] = self.scheduler.get_last_lr()[0]
        return metrics

    def _loss(self, batch: TrainingBatch) -> tuple[Tensor, dict[str, Any]]:
        """Soft cross-entropy of all steps, each the mean over its trained positions in all processes."""
        probs, place = teacher_probs(self.head, batch)
        with self.accelerator.autocast():
            predictions = self.module(batch, self.config.head.steps)
        losses, accuracy, outside = [], [], []
        for prediction in predictions:
            teacher = probs[place[prediction.rows, prediction.positions]]
            count = torch.tensor(float(max(len(prediction.rows), 1)), device=probs.device)
            count = self.accelerator.reduce(count, "mean")
            losses.append(soft_cross_entropy(prediction.logits, teacher).sum() / count)
            with torch.no_grad():
                labels = batch.states.tokens[prediction.rows, prediction.positions + 1]
                right = self.head.draft_ids[prediction.logits.argmax(-1)] == labels
                accuracy.append(round(right.float().mean().item(), 4) if len(labels) else 0.0)
                outside.append((~torch.isin(labels, self.head.draft_ids)).float().mean().item() if len(labels) else 0.0)
        weights = [self.config.optim.step_weight**step for step in range(len(losses))]
        total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        assert isinstance(total, Tensor)
        metrics = {
            "loss": round(total.item(), 4),
            "step_loss": [round(loss.item(), 4) for loss in losses],
            "accuracy": accuracy,
            "outside_draft_vocabulary": round(outside[0], 4),
            "positions": len(predictions[0].rows),
        }
        return total, metrics

    # ---- data -----------------------------------------------------------------------------------------------------

    def _epoch_batches(self, epoch: int) -> list[list[int]]:
        """This process's batches of row indices for one pass; the same for the same seed, epoch and process."""
        generator = np.random.default_rng([self.config.optim.seed, epoch])
        lengths = [len(row) for row in self.train.rows]
        batches = length_batches(lengths, self.config.optim.batch_positions, generator)
        world = self.accelerator.num_processes
        usable = len(batches) // world * world
        if usable == 0:
            raise DataError(
                f"{len(lengths)} training rows make {len(batches)} batches, fewer than the {world} processes; use more "
                "rows or a smaller optim.batch_positions."
            )
        return batches[:usable][self.accelerator.process_index :: world]

    def _remaining_batches(self) -> Iterator[TrainingBatch]:
        while self.progress.epoch < self.config.optim.epochs:
            for rows in self._epoch_batches(self.progress.epoch)[self.progress.batch :]:
                self.progress.batch += 1
                yield training_batch(self.train, rows)
            self.progress.epoch += 1
            self.progress.batch = 0

    def _warm_start(self) -> None:
        """Least-squares start on the first batches; every process does the same, so all agree."""
        wanted = self.config.head.warm_start_positions
        generator = np.random.default_rng(self.config.optim.seed)
        order = generator.permutation(len(self.train.rows)).tolist()
        chosen: list[int] = []
        positions = 0
        for index in order:
            if positions >= wanted:
                break
            chosen.append(index)
            positions += len(self.train.rows[index].response_ids)
        lengths = [len(self.train.rows[index]) for index in chosen]
        batches = length_batches(lengths, self.config.optim.batch_positions, generator=None)
        bar = tqdm(batches, desc="warm start", unit="batch", disable=not self.accelerator.is_main_process)
        self.head.warm_start(training_batch(self.train, [chosen[i] for i in batch]) for batch in bar)

    # ---- evaluation and checkpoints -------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, Any]:
        """Losses and decoded acceptance on held-out rows; the best head so far is kept in ``output/best``."""
        result: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            self.head.eval()
            rows = list(range(len(self.held_out.rows)))
            lengths = [len(row) for row in self.held_out.rows]
            batches = length_batches(lengths, self.config.optim.batch_positions, generator=None)
            metrics = held_out_metrics(
                self.head, (training_batch(self.held_out, batch) for batch in batches), self.config.head.steps
            )
            self.head.set_rank_accuracy(tuple(tuple(step) for step in metrics["rank_accuracy"]))
            self.head.set_calibration(())  # what is measured now is the head's own confidence
            acceptance = decode_acceptance(
                self.target,
                self.head,
                [self.held_out.rows[index] for index in rows[: self.config.eval.rows]],
                max_new_tokens=self.config.eval.max_new_tokens,
                batch_size=self.config.eval.batch_size,
            )
            self.head.set_calibration(tuple(tuple(curve) for curve in acceptance["calibration"]["curves"]))
            result = {**acceptance, "held_out": metrics, "step": self.progress.step}
            self._log({"event": "evaluation", **result})
            self._say(
                f"step {self.progress.step}: mean accepted length {acceptance['mean_accepted_length']:.3f} on "
                f"{acceptance['data']}, held-out loss {metrics['loss']}, accuracy {metrics['accuracy']}"
            )
            self._diagnose(acceptance)
            if acceptance["mean_accepted_length"] >= self.progress.best:
                self.progress.best = acceptance["mean_accepted_length"]
                self._export("best", result)
            self.head.train()
        self.accelerator.wait_for_everyone()
        return result

    def _diagnose(self, acceptance: dict[str, Any]) -> None:
        """Say why acceptance is what it is, in the log, on the terminal and in the run's folder, and show answers."""
        optim, steps = self.config.optim, self.config.head.steps
        found = diagnose(self.head, self.train, self.held_out, acceptance, steps=steps, positions=optim.batch_positions)
        self._log({"event": "diagnosis", **found})
        write_json(self.output / "diagnosis.json", {"step": self.progress.step, **found})
        if not self.config.dry_run:  # of one batch, and of no interest
            self._say(as_text(found))
        rows = self.held_out.rows[: self.config.eval.samples] if self.tokenizer is not None else []
        samples = sample_answers(self.head, rows, self.tokenizer, self.config.eval.max_new_tokens)
        self._log({"event": "samples", "samples": samples})
        log_samples(self.accelerator, samples, self.progress.step)

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
        save_state(self.accelerator, self.output, self.progress, self.config)

    def _resume(self) -> None:
        folder = find_checkpoint(self.output, self.config.resume)
        if folder is not None:
            self.progress = load_state(self.accelerator, folder, self.config)
            self._say(f"resuming from {folder}, step {self.progress.step} of {self.total_steps}")

    # ---- set-up and reporting -------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Any, Any, Any]:
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=optim.weight_decay
        )
        # accelerate steps a prepared scheduler once a process, so that its length is in steps of all of them.
        world = self.accelerator.num_processes
        schedule = warmup_cosine(self.total_steps * world, round(self.total_steps * world * optim.warmup))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return self.accelerator.prepare(self.head, optimizer, scheduler)

    def _bar(self) -> tqdm[Any]:
        return tqdm(
            total=self.total_steps,
            initial=self.progress.step,
            desc="training",
            unit="step",
            disable=not self.accelerator.is_main_process,
        )

    def _stop_is_agreed(self) -> bool:
        """Whether any process was asked to stop: all of them have to, at the same step."""
        if self.accelerator.num_processes == 1:
            return self._stop_requested
        asked = torch.tensor(float(self._stop_requested), device=self.accelerator.device)
        return bool(self.accelerator.reduce(asked, "sum") > 0)

    def _interruptible(self) -> _Interrupts:
        def request() -> None:
            self._stop_requested = True

        return _Interrupts(request)

    def _log(self, values: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        values = {"step": self.progress.step, "seconds": round(self.progress.seconds, 1), **values}
        self.output.mkdir(parents=True, exist_ok=True)
        with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        if self.config.report_to:
            self.accelerator.log(flatten(values), step=self.progress.step)

    def _say(self, message: str) -> None:
        if self.accelerator.is_main_process:
            tqdm.write(message)


class _Interrupts:
    """Within the block, SIGINT and SIGTERM ask for a checkpoint and an end after the current step."""

    def __init__(self, request: Callable[[], None]):
        self.request = request

    def __enter__(self) -> None:
        def handle(number: int, frame: Any) -> None:
            self.request()
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C stops at once

        self.before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def training_batch(features: FeatureSource, indices: Sequence[int]) -> TrainingBatch:
    """Rows ``indices`` with their states; exactly the response tokens are marked for training."""
    states = features.batch(indices)
    position = torch.arange(states.tokens.shape[1], device=states.tokens.device)
    starts = torch.tensor([features.response_start(i) for i in indices], device=states.tokens.device)
    return TrainingBatch(states, (position >= starts[:, None]) & states.valid)


def warmup_cosine(total: int, warmup: int, floor: float = 0.1) -> Callable[[int], float]:
    """Factor on the peak learning rate at a step: linear warm-up, then a cosine down to ``floor``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        share = min(1.0, (step - warmup) / max(total - warmup, 1))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return factor


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch alike in every process: fresh weights must agree."""
    set_seed(seed)
