"""scripts/bench*.py: every system gives the same text, what is counted adds up, and the tables can be drawn."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from talking import save_talking_checkpoint
from tiny import random_prompts, tiny_head, tiny_model, tiny_target

import mtp
from mtp.target import Target

SCRIPTS = Path(__file__).parents[1] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_systems_take_turns_on_the_same_prompts_and_give_the_same_text() -> None:
    bench = script("bench")
    target = Target(tiny_model())
    model = mtp.SpeculativeModel(target, tiny_head("eagle3", target))
    systems = bench.systems_of(model, ["head"], tiny_model(seed=1), max_new_tokens=12)
    prompts = [("one", random_prompts([6])[0]), ("two", random_prompts([9])[0]), ("one", random_prompts([4])[0])]
    sums = bench.compare(model, systems, prompts)
    assert list(sums) == [system.name for system in systems]
    for by_category in sums.values():
        assert {name: part.prompts for name, part in by_category.items()} == {"one": 2, "two": 1}
        whole = bench.total(by_category)
        assert (whole.prompts, whole.equal, whole.tokens) == (3, 3, 36)
    assert bench.total(sums["mtp, head"]).stats.target_passes <= 33
    assert bench.speed_table(sums, "speed").row_count == 4  # two categories, all, and the equal answers
    assert bench.stage_table(sums).row_count == 2  # the two systems whose rounds are ours
    json.dumps(bench.as_json(sums))


def test_text_that_heads_were_not_trained_for_is_compared_kind_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench_foreign")
    folder = save_talking_checkpoint(tmp_path / "checkpoint")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"category": "odd", "turns": ["the cat"]}\n' * 3, encoding="utf-8")
    results = tmp_path / "results.json"
    arguments = [str(folder), "--data", str(questions), "--categories", "odd", "--prompts", "2", "--max-new-tokens"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["bench_foreign.py", *arguments, "8", "--tolerance", "1", "--output", str(results)])
    assert bench.main() == 0
    kinds = [result["kind"] for result in json.loads(results.read_text(encoding="utf-8"))]
    assert kinds == ["random tokens", "another language", "odd", "temperature 2"]
    assert "speed over plain" in " ".join(capsys.readouterr().out.split())


def test_passes_are_timed_by_name() -> None:
    bench = script("bench_passes")
    target = tiny_target()
    timed = bench.variants(target, tiny_head("eagle3", target), context=8, nodes=[1, 4])
    seconds = bench.measure(timed, rounds=1, device=target.device)
    assert list(seconds) == ["transformers step", "plain step", "verify 4 nodes", "draft 4 nodes"]
    assert bench.table_of(seconds, "passes").row_count == 4
