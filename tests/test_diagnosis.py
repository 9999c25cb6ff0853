"""Why acceptance is low: runs that were spoiled in one way are told apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mtp.heads import HEADS
from mtp.target import Target
from tests.test_training import recipe, workshop  # noqa: F401  (a fixture)
from tests.tiny import random_prompts, tiny_head, tiny_model
from train import heads as program
from train.batches import training_batch
from train.causes import Breakdown, Decoded, causes, decoded, verdict
from train.data import Row
from train.diagnosis import SAMPLE, Guesses, as_text, break_down, observe, sample
from train.evaluate import held_out_metrics
from train.features import OnlineFeatures
from train.recipe import load_config


def part(accuracy: float, guesses: int) -> dict[str, float]:
    return {"accuracy": accuracy, "loss": 2.0, "guesses": guesses}


SOUND = Breakdown(
    guesses=4000,
    loss=(2.1, 2.3),
    floor=(1.2, 1.2),
    accuracy=(0.65, 0.6),
    confidence=(0.6, 0.55),
    agreed=0.93,
    outside=0.05,
    categories={"code": part(0.66, 2000), "chat": part(0.64, 2000)},
    contexts={"to 64": part(0.6, 900), "to 256": part(0.66, 3100)},
)
DECODED = Decoded(mean_accepted_length=2.8, promised=2.7, first=0.8)
FAR = part(0.2, 400)


@pytest.mark.parametrize(
    ("name", "held_out", "train", "run"),
    [
        ("decoding", {}, {}, {"first": 0.3}),
        ("answers", {"agreed": 0.5}, {"agreed": 0.5, "accuracy": (0.45, 0.4)}, {}),
        ("draft vocabulary", {"outside": 0.3, "agreed": 0.7}, {}, {}),
        ("overfitting", {"accuracy": (0.65, 0.6)}, {"accuracy": (0.9, 0.8)}, {}),
        ("later steps", {"accuracy": (0.65, 0.1)}, {}, {}),
        ("category", {"categories": {**SOUND.categories, "verse": FAR}}, {}, {}),
        ("context length", {"contexts": {**SOUND.contexts, "to 1024": FAR}}, {}, {}),
        ("calibration", {"confidence": (0.95, 0.9)}, {}, {}),
        ("underfitting", {"accuracy": (0.3, 0.25), "confidence": (0.3, 0.25)}, {"accuracy": (0.31, 0.25)}, {}),
    ],
)
def test_each_cause_is_named_when_it_is_the_one(
    name: str, held_out: dict[str, Any], train: dict[str, Any], run: dict[str, Any]
) -> None:
    found = causes(replace(SOUND, **held_out), replace(SOUND, **train), replace(DECODED, **run))
    assert found[0].name == name
    assert verdict(found).startswith(f"{name}: ")


def test_a_sound_run_is_not_blamed_for_anything() -> None:
    assert verdict(causes(SOUND, SOUND, DECODED)).startswith("nothing stands out")


def test_small_categories_are_not_concluded_from() -> None:
    few = {**SOUND.categories, "verse": {**FAR, "guesses": 10}}
    assert verdict(causes(replace(SOUND, categories=few), SOUND, DECODED)).startswith("nothing stands out")


@pytest.fixture(scope="module")
def source() -> OnlineFeatures:
    pairs = [random_prompts([5 + at, 6], seed=at) for at in range(6)]
    rows = [Row(tuple(a), tuple(b), "even" if at % 2 == 0 else "odd") for at, (a, b) in enumerate(pairs)]
    return OnlineFeatures(Target(tiny_model()), rows, (1, 2, 3))


@pytest.mark.parametrize("family", sorted(HEADS))
def test_guesses_sum_up_to_the_metrics_of_the_evaluation(family: str, source: OnlineFeatures) -> None:
    head = tiny_head(family, source.target, draft_vocab=15)
    features = OnlineFeatures(source.target, source.rows, head.taps)
    guesses = observe(head, features, list(range(6)), 3, positions=40)
    counted = break_down(guesses)
    expected = held_out_metrics(head, [training_batch(features, list(range(6)))], 3)
    np.testing.assert_allclose(counted.loss, expected["loss"], atol=1e-3)
    np.testing.assert_allclose(counted.accuracy, expected["accuracy"], atol=1e-3)
    assert counted.outside == expected["outside_draft_vocabulary"]
    assert counted.guesses == expected["positions"]
    assert set(counted.categories) == {"even", "odd"}
    assert sum(part["guesses"] for part in counted.categories.values()) == counted.guesses
    assert list(counted.contexts) == ["to 64"]
    assert all(0 <= floor <= loss for floor, loss in zip(counted.floor, counted.loss, strict=True))


def test_context_counts_the_whole_prompt_even_where_it_is_not_shown(source: OnlineFeatures) -> None:
    head = tiny_head("medusa", source.target)
    views = [OnlineFeatures(source.target, source.rows, (), prompt_positions=window) for window in (None, 4)]
    whole, cut = (observe(head, view, [2, 5], 3, positions=40) for view in views)
    assert sorted(whole.context.tolist()) == sorted(cut.context.tolist())
    first = whole.context[whole.step == 0]
    assert first.min() == len(source.rows[2].prompt_ids)


def test_context_classes_have_their_edges() -> None:
    size = 6
    zeros = np.zeros(size)
    guesses = Guesses(
        step=np.zeros(size, dtype=int),
        loss=zeros,
        floor=zeros,
        right=np.array([1, 0, 1, 0, 1, 1]),
        agreed=zeros,
        outside=zeros,
        confidence=zeros,
        context=np.array([0, 63, 64, 1023, 5000, 4096]),
        category=np.array(["a"] * size),
    )
    found = {name: (part["guesses"], part["accuracy"]) for name, part in break_down(guesses).contexts.items()}
    assert found == {"to 64": (2, 0.5), "to 256": (1, 1.0), "to 1024": (1, 0.0), "over 4096": (2, 1.0)}


def test_what_confidences_promised_is_in_units_of_accepted_length() -> None:
    acceptance = {
        "mean_accepted_length": 1.75,
        "target_passes": 20,
        "acceptance_by_position": [0.5, 0.25],
        "calibration": {"reliability": [
            [{"guesses": 40, "confidence": 0.4, "accepted": 0.25}],
            [{"guesses": 10, "confidence": 0.5, "accepted": 0.5}],
        ]},
    }  # fmt: skip
    found = decoded(acceptance)
    assert found.first == 0.5
    assert found.promised == pytest.approx(1.75 + (16 + 5 - 10 - 5) / 20)
    assert decoded({**acceptance, "acceptance_by_position": []}).first == 0.0


def test_the_sample_is_the_same_at_every_evaluation(source: OnlineFeatures) -> None:
    assert sample(source) == list(range(6))
    many = OnlineFeatures(source.target, list(source.rows) * 40, ())
    assert len(sample(many)) == SAMPLE == len(set(sample(many)))


def diagnosis(workshop: Path, output: Path, *overrides: str) -> dict[str, Any]:  # noqa: F811
    program.build_trainer(load_config(recipe(workshop, output, "eval.rows=2", *overrides))).run()
    found: dict[str, Any] = json.loads((output / "diagnosis.json").read_text())
    return found


def test_a_run_writes_its_diagnosis_where_people_look(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = diagnosis(workshop, tmp_path / "run")
    out = capsys.readouterr().out
    assert f"likeliest cause: {found['verdict']}" in out
    assert as_text(found) in out
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    logged = next(line for line in log if line["event"] == "diagnosis")
    assert logged["verdict"] == found["verdict"]
    assert {"even", "odd"} >= set(found["held_out"]["categories"])


def test_answers_of_somebody_else_are_recognised(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    rows = [json.loads(line) for line in (workshop / "rows.jsonl").read_text().splitlines()]
    torch.manual_seed(0)
    for row in rows:
        row["response_ids"] = torch.randint(1, 24, (16,)).tolist()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = f"data.path={tmp_path / 'rows.jsonl'}"
    found = diagnosis(workshop, tmp_path / "run", path, "head.draft_vocab_size=null", "optim.epochs=1")
    assert found["verdict"].startswith("answers: ")


def test_a_draft_vocabulary_that_lacks_much_is_recognised(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    found = diagnosis(workshop, tmp_path / "run", "head.draft_vocab_size=3", "optim.epochs=1")
    assert found["causes"][0]["name"] == "draft vocabulary"


def test_a_run_that_learnt_its_rows_by_heart_is_recognised(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    few = ("data.limit=30", "head.draft_vocab_size=null", "head.warm_start_positions=0", "optim.epochs=60")
    found = diagnosis(workshop, tmp_path / "run", *few)
    assert found["verdict"].startswith("overfitting: ")
    assert found["train"]["accuracy"][0] > found["held_out"]["accuracy"][0] + 0.2


def test_a_run_that_learnt_nothing_is_recognised(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    nothing = ("head.draft_vocab_size=null", "head.warm_start_positions=0", "optim.epochs=0")
    found = diagnosis(workshop, tmp_path / "run", *nothing)
    assert found["verdict"].startswith("underfitting: ")
