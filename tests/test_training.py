"""The training program on a tiny target: it learns, checkpoints whole or not at all, and resumes exactly."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mtp
from mtp.heads import HEADS, Prediction, TrainingBatch
from mtp.heads.autoregressive import AutoregressiveHead
from tests.tiny import padded, random_prompts
from tests.workshop import make_workshop
from tests.workshop import recipe as workshop_recipe
from train import heads as program
from train.checkpoints import find_checkpoint, whole_checkpoints
from train.config import ConfigError
from train.data import DataError, Row, draft_vocabulary
from train.evaluate import evaluate
from train.feature_cache import CachedFeatures
from train.features import OnlineFeatures
from train.loop import Trainer
from train.recipe import load_config

FAMILIES = sorted(HEADS)
# Everything that draws at random while it trains, or changes as it goes on.
OPTIONS = [
    "head.family=eagle",
    "optim.loss={smooth_l1: 1.0, soft_cross_entropy: 0.1, top_k: 1.0}",
    "optim.step_weight=[1.0, 0.5, 0.5]",
    "optim.own_tokens=1.0",
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target on disk and its own greedy answers to 60 prompts."""
    return make_workshop(tmp_path_factory.mktemp("workshop"), ragged=False)


def recipe(workshop: Path, output: Path, *overrides: str) -> list[str]:
    own = (
        *("data.held_out_fraction=0.15", "optim.batch_positions=200", "checkpoint_every=4", "log_every=10"),
        *("eval.rows=6", "eval.batch_size=8"),
    )
    return workshop_recipe(workshop, output, *own, *overrides)


def train(workshop: Path, output: Path, *overrides: str) -> tuple[Trainer, dict[str, Any]]:
    trainer = program.build_trainer(load_config(recipe(workshop, output, *overrides)))
    return trainer, trainer.run()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_writes_a_head_that_loads_and_generates_the_targets_text(
    family: str, workshop: Path, tmp_path: Path
) -> None:
    trainer, result = train(workshop, tmp_path / "run", f"head.family={family}")
    model = mtp.load(tmp_path / "run" / "best")
    inputs = padded(random_prompts([5, 9], seed=1))
    expected = model.target.causal_lm.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), expected)
    measured = json.loads((tmp_path / "run" / "best" / "acceptance.json").read_text())
    assert measured["mean_accepted_length"] >= 1.0
    assert set(measured["categories"]) <= {"even", "odd"}
    assert result["held_out"]["positions"] > 0
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log[-3:]] == ["evaluation", "diagnosis", "samples"]
    assert trainer.progress.step == trainer.total_steps


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluation_on_the_way_decodes_with_the_weights_of_that_step(
    family: str, workshop: Path, tmp_path: Path
) -> None:
    """Copies of weights that decoding keeps are those of the evaluation before, unless they are made anew."""
    trainer, result = train(workshop, tmp_path / "run", f"head.family={family}", "eval.every=1", "optim.lr=3e-2")
    afresh = mtp.load(tmp_path / "run" / "last").drafter
    again = evaluate(afresh, trainer.held_out, trainer.config)
    assert again["histogram"] == result["histogram"]
    assert again["calibration"] == result["calibration"]


def test_only_the_head_has_gradients(workshop: Path, tmp_path: Path) -> None:
    trainer, _ = train(workshop, tmp_path / "run", "optim.epochs=1")
    assert all(parameter.grad is None for parameter in trainer.target.causal_lm.parameters())
    optimised = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimised == {id(p) for p in trainer.head.parameters()}


def test_training_lowers_the_held_out_loss(workshop: Path, tmp_path: Path) -> None:
    _, before = train(workshop, tmp_path / "a", "optim.epochs=1", "optim.lr=1e-8", "head.warm_start_positions=0")
    _, after = train(workshop, tmp_path / "b", "optim.epochs=12", "head.warm_start_positions=0")
    assert sum(after["held_out"]["loss"]) < sum(before["held_out"]["loss"])
    assert sum(after["held_out"]["accuracy"]) > 2 * sum(before["held_out"]["accuracy"])


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_cached_and_online_features_train_the_same_head(storage: str, workshop: Path, tmp_path: Path) -> None:
    online, one_found = train(workshop, tmp_path / "online")
    cache = ("features.mode=cached", f"features.storage={storage}")
    cached, other_found = train(workshop, tmp_path / "cached", *cache)
    assert isinstance(online.train, OnlineFeatures)
    assert isinstance(cached.train, CachedFeatures)
    one, other = online.train.batch([0, 5]), cached.train.batch([0, 5])
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.hidden, other.hidden, atol=5e-2, rtol=2e-2)  # the cache rounds them
    assert other_found["held_out"]["loss"] == pytest.approx(one_found["held_out"]["loss"], rel=0.01)
    assert other_found["mean_accepted_length"] == pytest.approx(one_found["mean_accepted_length"], rel=0.05)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads.safetensors")


@pytest.mark.parametrize("options", [[], OPTIONS], ids=["defaults", "noise, a mixture of losses and own tokens"])
def test_an_interrupted_run_resumes_to_exactly_the_weights_of_an_uninterrupted_one(
    options: list[str], workshop: Path, tmp_path: Path
) -> None:
    train(workshop, tmp_path / "whole", *options)
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "parts", *options)))
    step = trainer._step

    def interrupt_at_fifth(batches: Any) -> Any:
        if trainer.progress.step == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step(batches)

    trainer._step = interrupt_at_fifth  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        trainer.run()
    assert trainer.progress.step == 5
    resumed, _ = train(workshop, tmp_path / "parts", *options)
    assert resumed.progress.step == resumed.total_steps
    one, other = weights(tmp_path / "whole" / "last"), weights(tmp_path / "parts" / "last")
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_own_tokens_take_over_steadily_as_training_goes_on(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    unroll = AutoregressiveHead.unroll

    def watch(head: AutoregressiveHead, batch: TrainingBatch, steps: int) -> list[Prediction]:
        if head.training:
            shares.append(batch.own_tokens)
        return unroll(head, batch, steps)

    monkeypatch.setattr(AutoregressiveHead, "unroll", watch)
    trainer, _ = train(workshop, tmp_path / "run", *OPTIONS, "optim.own_tokens=0.5")
    assert shares == pytest.approx([0.5 * step / trainer.total_steps for step in range(trainer.total_steps)])


def test_a_killed_run_resumes_from_its_newest_whole_checkpoint(workshop: Path, tmp_path: Path) -> None:
    arguments = recipe(workshop, tmp_path / "run", "optim.epochs=400", "checkpoint_every=3", "eval.every=0")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train/heads.py", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while len(whole_checkpoints(tmp_path / "run")) < 2:
            assert process.poll() is None, process.stdout.read().decode()[-2000:]
    finally:
        process.kill()
        process.wait()
    newest = whole_checkpoints(tmp_path / "run")[-1]
    assert find_checkpoint(tmp_path / "run", "auto") == newest
    trainer = program.build_trainer(load_config(arguments))
    trainer.begin()
    assert trainer.progress.step == int(newest.name.removeprefix("step-"))


def test_the_best_head_by_acceptance_is_kept_through_worse_ones_and_an_interruption(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = itertools.chain([1.5, 1.9], itertools.repeat(1.2))  # of the evaluations, the second is the best

    def judged(*arguments: Any) -> dict[str, Any]:
        return {**evaluate(*arguments), "mean_accepted_length": next(found)}

    monkeypatch.setattr("train.loop.evaluate", judged)
    overrides = ("eval.every=2", "checkpoint_every=1000")
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "run", *overrides)))
    step = trainer._step

    def interrupted(batches: Any) -> Any:
        trainer.interrupts.requested = trainer.progress.step == 4
        return step(batches)

    trainer._step = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        trainer.run()
    resumed, _ = train(workshop, tmp_path / "run", *overrides)
    assert resumed.total_steps > 6  # so that the resumed run evaluates on the way, too
    measured = {
        name: json.loads((tmp_path / "run" / name / "acceptance.json").read_text()) for name in ("best", "last")
    }
    assert (measured["best"]["step"], measured["best"]["mean_accepted_length"]) == (4, 1.9)
    assert (measured["last"]["step"], measured["last"]["mean_accepted_length"]) == (resumed.total_steps, 1.2)
    best, last = weights(tmp_path / "run" / "best"), weights(tmp_path / "run" / "last")
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_a_full_disk_in_the_middle_of_a_checkpoint_leaves_the_last_good_one(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = train(workshop, tmp_path / "run", "optim.epochs=1")
    before = whole_checkpoints(tmp_path / "run")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer.progress.step += 1
    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator, "save_state", full)
        with pytest.raises(OSError, match="No space left"):
            trainer._save_state()
    assert whole_checkpoints(tmp_path / "run") == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_changed_recipe_is_not_resumed_in_silence(workshop: Path, tmp_path: Path) -> None:
    train(workshop, tmp_path / "run", "optim.epochs=1")
    with pytest.raises(ConfigError, match=r"other settings \(optim\.epochs\)"):
        train(workshop, tmp_path / "run", "optim.epochs=2")


def test_a_run_begun_afresh_in_a_used_folder_keeps_its_own_checkpoints(workshop: Path, tmp_path: Path) -> None:
    train(workshop, tmp_path / "run", "optim.epochs=2")
    trainer, _ = train(workshop, tmp_path / "run", "optim.epochs=1", "resume=none", "checkpoint_every=3")
    newest = find_checkpoint(tmp_path / "run", "auto")
    assert newest is not None
    assert newest.name == f"step-{trainer.total_steps:07d}"


def test_a_generation_config_that_only_warns_does_not_stop_a_checkpoint(workshop: Path, tmp_path: Path) -> None:
    trainer = program.build_trainer(load_config(recipe(workshop, tmp_path / "run", "optim.epochs=1")))
    trainer.target.model.generation_config.temperature = 0.6  # without do_sample=True
    trainer.run()
    assert json.loads((tmp_path / "run" / "best" / "generation_config.json").read_text())["temperature"] == 0.6


def test_without_a_pass_over_the_rows_a_head_is_measured_and_kept_as_it_begins(workshop: Path, tmp_path: Path) -> None:
    trainer, result = train(workshop, tmp_path / "run", "optim.epochs=0")
    assert trainer.progress.step == trainer.progress.positions == 0
    assert result["mean_accepted_length"] > 1  # the least-squares start
    model = mtp.load(tmp_path / "run" / "best")
    for name, weight in trainer.head.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[name], weight), name
    with pytest.raises(DataError, match=r"make \d+ batches, but a step takes 1000"):
        train(workshop, tmp_path / "other", "optim.accumulate=1000")


def test_no_held_out_rows_is_refused(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No held-out rows"):
        train(workshop, tmp_path / "run", "data.held_out_fraction=0.0")


def test_a_draft_vocabulary_that_the_target_does_not_have_is_refused(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"draft_vocab_size is 25; the target's vocabulary has 24 tokens.*1 to 24"):
        train(workshop, tmp_path / "run", "head.draft_vocab_size=25")


def test_an_evaluation_that_no_prompt_leaves_room_for_is_refused(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"eval\.max_new_tokens=1000000: behind none of the \d+ held-out prompts"):
        train(workshop, tmp_path / "run", "eval.max_new_tokens=1000000")


def test_answers_with_foreign_token_ids_are_refused(workshop: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "response_ids": [99]}) + "\n")
    with pytest.raises(DataError, match="token id 99, but the target has 24"):
        train(workshop, tmp_path / "run", f"data.path={path}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head.family=hydra", "head.sizes={depth: 5}"], r"makes no hydra head: Trees of depth 5 need .*steps=3"),
        (
            ["head.family=redrafter", "head.sizes={layer: 2}"],
            r"Unknown key head\.sizes\.layer; did you mean head\.sizes\.layers\?",
        ),
        (["head.family=crystal"], r"head\.family: No head family 'crystal'"),
    ],
)
def test_a_head_that_cannot_be_made_is_refused_before_training(
    overrides: list[str], message: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(workshop, tmp_path / "run", *overrides)


def test_errors_reach_the_user_as_one_line_and_not_as_a_traceback(workshop: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"error: No distilled data at"):
        program.main(recipe(workshop, tmp_path / "run", "data.path=/nowhere"))


def test_the_draft_vocabulary_is_the_most_frequent_tokens_and_always_holds_the_end_tokens() -> None:
    rows = [Row((0,), (5, 5, 5, 6, 6, 7))]
    assert draft_vocabulary(rows, 3, 10, always=[9]).tolist() == [5, 6, 9]
    assert draft_vocabulary(rows, None, 4, always=[]).tolist() == [0, 1, 2, 3]
