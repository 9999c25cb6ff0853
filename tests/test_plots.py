"""scripts/plots.py and scripts/sweep.py: what was measured is drawn, what is there is not measured again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from programs import script
from talking import save_talking_checkpoint

pytest.importorskip("matplotlib")

CATEGORIES = ("code", "prose")


def measured(nodes: int) -> dict[str, Any]:
    """As serve/measure.py writes it, the parts that are drawn."""
    systems = {"drafted": 20.0 + nodes, "plain": 20.0, "transformers": 15.0}
    record = {"committed_tokens": 30, "target_passes": 10, "seconds": {"drafted": 1.0, "plain": 1.5}}
    result = {
        "overall": {
            "mean_accepted_length": 1.0 + nodes / 10,
            "systems": {name: {"tokens_per_second": speed} for name, speed in systems.items()},
        },
        "categories": {name: {"mean_accepted_length": 1.0 + nodes / 8} for name in CATEGORIES},
        "records": [record, {**record, "target_passes": 0}],
    }
    return {"complete": True, "results": [result]}


def fill(folder: Path) -> Path:
    folder.mkdir()
    for dtype in ("float32", "bfloat16"):
        for nodes in (4, 16, 2):
            (folder / f"measure-{dtype}-{nodes}.json").write_text(json.dumps(measured(nodes)), encoding="utf-8")
        (folder / f"measure-{dtype}-auto.json").write_text(json.dumps(measured(8)), encoding="utf-8")
        seconds = {"transformers step": [0.07], "plain step": [0.05], "verify 4 nodes": [0.06], "draft 4 nodes": [0.01]}
        (folder / f"passes-{dtype}.json").write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
    answer = {"tokens": 10, "seconds": 1.0, "diverges": None, "acceptance": None}
    records = [
        {"name": name, "category": name, "systems": {"transformers": answer, "vllm": {**answer, "seconds": 0.5}}}
        for name in CATEGORIES
    ]
    dtypes = {"float32": {"records": records, "failed": {"eagle": "did not start"}, "memory": {}}}
    beside = {"format": 1, "settings": {"max_new_tokens": "8"}, "dtypes": dtypes}
    (folder / "side_by_side.json").write_text(json.dumps(beside), encoding="utf-8")
    return folder


def test_every_plot_says_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill(tmp_path / "sweep")
    script("plots").main([str(folder)])
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (folder / "plots").iterdir()}
    expected = {
        "acceptance": "mean accepted length (tokens a pass)",
        "speed": "tokens per second (prompt read inside)",
        "speedup": "speed-up over plain decoding, float32",
        "cost": "milliseconds a pass (median)",
        "systems": "vllm",
    }
    assert set(texts) == set(expected)
    for name, label in expected.items():
        assert label in texts[name], name
    assert ">16<" in texts["acceptance"], "the sizes of trees are the ticks"
    out = capsys.readouterr().out
    assert "eagle did not answer all: did not start" in out
    assert "20.0" in out, "the tables are printed again"


def test_curves_of_training_are_drawn_for_heads_that_were_evaluated_on_the_way(tmp_path: Path) -> None:
    curve = [{"positions": at * 1000, "minutes": at, "mean_accepted_length": 1 + at / 10} for at in range(3)]
    heads = [{"name": "eagle3", "curve": curve}, {"name": "medusa", "curve": curve[-1:]}]
    (tmp_path / "results.json").write_text(json.dumps(heads), encoding="utf-8")
    script("plots").main([str(tmp_path)])
    drawn = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "plots").iterdir()}
    assert set(drawn) == {"training-positions", "training-minutes"}
    assert all(">eagle3<" in text and ">medusa<" not in text for text in drawn.values())
    assert "minutes of training" in drawn["training-minutes"]


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sweep")
    for name in ("a", "b"):
        script("plots").main([str(folder), "--output", str(tmp_path / name)])
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    folder = fill(tmp_path / "sweep")
    for path in [*folder.glob("measure-*"), folder / "side_by_side.json"]:
        path.unlink()
    script("plots").main([str(folder)])
    assert [path.name for path in (folder / "plots").iterdir()] == ["cost.svg"]
    with pytest.raises(SystemExit, match="holds no measurements"):
        script("plots").main([str(tmp_path)])
    (folder / "measure-float32-4.json").write_text("{", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"measure-float32-4\.json is damaged"):
        script("plots").main([str(folder)])


def test_a_sweep_runs_what_is_missing_and_ends_at_the_first_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = script("sweep")
    head = save_talking_checkpoint(tmp_path / "checkpoint")
    folder = fill(tmp_path / "sweep")
    (folder / "measure-float32-4.json").write_text('{"complete": false}', encoding="utf-8")
    (folder / "measure-float32-auto.json").unlink()
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 0 if len(commands) < 3 else 130)

    monkeypatch.setattr(subprocess, "run", run)
    arguments = [str(head), "--data", "questions.jsonl", "--nodes", "4", "16", "--output", str(folder)]
    assert sweep.main([*arguments, "--", "--drafters", "head", "ngram"]) == 130
    first, second, third = commands
    assert first[1:2] == second[1:2] == [str(head)]
    assert first[-4:] == ["--nodes", "4", "--output", str(folder / "measure-float32-4.json")]
    assert "--nodes" not in second
    assert third[0].endswith("bench.py")
    assert third[-3:] == ["--drafters", "head", "ngram"]
    assert "measure-float32-16.json: there already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"No config\.json"):
        sweep.main([str(tmp_path), *arguments[1:]])
