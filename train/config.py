"""The schema of a training recipe: every key, what it means and what it is by default."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mtp.errors import ExplainedError
from train.losses import LossName

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Storage = Literal["bfloat16", "int8"]


class ConfigError(ExplainedError):
    """A recipe that cannot be used; the message names the key, what was found and what was expected."""


@dataclass(frozen=True)
class Range:
    """Numbers that a key may have: finite ones from ``low`` to ``high``, without these where ``above`` or ``below``."""

    low: float = 0
    high: float = math.inf
    above: bool = False
    below: bool = False

    def holds(self, number: float) -> bool:
        at_end = (self.above and number == self.low) or (self.below and number == self.high)
        return math.isfinite(number) and self.low <= number <= self.high and not at_end

    def __str__(self) -> str:
        low = f"more than {self.low}" if self.above else str(self.low)
        if self.high == math.inf:
            return low if self.above else f"{low} or more"
        return f"{low} to {'below ' if self.below else ''}{self.high}"


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Share = Annotated[float, Range(0, 1)]
SomeShare = Annotated[float, Range(0, 1, above=True)]
PartialShare = Annotated[float, Range(0, 1, below=True)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA on the target, trained together with the heads (Medusa-2).

    What is exact then is the text of the adapted target.

    Attributes:
        rank: of the adapter; 0 leaves the target frozen.
        alpha: its products count ``alpha / rank``.
        modules: names of the linear layers that it is put on; empty for all but the output matrix.
        lr: its peak learning rate.
        heads_first: share of all steps in which only the heads are trained.
        keep_weight: of the loss that keeps the target's own distribution, beside that of the heads.
    """

    rank: Natural = 0
    alpha: Positive = 16.0
    modules: tuple[str, ...] = ()
    lr: Positive = 1e-4
    heads_first: PartialShare = 0.2
    keep_weight: NotNegative = 1.0


@dataclass(frozen=True)
class TargetConfig:
    """The frozen model.

    Attributes:
        path: Hub name or folder of a Transformers causal LM.
        revision: of a Hub model.
        dtype: precision it is loaded in; ``auto`` is the checkpoint's own, float32 on a CPU.
        trust_remote_code: allow code that comes with the model; off unless you say so.
        placement: where its weights are. ``replicated``: all of them on each process's device. ``sharded``: each
            process keeps a share of every layer and they are put together layer by layer; for a target that is too
            large for one device. ``spread``: one process, its layers on all devices that it sees, and in CPU memory
            where these are full (``device_map="auto"``).
        quantization: round the weights while they are loaded (bitsandbytes); null takes them as they are. A checkpoint
            that is quantised already needs no word here.
        adapter: to be trained on top of it.
    """

    path: str = ""
    revision: str | None = None
    dtype: Precision = "auto"
    trust_remote_code: bool = False
    placement: Literal["replicated", "sharded", "spread"] = "replicated"
    quantization: Literal["int8", "int4"] | None = None
    adapter: AdapterConfig = field(default_factory=AdapterConfig)


@dataclass(frozen=True)
class DataConfig:
    """Distilled rows.

    Attributes:
        path: a folder that ``train/distill.py`` wrote, or a JSONL file of ``prompt_ids`` and ``response_ids``.
        held_out_fraction: share of the prompts (by hash) that are never trained on.
        limit: use only the first so many rows.
        max_length: rows with more tokens are left out.
    """

    path: str = ""
    held_out_fraction: Share = 0.05
    limit: Count | None = None
    max_length: Count = 2048


@dataclass(frozen=True)
class FeaturesConfig:
    """The target's hidden states.

    Attributes:
        mode: ``online`` runs the target for every batch; ``cached`` runs it once and keeps the states on disk.
        folder: of the cache; by default ``features`` inside the run's folder.
        dtype: precision in which the target computes them: ``auto`` is bfloat16 on CPUs that multiply it natively
            (half the time; the target's distributions move by about 1 % in total variation), else the target's own.
            Only a float32 target can compute in another precision than its own.
        prompt_positions: how much of each prompt the head is shown, in positions before the answer. ``all`` of it is
            what a head sees when it drafts. ``auto`` is all for heads that attend to the text before or guess its
            tokens (``sizes.context_vocabulary``), and the few that are needed for others: their cache is of answers
            alone. A number is a window.
        storage: precision of the cache; int8 halves it.
        budget_gb: gigabytes (1e9 bytes) that the cache's folder may take. Caches of other targets or data in it are
            removed first; what still does not fit is computed anew in every pass. null for no limit but the disk's.
    """

    mode: Literal["online", "cached"] = "online"
    folder: str | None = None
    dtype: Precision = "auto"
    prompt_positions: Natural | Literal["auto", "all"] = "auto"
    storage: Storage = "bfloat16"
    budget_gb: Positive | None = None


@dataclass(frozen=True)
class HeadSection:
    """What is trained.

    Attributes:
        family: one of ``mtp.available_heads()``.
        steps: unrolled steps, or heads.
        draft_vocab_size: most frequent tokens that the head can propose; null for the whole vocabulary. All heads but
            assistants can also propose the tokens of the text so far, and need fewer, unless
            ``sizes.context_vocabulary`` is false.
        nodes: nodes of the trees it proposes by default.
        sizes: other sizes of the family's config, for example ``intermediate_size``.
        warm_start_positions: trained positions used for the least-squares start; 0 to start at random.
    """

    family: str = "eagle3"
    steps: Count = 4
    draft_vocab_size: Count | None = 8192
    nodes: Count = 16
    sizes: dict[str, Any] = field(default_factory=dict)
    warm_start_positions: Natural = 100_000


@dataclass(frozen=True)
class OptimConfig:
    """How it is trained.

    Attributes:
        epochs: passes over the training rows; 0 measures and keeps what the head begins as.
        batch_positions: token positions of a batch on one device, padding included.
        accumulate: batches a step in each process. A run that goes on with another number of processes keeps the
            batches of a step over all of them.
        lr: peak learning rate (AdamW, linear warm-up, cosine to a tenth).
        warmup: share of all steps.
        loss: weights of the losses to add up (train/losses.py has each); what is not named is left out.
        step_weight: unrolled step i counts ``step_weight ** i`` (EAGLE-3 uses 0.8); or a list, one weight a step.
        own_tokens: share of the positions that follow the head's own guesses at the end of the training, rising
            steadily from none: where a guess of its own would be wrong, deeper steps are not trained.
        activation_checkpointing: keep no more of an unrolled step for the backward pass than its inputs and logits, and
            compute the rest again. For rows so long that a batch of one does not fit; otherwise smaller batches and a
            larger ``accumulate`` save as much and cost nothing.
        seed: of everything that is random.
    """

    epochs: Natural = 2
    batch_positions: Count = 4096
    accumulate: Count = 1
    lr: Positive = 1e-3
    warmup: Share = 0.05
    weight_decay: NotNegative = 0.0
    beta1: PartialShare = 0.9
    beta2: PartialShare = 0.95
    clip_norm: Positive = 1.0
    loss: dict[LossName, float] = field(default_factory=lambda: {"soft_cross_entropy": 1.0})
    step_weight: float | tuple[float, ...] = 0.8
    own_tokens: Share = 0.0
    activation_checkpointing: bool = False
    seed: Seed = 0


@dataclass(frozen=True)
class StartConfig:
    """A head that is trained further, on what its target answered in use.

    When the run ends, the new head is compared with the one it began from on held-out rows of ``data.path``, which do
    not change with the log (train/gate.py).

    Attributes:
        head: folder of an augmented checkpoint; null for a fresh head.
        traffic: folder of a log (``serve/generate.py --log``, ``mtp.TrafficLog``) to train on beside ``data.path``.
        traffic_share: of the trained tokens of a pass, those that are the log's.  The others are of distilled rows, so
            that the head does not forget them.
        replace: let ``start.head``, then a symbolic link, lead to the new head if that passes the comparison.
        gate_rows: held-out rows that both heads are decoded with.
        gate_tolerance: the fall of the mean accepted length, as a share of it, that has to be ruled out with 95 %
            confidence; the new head must not be below the old one on the rows themselves either.
    """

    head: str | None = None
    traffic: str | None = None
    traffic_share: SomeShare = 0.5
    replace: bool = False
    gate_rows: Count = 128
    gate_tolerance: Share = 0.02


@dataclass(frozen=True)
class EvalConfig:
    """Acceptance on held-out rows, with the real decoder.

    Attributes:
        every: optimiser steps between evaluations; 0 for one at the end only.
        rows: held-out rows.
        max_new_tokens: tokens generated for each.
        batch_size: rows decoded together.
        samples: answers shown to trackers and written to the log, with the kept tokens marked.
    """

    every: Natural = 0
    rows: Count = 32
    max_new_tokens: Count = 64
    batch_size: Count = 8
    samples: Natural = 3


@dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
        output: folder of the run; the best head lies in ``output/best``, the last one in ``output/last``.
        resume: ``auto`` continues from the newest whole checkpoint in ``output``; ``none`` starts afresh; or a folder.
        checkpoint_every: optimiser steps between checkpoints.
        keep_checkpoints: how many are kept.
        log_every: optimiser steps between log lines.
        report_to: ``wandb`` and ``tensorboard``, any of them.
        mixed_precision: ``no``, ``bf16`` or ``fp16``, as accelerate knows it; null leaves it to accelerate's config.
        bundle_target: put the target's weights into the checkpoint too.
        dry_run: check everything on one batch, say what the run will cost, and leave nothing behind.
    """

    output: str = "runs/head"
    resume: str = "auto"
    checkpoint_every: Count = 100
    keep_checkpoints: Count = 2
    log_every: Count = 10
    report_to: tuple[str, ...] = ()
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    bundle_target: bool = False
    dry_run: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    head: HeadSection = field(default_factory=HeadSection)
    start: StartConfig = field(default_factory=StartConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Nested plain values, for logs and checkpoints."""
    return dataclasses.asdict(config)
