"""Train a head on a frozen target.

    accelerate launch train/heads.py configs/smollm2_eagle3.yaml data.path=runs/data optim.lr=1e-3

Everything is set in the recipe (train/config.py documents each key) or by ``key=value`` behind it.  With
``dry_run=true`` everything is checked on one batch, and the cost of the run is said.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from mtp.errors import command_line
from mtp.files import write_json
from train.assembly import build_trainer
from train.config import RunConfig
from train.dry_run import dry_run
from train.gate import compare_heads, put_in_place
from train.loop import Trainer
from train.recipe import load_config
from train.traffic import fixed_rows


def run(config: RunConfig) -> None:
    """Follow a recipe, or try it out."""
    if config.dry_run:
        if report := dry_run(config):
            print(report.text())
        return
    trainer = build_trainer(config)
    result = trainer.run()
    if trainer.accelerator.is_main_process:
        print(f"mean accepted length {result['mean_accepted_length']:.2f}; head in {trainer.output / 'best'}")
    if config.start.head is not None:
        compare_with_start(trainer, Path(config.start.head))
    trainer.accelerator.end_training()


def compare_with_start(trainer: Trainer, start: Path) -> None:
    """Say whether the new head is as good as the one in ``start``, and replace that if the recipe wants it."""
    old, new = start.resolve(), trainer.output / "best"
    rows = fixed_rows(trainer.held_out.rows)
    comparison = compare_heads(trainer.config, trainer.target, old, new, rows, trainer.decoding_share)
    if not trainer.accelerator.is_main_process:
        return
    write_json(trainer.output / "gate.json", {"old": str(old), "new": str(new), **comparison.to_dict()})
    print(comparison.sentence())
    if not comparison.passes:
        print(f"The new head does not pass: {start} stays as it is.")
    elif trainer.config.start.replace:
        put_in_place(start, old, new)
        print(f"{start} leads to {new} now; the head before it is still in {old}.")
    else:
        print("The new head passes.")


@command_line
def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        raise SystemExit(__doc__)
    if arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0)
    run(load_config(arguments))


if __name__ == "__main__":
    main()
