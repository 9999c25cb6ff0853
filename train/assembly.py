"""Everything a run needs, put together from a recipe."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mtp.files import check_writable
from mtp.heads import Head
from mtp.target import Target
from train.config import RunConfig
from train.data import Row, draft_vocabulary
from train.fitting import check_head, make_head
from train.joint import JointTrainer, check_adapter
from train.loop import Trainer, seed_everything
from train.processes import make_accelerator
from train.rows import usable_rows
from train.sources import Sources, plan_sources, prompt_window
from train.start import check_start, continued_head
from train.target import check_placement, load_target, load_tokenizer, with_lora
from train.tracking import check_trackers, start_tracking
from train.traffic import with_traffic

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ingredients:
    """What a run is made of before there is a head.

    Attributes:
        accelerator: from accelerate; decides devices and precision.
        target: frozen.
        tokenizer: the target's.
        train: rows to train on, checked.
        held_out: rows to evaluate on.
    """

    accelerator: Accelerator
    target: Target
    tokenizer: Any
    train: list[Row]
    held_out: list[Row]


def gather(config: RunConfig) -> Ingredients:
    """Load the target and the rows, and check them.

    Raises:
        ConfigError: for a recipe that cannot be followed.
        DataError: for rows that cannot be trained on.
    """
    check_trackers(config.report_to)
    family, _ = check_head(config)
    window = prompt_window(config, family)
    check_start(config)
    accelerator = make_accelerator(config)
    check_writable(Path(config.output))  # better now than behind the hidden states
    check_adapter(config, accelerator)
    check_placement(config, accelerator.num_processes)
    if not accelerator.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    target, tokenizer = load_target(config.target, accelerator.device), load_tokenizer(config.target)
    train, held_out = usable_rows(config, target, tokenizer, window)
    if config.start.traffic is not None:
        train, held_out = with_traffic(config, accelerator, target, tokenizer, train, held_out)
    if config.target.adapter.rank > 0:
        target = with_lora(target, config.target.adapter)
    return Ingredients(accelerator, target, tokenizer, train, held_out)


def first_head(config: RunConfig, parts: Ingredients) -> Head:
    """The recipe's head before its first step, the same in every process."""
    if config.start.head is not None:
        return continued_head(config, parts.target)
    seed_everything(config.optim.seed)
    target = parts.target
    draft_ids = draft_vocabulary(parts.train, config.head.draft_vocab_size, target.vocab_size, target.eos_token_ids)
    return make_head(config, target, draft_ids)


def assemble(config: RunConfig, parts: Ingredients) -> Trainer:
    """A trainer whose hidden states are complete."""
    accelerator = parts.accelerator
    head = first_head(config, parts)
    sources = plan_sources(config, parts.target, head, parts.train, parts.held_out)
    started = time.perf_counter()
    prepare_sources(sources, accelerator)
    prepared = time.perf_counter() - started
    logger.info(
        "%s head, %.1f M parameters; %d training rows (%d positions), %d held-out rows",
        head.family,
        head.num_trainable_parameters() / 1e6,
        len(parts.train),
        sum(len(row.response_ids) for row in parts.train),
        len(parts.held_out),
    )
    start_tracking(accelerator, config)
    trainer = JointTrainer if config.target.adapter.rank > 0 else Trainer
    return trainer(config, accelerator, parts.target, head, sources.train, sources.held_out, parts.tokenizer, prepared)


def prepare_sources(sources: Sources, accelerator: Accelerator) -> None:
    """Say what hidden states will take, and compute those that are to be cached; every process its share."""
    if accelerator.is_main_process:
        logger.info(sources.estimate(accelerator.num_processes).sentence())
        sources.make_room()
    accelerator.wait_for_everyone()
    sources.build(accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()


def build_trainer(config: RunConfig) -> Trainer:
    """Everything a run needs, from a recipe."""
    return assemble(config, gather(config))
