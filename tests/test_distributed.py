"""Training by several real processes: the same run as by one, and continued by another number of them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.killing import MOMENTS
from tests.workshop import make_workshop, recipe
from train import heads as program
from train.batches import trained_positions, training_batch
from train.checkpoints import find_checkpoint, whole_checkpoints
from train.config import load_config

ROOT = Path(__file__).parents[1]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)"
)
# By one process, a step of two batches; by two, one batch of each.
ALONE = ("optim.accumulate=2",)
TOGETHER = ("optim.accumulate=1",)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="module")
def alone(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by one process."""
    output = tmp_path_factory.mktemp("alone") / "run"
    run_here(workshop, output, *ALONE)
    return output


@pytest.fixture(scope="module")
def together(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by two processes."""
    output = tmp_path_factory.mktemp("together") / "run"
    launch("cpu2", workshop, output, *TOGETHER)
    return output


def run_here(workshop: Path, output: Path, *overrides: str) -> None:
    program.build_trainer(load_config(recipe(workshop, output, *overrides))).run()


def start(config: str, workshop: Path, output: Path, *overrides: str, script: str = "train/heads.py") -> Any:
    """``accelerate launch`` with two processes, in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"configs/accelerate/{config}.yaml", "--num_processes", "2"]
    command += ["--main_process_port", str(port), "--mixed_precision", "no", script]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*command, *recipe(workshop, output, *overrides)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def launch(*arguments: Any, **options: Any) -> str:
    """Run ``start`` to its end; returns what was printed."""
    process = start(*arguments, **options)
    try:
        printed, _ = process.communicate(timeout=600)
    finally:
        kill(process)
    assert process.returncode == 0, printed[-3000:]
    return printed


def kill(process: Any) -> None:
    """SIGKILL to the launcher and all its processes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def log(output: Path) -> dict[int, dict[str, Any]]:
    """Logged steps, without the time; of a step that was taken twice the later."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {
        line["step"]: {key: value for key, value in line.items() if key != "seconds"}
        for line in lines
        if line["event"] == "step"
    }


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "last" / "heads.safetensors")


def evaluation(output: Path) -> dict[str, Any]:
    measured = json.loads((output / "last" / "acceptance.json").read_text())
    return {key: measured[key] for key in ("mean_accepted_length", "histogram", "calibration", "held_out")}


def assert_same_run(one: Path, other: Path) -> None:
    """Curves and weights agree to rounding: sums over processes are added up in another order."""
    ours, theirs = log(one), log(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 6
    for step, line in ours.items():
        assert theirs[step]["positions"] == line["positions"]
        for key in ("step_loss", "gradient_norm", "lr"):
            assert theirs[step][key] == pytest.approx(line[key], rel=1e-3), (step, key)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(other)[name], weight, rtol=1e-3, atol=1e-4)


def assert_identical(one: Path, other: Path) -> None:
    assert log(one) == log(other)
    for name, weight in weights(one).items():
        assert torch.equal(weights(other)[name], weight), name


# ---- one process ------------------------------------------------------------------------------------------------------


def test_a_run_killed_at_any_moment_goes_on_from_its_newest_whole_checkpoint(workshop: Path, tmp_path: Path) -> None:
    run_here(workshop, tmp_path / "whole")
    printed = subprocess.run(
        [sys.executable, "tests/killing.py", *recipe(workshop, tmp_path / "killed")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    ends = [line for line in printed.stdout.splitlines() if line.startswith((*MOMENTS, "never:"))]
    assert ends == [*(f"{moment}: {signal.SIGKILL.value}" for moment in MOMENTS), "never: 0"], printed.stderr[-3000:]
    assert printed.stdout.count("resuming from") >= len(MOMENTS) - 2
    assert_identical(tmp_path / "whole", tmp_path / "killed")
    left = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert left == sorted(path.name for path in whole_checkpoints(tmp_path / "killed"))
    assert len(left) == 2


def test_a_step_of_two_batches_is_a_step_of_one_batch_of_the_same_rows(workshop: Path, tmp_path: Path) -> None:
    """The loss is a mean over the positions of a step, not of a batch, and so are gradients."""
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "run", *ALONE)))
    trainer.begin()
    first, second = next(trainer.order.steps(2))
    positions = [sum(len(trainer.train.rows[i].response_ids) for i in batch) for batch in (first, second)]
    assert positions[0] != positions[1]
    counts = trained_positions([trainer.train.rows[i] for i in first + second], 3)
    gradients = []
    for batches in ([first, second], [first + second]):
        trainer.head.zero_grad()
        for batch in batches:
            loss, _ = trainer._loss(training_batch(trainer.train, batch), counts)
            loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in trainer.head.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


# ---- two processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_as_one(alone: Path, together: Path) -> None:
    assert_same_run(alone, together)


@pytest.mark.slow
def test_two_processes_evaluate_as_one(alone: Path, together: Path) -> None:
    assert evaluation(together) == evaluation(alone)


@pytest.mark.slow
def test_two_processes_killed_and_started_again_take_the_very_same_steps(
    workshop: Path, together: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    process = start("cpu2", workshop, output, *TOGETHER)
    try:
        while not whole_checkpoints(output):
            assert process.poll() is None, process.stdout.read()[-3000:]
            time.sleep(0.02)
    finally:
        kill(process)
    assert "resuming from" in launch("cpu2", workshop, output, *TOGETHER)
    assert_identical(output, together)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_with_another_number_of_processes(
    processes: int, workshop: Path, alone: Path, together: Path, tmp_path: Path
) -> None:
    """The recipe stays as it was; a step takes as many batches as before, from where the other run left off."""
    before = {1: together, 2: alone}[processes]
    output = tmp_path / "run"
    shutil.copytree(before, output, ignore=shutil.ignore_patterns("best", "last"))
    shutil.rmtree(whole_checkpoints(output)[-1])
    resumed = find_checkpoint(output, "auto")
    assert resumed is not None
    step = int(resumed.name.removeprefix("step-"))
    lines = (output / "log.jsonl").read_text().splitlines(keepends=True)
    (output / "log.jsonl").write_text("".join(lines[:step]))
    if processes == 1:
        run_here(workshop, output, *TOGETHER)
    else:
        assert "1 batch in each process" in launch("cpu2", workshop, output, *ALONE)
    assert_same_run(before, output)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_as_one_process(stage: int, workshop: Path, alone: Path, tmp_path: Path) -> None:
    printed = launch(f"zero{stage}", workshop, tmp_path / "run", *TOGETHER)
    assert f"DeepSpeed ZeRO-{stage}, 2 x cpu" in printed
    assert_same_run(alone, tmp_path / "run")


@pytest.mark.slow
def test_fsdp2_trains_as_one_process(workshop: Path, alone: Path, tmp_path: Path) -> None:
    printed = launch("fsdp2", workshop, tmp_path / "run", *TOGETHER, script="tests/fsdp_on_cpu.py")
    assert "FSDP2, 2 x cpu" in printed
    assert_same_run(alone, tmp_path / "run")
