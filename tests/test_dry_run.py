"""``dry_run: true``: what would fail late fails at once, and what a run costs is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtp.heads import HEADS
from tests.test_training import recipe, workshop  # noqa: F401  (a fixture)
from train import heads as program
from train.config import ConfigError
from train.data import DataError, Row
from train.dry_run import batch_size, check_step, dry_run, seconds_a_batch
from train.recipe import load_config


def tried(workshop: Path, output: Path, *overrides: str) -> Any:  # noqa: F811
    return dry_run(load_config(recipe(workshop, output, "dry_run=true", *overrides)))


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_dry_run_counts_what_the_run_takes_and_leaves_nothing_behind(
    family: str,
    workshop: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    overrides = ("checkpoint_every=1000", "features.mode=cached", f"head.family={family}")
    report = tried(workshop, tmp_path / "run", *overrides)
    assert not any((tmp_path / "run").rglob("*"))
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "run", *overrides)))
    assert report.steps == trainer.total_steps
    trainer.run()
    cache = sum(path.stat().st_size for path in (tmp_path / "run" / "features").rglob("*.safetensors"))
    assert 0.8 * cache < report.disk["features"] <= cache
    heads = sum(path.stat().st_size for name in ("best", "last") for path in (tmp_path / "run" / name).rglob("*"))
    assert report.disk["heads"] == pytest.approx(heads, rel=0.05)
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert report.seconds["training"] > 0
    assert report.memory > 10**6
    text = report.text()
    for word in ("time", "disk", "memory", "hidden states", "all in order", f"{report.steps} steps"):
        assert word in text


def test_the_program_says_what_a_dry_run_found(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program.main(recipe(workshop, tmp_path / "run", "dry_run=true"))
    out = capsys.readouterr().out
    assert "all in order" in out
    assert "likeliest cause" not in out  # of a head that saw one batch


def test_a_batch_that_does_not_fit_is_said_with_what_to_lower(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr("train.objective.mixture", full)
    with pytest.raises(ConfigError, match=r"allocate 2.00 GiB.*optim\.batch_positions \(now 200\)"):
        tried(workshop, tmp_path / "run")
    assert not (tmp_path / "run" / ".dry_run").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": float("nan")}, "loss nan"),
        ({"gradient_norm": float("inf")}, "gradient norm inf"),
        ({"positions": 0}, "the loss mask selects nothing"),
        ({"gradient_norm": 0.0}, "no weight of the head is trained"),
    ],
)
def test_steps_that_teach_nothing_are_refused(changes: dict[str, float], complaint: str) -> None:
    line = {"event": "step", "step": 1, "loss": 2.0, "gradient_norm": 0.5, "positions": 30}
    check_step(line)
    with pytest.raises(DataError, match=complaint):
        check_step(line | changes)


def test_weights_that_come_back_changed_are_refused(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from train import dry_run as module

    load_head = module.load_head

    def spoiled(*args: Any) -> Any:
        head = load_head(*args)
        next(head.parameters()).data.add_(1.0)
        return head

    monkeypatch.setattr(module, "load_head", spoiled)
    with pytest.raises(DataError, match="came back from the exported head with other values"):
        tried(workshop, tmp_path / "run")


def test_time_of_a_batch_leaves_out_the_first() -> None:
    log = [{"event": "step", "seconds": value} for value in (9.0, 10.0, 12.0)] + [{"event": "evaluation"}]
    assert seconds_a_batch(log) == 1.5
    assert seconds_a_batch(log[:1]) == 9.0


def test_a_batch_with_more_to_train_counts_as_larger() -> None:
    rows = [Row((1,) * 8, (2,) * 2), Row((1,) * 2, (2,) * 8), Row((1,), (2,))]
    assert batch_size(rows, [0]) == 12 < batch_size(rows, [1]) == 18
    assert batch_size(rows, [1, 2]) == 20 + 9  # padding costs, too
