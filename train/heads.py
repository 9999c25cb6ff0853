"""Train a head on a frozen target.

    accelerate launch train/heads.py configs/smollm2_eagle3.yaml data.path=runs/data optim.lr=1e-3

Everything is set in the recipe (train/config.py documents each key) or by ``key=value`` behind it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from mtp.fingerprint import fingerprint_mismatch
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from train.config import ConfigError, RunConfig, load_config, to_dict
from train.data import DataError, Row, draft_vocabulary, load_rows, split_rows
from train.features import CachedFeatures, FeatureSource, OnlineFeatures, resolve_dtype
from train.fitting import make_head
from train.joint import JointTrainer, UnadaptedFeatures, check_adapter
from train.loop import Trainer, flatten, seed_everything
from train.processes import make_accelerator
from train.target import load_target, load_tokenizer, with_lora

logger = logging.getLogger("train.heads")


def usable_rows(config: RunConfig, target: Target) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, checked against the target and the recipe."""
    rows = load_rows(config.data.path, config.data.limit)
    limit = min(config.data.max_length, target.max_positions or config.data.max_length)
    fitting = [row for row in rows if len(row) <= limit]
    if len(fitting) < len(rows):
        logger.warning(
            "%d of %d rows have more than %d tokens and are left out", len(rows) - len(fitting), len(rows), limit
        )
    if not fitting:
        raise DataError(
            f"{config.data.path}: every row has more than {limit} tokens (data.max_length, or the target's)."
        )
    largest = max(max(row.ids) for row in fitting)
    if largest >= target.vocab_size:
        raise DataError(
            f"{config.data.path} holds token id {largest}, but the target has {target.vocab_size} tokens: these "
            "answers come from another target."
        )
    train, held_out = split_rows(fitting, config.data.held_out_fraction)
    if not held_out:
        raise DataError(
            f"No held-out rows: data.held_out_fraction={config.data.held_out_fraction} of {len(fitting)} rows is none. "
            "Raise it or add rows: acceptance is only worth reporting on prompts that were not trained on."
        )
    if not train:
        raise DataError(f"No training rows: all {len(fitting)} rows are held out; lower data.held_out_fraction.")
    check_origin(config, target)
    return train, held_out


def check_origin(config: RunConfig, target: Target) -> None:
    """Refuse answers that another target wrote, or a split other than theirs, where the data says so."""
    record = Path(config.data.path) / "distill.json"
    if not record.is_file():
        return
    written = json.loads(record.read_text(encoding="utf-8"))
    fingerprint = written.get("fingerprint")
    if fingerprint and fingerprint_mismatch(target.fingerprint(), fingerprint):
        raise DataError(
            f"{config.data.path} holds answers of a target with fingerprint {fingerprint}; {config.target.path} has "
            f"{target.fingerprint()}. Distil again with this target."
        )
    fraction = written.get("held_out", {}).get("fraction")
    if fraction is not None and fraction != config.data.held_out_fraction:
        raise DataError(
            f"{config.data.path} was split with held_out_fraction {fraction}; the recipe says "
            f"{config.data.held_out_fraction}. Set data.held_out_fraction={fraction}, so that what others measure on "
            "is not trained on here."
        )


def feature_sources(
    config: RunConfig,
    accelerator: Accelerator,
    target: Target,
    train: list[Row],
    held_out: list[Row],
    taps: tuple[int, ...],
) -> tuple[FeatureSource, FeatureSource]:
    """Where states come from, for training and held-out rows; a cache is complete when this returns."""
    dtype = resolve_dtype(config.features.dtype, target)
    if config.features.mode == "online":
        source = UnadaptedFeatures if config.target.adapter.rank > 0 else OnlineFeatures
        return source(target, train, taps, dtype), OnlineFeatures(target, held_out, taps, dtype)
    root = config.features.folder or str(Path(config.output) / "features")
    sources = tuple(CachedFeatures(target, rows, taps, root, dtype) for rows in (train, held_out))
    for source in sources:
        source.build(accelerator.process_index, accelerator.num_processes)
    accelerator.wait_for_everyone()
    return sources[0], sources[1]


def build_trainer(config: RunConfig) -> Trainer:
    """Everything a run needs, from a recipe."""
    accelerator = make_accelerator(config)
    check_adapter(config, accelerator)
    if not accelerator.is_main_process:
        logging.getLogger().setLevel(logging.WARNING)
    target = load_target(config.target, accelerator.device)
    train, held_out = usable_rows(config, target)
    if config.target.adapter.rank > 0:
        target = with_lora(target, config.target.adapter)
    seed_everything(config.optim.seed)
    draft_ids = draft_vocabulary(train, config.head.draft_vocab_size, target.vocab_size, target.eos_token_ids)
    head = make_head(config, target, draft_ids)
    sources = feature_sources(config, accelerator, target, train, held_out, head.taps)
    positions = sum(len(row.response_ids) for row in train)
    logger.info(
        "%s head, %.1f M parameters; %d training rows (%d positions), %d held-out rows",
        head.family,
        head.num_trainable_parameters() / 1e6,
        len(train),
        positions,
        len(held_out),
    )
    if config.report_to:
        accelerator.init_trackers("mtp", config=flatten(to_dict(config)))
    tokenizer = load_tokenizer(config.target)
    trainer = JointTrainer if config.target.adapter.rank > 0 else Trainer
    return trainer(config, accelerator, target, head, sources[0], sources[1], tokenizer)


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    try:
        trainer = build_trainer(load_config(arguments))
        result = trainer.run()
    except (ConfigError, DataError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error
    trainer.accelerator.end_training()
    if trainer.accelerator.is_main_process:
        print(f"mean accepted length {result['mean_accepted_length']:.2f}; head in {trainer.output / 'best'}")


if __name__ == "__main__":
    main()
