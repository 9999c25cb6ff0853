"""Training by several real processes: the same run as by one, and continued by another number of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import is_bitsandbytes_available

import mtp
from mtp.heads import HEADS
from tests.killing import MOMENTS
from tests.tiny import padded, random_prompts
from tests.workshop import make_workshop, recipe
from train import heads as program
from train.batches import BatchOrder, trained_positions, training_batch
from train.checkpoints import STATE, batches_per_step, find_checkpoint, whole_checkpoints
from train.config import ConfigError
from train.data import Row, load_rows
from train.processes import Share, check_launch
from train.recipe import load_config
from train.target import check_placement

ROOT = Path(__file__).parents[1]
COMPILES = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").is_file()
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not COMPILES,
    reason="DeepSpeed is not installed (pip install deepspeed), or there is no g++ or no Python.h for what it compiles",
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


def start(
    config: str, workshop: Path, output: Path, *overrides: str, script: str = "train/heads.py", processes: int = 2
) -> Any:
    """``accelerate launch``, in a process group of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", f"configs/accelerate/{config}.yaml", "--num_processes", str(processes)]
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
    """Logged steps, without times; of a step that was taken twice the later."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return {
        line["step"]: {key: value for key, value in line.items() if key not in ("seconds", "tokens_per_second")}
        for line in lines
        if line["event"] == "step"
    }


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "last" / "heads.safetensors")


def evaluation(output: Path) -> dict[str, Any]:
    measured = json.loads((output / "last" / "acceptance.json").read_text())
    return {key: measured[key] for key in ("mean_accepted_length", "histogram", "calibration", "held_out")}


def cut_short(run: Path, output: Path) -> Path:
    """A copy of ``run`` as if it had ended at its last checkpoint but one."""
    shutil.copytree(run, output, ignore=shutil.ignore_patterns("best", "last"))
    shutil.rmtree(whole_checkpoints(output)[-1])
    newest = find_checkpoint(output, "auto")
    assert newest is not None
    lines = (output / "log.jsonl").read_text().splitlines(keepends=True)
    taken = int(newest.name.removeprefix("step-"))
    (output / "log.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= taken))
    return output


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


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_run_killed_at_any_moment_goes_on_from_its_newest_whole_checkpoint(workshop: Path, tmp_path: Path) -> None:
    run_here(workshop, tmp_path / "whole")
    printed = subprocess.run(
        [sys.executable, "tests/killing.py", *recipe(workshop, tmp_path / "killed")],
        # As many threads as here: sums in another order end in other bits.
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        },
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
    assert not list((tmp_path / "killed").glob(".*"))
    for name in ("best", "last"):
        assert (tmp_path / "killed" / name / "heads.safetensors").is_file()


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


@pytest.mark.parametrize("family", sorted(HEADS))
def test_every_weight_takes_part_in_every_step(family: str, workshop: Path, tmp_path: Path) -> None:
    """So that no process waits for a gradient which another does not have, even on rows too short for later steps."""
    arguments = recipe(workshop, tmp_path / "run", f"head.family={family}", "head.warm_start_positions=0")
    trainer = program.build_trainer(load_config(arguments))
    trainer.begin()
    trainer.train.rows = [Row((1,), (2, 3)), Row((1, 2, 3, 4), (5, 6, 7, 8))]
    for rows, counts in ([0], [1, 0, 0]), ([0, 1], [5, 4, 4]):
        assert trained_positions([trainer.train.rows[i] for i in rows], 3).tolist() == counts
        trainer.head.zero_grad()
        loss, sums = trainer._loss(training_batch(trainer.train, rows), torch.tensor(counts))
        loss.backward()
        assert torch.isfinite(sums).all()
        named = trainer.head.named_parameters()
        missing = [name for name, weight in named if weight.requires_grad and weight.grad is None]
        assert not missing


@pytest.mark.parametrize("family", sorted(HEADS))
def test_the_count_of_trained_positions_is_that_of_the_heads_predictions(
    family: str, workshop: Path, tmp_path: Path
) -> None:
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "run", f"head.family={family}")))
    for batch in trainer.order.epoch(0)[:4]:
        predictions = trainer.head.unroll(training_batch(trainer.train, batch), 3)
        counts = trained_positions([trainer.train.rows[i] for i in batch], 3)
        assert [len(prediction.rows) for prediction in predictions] == counts.tolist()


def test_the_order_of_batches_is_that_of_the_rows_and_covers_each_once_a_pass(workshop: Path) -> None:
    rows = load_rows(workshop / "rows.jsonl")
    order = BatchOrder(rows, positions=80, epochs=3, seed=1)
    every = [batch for epoch in range(3) for batch in order.epoch(epoch)]
    assert all(sorted(i for batch in order.epoch(e) for i in batch) == list(range(len(rows))) for e in range(3))
    assert order.epoch(0) != order.epoch(1)
    assert order.count() == len(every)
    for size in (1, 2, 3, 4):
        steps = list(order.steps(size))
        assert [batch for step in steps for batch in step] == every[: len(every) // size * size]
        assert list(order.steps(size, first=2)) == steps[2:]


def test_shares_are_put_together_in_the_order_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    items = list("abcdefg")
    sent = [Share(index, 3).of(items) for index in range(3)]
    assert sorted(itertools.chain(*sent)) == items
    placed = [(index + 3 * at, item) for index, ours in enumerate(sent) for at, item in enumerate(ours)]
    monkeypatch.setattr("train.processes.gather_object", lambda ours: placed)
    assert Share(1, 3).gather(sent[1]) == items
    assert Share().gather(items) == items


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "2 processes were launched, but accelerate joined 1 of them"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP was asked for, but accelerate trains with NO"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED was asked for, but accelerate trains with NO"),
    ],
)
def test_a_launch_that_is_not_what_it_seems_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = Accelerator(cpu=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check_launch(accelerator)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (["target.placement=spread"], 2, "spread takes every device for one process; found 2"),
        (["target.placement=sharded"], 1, "sharded needs several processes; found 1"),
        (["target.placement=sharded", "features.mode=cached"], 2, "goes only with features.mode=online"),
        (["target.placement=sharded", "bundle_target=true"], 2, "goes only with bundle_target=false"),
        (["target.placement=sharded", "target.quantization=int8"], 2, "goes only with target.quantization=null"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    overrides: list[str], processes: int, message: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_placement(load_config(recipe(workshop, tmp_path, *overrides)), processes)


@pytest.mark.skipif(is_bitsandbytes_available(), reason="bitsandbytes is installed")
def test_a_target_is_not_quantised_without_the_library(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target\.quantization=int4 needs bitsandbytes"):
        run_here(workshop, tmp_path, "target.quantization=int4")


@pytest.mark.parametrize(("name", "bits", "threshold"), [("int8", "load_in_8bit", 0.0), ("int4", "load_in_4bit", None)])
def test_a_quantised_target_is_loaded_onto_the_processs_own_device(
    name: str, bits: str, threshold: float | None, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    whole = AutoModelForCausalLM.from_pretrained

    def record(path: str, quantization_config: Any, device_map: Any, **options: Any) -> Any:
        asked.update(quantization=quantization_config, device_map=device_map)
        return whole(path, **options)  # what bitsandbytes makes of it needs the library

    monkeypatch.setattr("train.target.is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", record)
    run_here(workshop, tmp_path, f"target.quantization={name}", "optim.epochs=0", "head.warm_start_positions=0")
    assert getattr(asked["quantization"], bits)
    assert threshold is None or asked["quantization"].llm_int8_threshold == threshold
    assert asked["device_map"] == {"": torch.device("cpu")}


def test_a_target_spread_over_what_one_process_sees_trains_the_same_head(workshop: Path, tmp_path: Path) -> None:
    run_here(workshop, tmp_path / "whole", "optim.epochs=1")
    run_here(workshop, tmp_path / "spread", "optim.epochs=1", "target.placement=spread")
    for name, weight in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "spread")[name], weight), name


def test_a_run_is_not_continued_where_it_would_become_another(workshop: Path, tmp_path: Path) -> None:
    run_here(workshop, tmp_path, *ALONE, "optim.epochs=1")
    newest = find_checkpoint(tmp_path, "auto")
    assert newest is not None
    assert batches_per_step(newest, fresh=7, processes=2) == 2
    assert batches_per_step(None, fresh=7, processes=1) == 7
    with pytest.raises(
        ConfigError, match=r"2 batches a step, which 3 processes cannot share.* Continue it with 1 or 2"
    ):
        batches_per_step(newest, fresh=3, processes=3)
    record = json.loads((newest / STATE).read_text())
    (newest / STATE).write_text(json.dumps({**record, "engine": "DeepSpeed ZeRO-2", "processes": 4}))
    with pytest.raises(ConfigError, match="written by 4 processes under DeepSpeed ZeRO-2; found 1 under replicated"):
        run_here(workshop, tmp_path, *ALONE, "optim.epochs=1")


# ---- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("cpu", 1), ("ddp", 2)])
def test_what_every_file_of_plain_processes_launches_trains_as_one(
    config: str, processes: int, workshop: Path, alone: Path, tmp_path: Path
) -> None:
    """``ddp.yaml`` takes what accelerators there are, and CPUs where there are none."""
    share = ALONE if processes == 1 else TOGETHER
    printed = launch(config, workshop, tmp_path / "run", *share, processes=processes)
    assert f"replicated, {processes} x " in printed
    assert_same_run(alone, tmp_path / "run")


def test_every_accelerate_file_is_launched_by_a_test() -> None:
    launched = {"cpu", "cpu2", "ddp", *(engine.values[0] for engine in ENGINES)}
    assert launched == {path.stem for path in (ROOT / "configs" / "accelerate").glob("*.yaml")}


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
    output = cut_short(before, tmp_path / "run")
    if processes == 1:
        run_here(workshop, output, *TOGETHER)
    else:
        assert "1 batch in each process" in launch("cpu2", workshop, output, *ALONE)
    assert_same_run(before, output)


REPLICATED = pytest.param("cpu2", "train/heads.py", "replicated")
ENGINES = [
    pytest.param("zero2", "train/heads.py", "DeepSpeed ZeRO-2", marks=needs_deepspeed),
    pytest.param("zero3", "train/heads.py", "DeepSpeed ZeRO-3", marks=needs_deepspeed),
    pytest.param("fsdp2", "tests/fsdp_on_cpu.py", "FSDP2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "script", "engine"), ENGINES)
def test_an_engine_that_takes_the_head_apart_trains_as_one_process_and_resumes(
    config: str, script: str, engine: str, workshop: Path, alone: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    assert f"{engine}, 2 x cpu" in launch(config, workshop, whole, *TOGETHER, script=script)
    assert_same_run(alone, whole)
    resumed = cut_short(whole, tmp_path / "resumed")
    assert "resuming from" in launch(config, workshop, resumed, *TOGETHER, script=script)
    assert_identical(whole, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "script", "engine"), [REPLICATED, *ENGINES])
def test_activation_checkpointing_trains_the_same_head_under_every_engine(
    config: str, script: str, engine: str, workshop: Path, alone: Path, tmp_path: Path
) -> None:
    option = "optim.activation_checkpointing=true"
    assert f"{engine}, 2 x cpu" in launch(config, workshop, tmp_path / "run", *TOGETHER, option, script=script)
    assert_same_run(alone, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("config", "script", "engine"), [REPLICATED, *ENGINES])
def test_a_target_sharded_over_two_processes_trains_the_same_head(
    config: str, script: str, engine: str, workshop: Path, alone: Path, tmp_path: Path
) -> None:
    option = "target.placement=sharded"
    assert f"{engine}, 2 x cpu" in launch(config, workshop, tmp_path / "run", *TOGETHER, option, script=script)
    assert_same_run(alone, tmp_path / "run")
    assert evaluation(tmp_path / "run") == evaluation(alone)


@pytest.mark.slow
def test_a_run_under_fsdp2_goes_on_with_one_process(workshop: Path, tmp_path: Path) -> None:
    script = "tests/fsdp_on_cpu.py"
    launch("fsdp2", workshop, tmp_path / "two", *TOGETHER, "optim.epochs=1", script=script)
    output = cut_short(tmp_path / "two", tmp_path / "one")
    arguments = ("fsdp2", workshop, output, *TOGETHER, "optim.epochs=1")
    assert "2 batches in each process" in launch(*arguments, script=script, processes=1)
    for name, weight in weights(tmp_path / "two").items():
        torch.testing.assert_close(weights(output)[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_continue_and_compare_as_one(workshop: Path, alone: Path, tmp_path: Path) -> None:
    target = mtp.load(alone / "best").target
    prompts = random_prompts([6] * 20, seed=3)
    with mtp.TrafficLog(tmp_path / "traffic", target, context=None) as log:
        mtp.SpeculativeModel(target, mtp.NgramDrafter()).generate(**padded(prompts), max_new_tokens=8, traffic=log)
    further = (f"start.head={alone / 'best'}", f"start.traffic={tmp_path / 'traffic'}", "optim.epochs=4")
    program.main(recipe(workshop, tmp_path / "one", *ALONE, *further))
    launch("cpu2", workshop, tmp_path / "two", *TOGETHER, *further)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    verdicts = [json.loads((tmp_path / run / "gate.json").read_text()) for run in ("one", "two")]
    for verdict in verdicts:
        del verdict["new"]  # a folder of each run's own
    assert verdicts[0] == verdicts[1]
