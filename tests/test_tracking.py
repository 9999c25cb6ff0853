"""What trackers are shown, read back from what they wrote: W&B offline and without an account, and TensorBoard."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp.heads import HEADS
from mtp.target import Target
from tests.test_distill import tiny_tokenizer
from tests.test_training import recipe, workshop  # noqa: F401  (a fixture)
from tests.tiny import random_prompts, tiny_head, tiny_model
from train.config import ConfigError
from train.data import Row
from train.tracking import _wandb_mode, check_trackers, flatten, log_samples, marked, sample_answers

ROOT = Path(__file__).parents[1]


def trained(workshop: Path, output: Path, tracker: str) -> list[dict[str, Any]]:  # noqa: F811
    """Train with a tracker; the lines of the log."""
    overrides = ("optim.epochs=1", "log_every=1", "eval.rows=6", f"report_to=[{tracker}]")
    # A process of its own, as for everybody who trains: what a tracker writes is whole when the process has ended.
    command = [sys.executable, "-m", "train.heads", *recipe(workshop, output, *overrides)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def expected(log: list[dict[str, Any]]) -> dict[str, float]:
    """Names that a tracker must show, with the last value that the log has."""
    step = [line for line in log if line["event"] == "step"][-1]
    evaluation = next(line for line in log if line["event"] == "evaluation")
    numbers = {f"{name}/{at}": value for name in ("step_loss", "accuracy") for at, value in enumerate(step[name])}
    for name in ("loss", "tokens_per_second", "gradient_norm", "lr", "outside_draft_vocabulary"):
        numbers[name] = step[name]
    for category, stats in evaluation["categories"].items():
        numbers[f"categories/{category}/mean_accepted_length"] = stats["mean_accepted_length"]
    numbers["mean_accepted_length"] = evaluation["mean_accepted_length"]
    numbers["held_out/outside"] = next(line for line in log if line["event"] == "diagnosis")["held_out"]["outside"]
    return numbers


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format around protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""  # behind the file's header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            at += left
            continue
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_an_offline_run_of_wandb_holds_everything(
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = trained(workshop, tmp_path / "run", "wandb")
    (path,) = (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")
    shown: dict[str, Any] = {}
    for record in wandb_records(path):
        for item in record.history.item:
            shown[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    for name, value in expected(log).items():
        assert shown[name] == pytest.approx(value), name
    table = next(iter((tmp_path / "run").glob("wandb/offline-run-*/files/media/table/samples*.json")))
    rows = json.loads(table.read_text())
    assert rows["columns"] == ["category", "prompt", "answer"]
    assert [row[2] for row in rows["data"]] == [sample["answer"] for sample in log[-1]["samples"]]


def test_tensorboard_gets_what_the_log_gets(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = trained(workshop, tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "mtp"))
    events.Reload()
    for name, value in expected(log).items():
        assert events.Scalars(name)[-1].value == pytest.approx(value, rel=1e-4), name
    text = events.Tensors("samples/0/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert log[-1]["samples"][0]["answer"] in text


def test_unknown_and_missing_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="report_to: found 'mlflow'; expected any of wandb, tensorboard"):
        check_trackers(["mlflow"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"wandb is not installed; pip install 'mtp\[wandb\]'"):
        check_trackers(["wandb"])
    check_trackers([])


@pytest.mark.parametrize("family", sorted(HEADS))
def test_sample_answers_are_the_targets_with_kept_tokens_marked(family: str) -> None:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model(vocab=len(tokenizer)))
    head = tiny_head(family, target)
    rows = [Row(tuple(prompt), (5,), "kind") for prompt in random_prompts([4, 9], seed=2)]
    samples = sample_answers(head, rows, tokenizer, 12)
    for row, sample in zip(rows, samples, strict=True):
        plain = target.causal_lm.generate(
            torch.tensor([row.prompt_ids]), attention_mask=torch.ones(1, len(row.prompt_ids)), max_new_tokens=12,
            do_sample=False,
        )  # fmt: skip
        text = tokenizer.decode(plain[0, len(row.prompt_ids) :])
        assert sample["answer"].replace("«", "").replace("»", "") == text
        assert sample["category"] == "kind"
    assert sample_answers(head, [], tokenizer, 12) == []


def test_runs_of_kept_tokens_are_marked_once() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("hello", add_special_tokens=False).input_ids
    pairs = list(zip(ids, [False, True, True, False, True], strict=True))
    assert marked(pairs, tokenizer) == "h«el»l«o»"
    assert marked([], tokenizer) == ""


def test_no_samples_leave_trackers_alone() -> None:
    log_samples(None, [], 3)  # type: ignore[arg-type]


def test_numbers_are_flattened_and_what_is_none_is_left_out() -> None:
    values = {"a": {"b": [1, 2.5]}, "text": "x", "on": True, "none": None}
    assert flatten(values) == {"a/b/0": 1, "a/b/1": 2.5}
    assert flatten(values, keep_text=True) == {"a/b/0": 1, "a/b/1": 2.5, "text": "x", "on": True, "none": "None"}


def test_wandb_is_online_only_where_there_is_an_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert _wandb_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password none\n")
    assert _wandb_mode() == "online"
    (tmp_path / "netrc").write_text("machine elsewhere.org login user password none\n")
    assert _wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "none")
    assert _wandb_mode() == "online"
