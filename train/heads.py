"""Train a head on a frozen target.

    accelerate launch train/heads.py configs/smollm2_eagle3.yaml data.path=runs/data optim.lr=1e-3

Everything is set in the recipe (train/config.py documents each key) or by ``key=value`` behind it.  With
``dry_run=true`` everything is checked on one batch, and the cost of the run is said.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from transformers.utils import logging as transformers_logging

from mtp.support import UnsupportedTargetError
from train.assembly import build_trainer
from train.config import ConfigError, RunConfig
from train.data import DataError
from train.dry_run import dry_run
from train.recipe import load_config


def run(config: RunConfig) -> None:
    """Follow a recipe, or try it out."""
    if config.dry_run:
        if report := dry_run(config):
            print(report.text())
        return
    trainer = build_trainer(config)
    result = trainer.run()
    trainer.accelerator.end_training()
    if trainer.accelerator.is_main_process:
        print(f"mean accepted length {result['mean_accepted_length']:.2f}; head in {trainer.output / 'best'}")


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    try:
        run(load_config(arguments))
    except (ConfigError, DataError, UnsupportedTargetError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
