"""scripts/bench*.py: every system gives the same text, what is counted adds up, and the tables can be drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import script
from talking import save_talking_checkpoint, write_jsonl
from tiny import random_prompts, tiny_head, tiny_model, tiny_target

import mtp
from mtp.target import Target
from serve.bench_tables import category_table, stage_table, summary_table
from serve.side_by_side import Prompt, own_systems, sums_of, take_turns, transformers_systems


def test_systems_take_turns_on_the_same_prompts_and_give_the_same_text() -> None:
    target = Target(tiny_model())
    model = mtp.SpeculativeModel(target, tiny_head("eagle3", target))
    systems = [*transformers_systems(model, tiny_model(seed=1)), *own_systems(model, ["head"])]
    ids = random_prompts([6, 9, 4])
    prompts = [Prompt("a", "one", ids[0]), Prompt("b", "two", ids[1]), Prompt("c", "one", ids[2])]
    records: list[dict[str, Any]] = []
    saved: list[int] = []
    assert take_turns(model, systems, prompts, 12, records, lambda: saved.append(len(records))) == {}
    assert saved == [1, 2, 3]
    names = [system.name for system in systems]
    assert [record["order"][0] for record in records] == names[:3], "who goes first changes"
    records = json.loads(json.dumps(records))  # everything is computed from what is written
    sums = sums_of(records)
    assert set(sums) == set(names)
    assert {(each.prompts, each.equal, each.tokens) for each in sums.values()} == {(3, 3, 36)}
    assert {each.prompts for each in sums_of(records, "one").values()} == {2}
    assert sums["transformers"].speedup == pytest.approx(1.0)
    assert sums["mtp, head"].stats.target_passes <= 33
    assert sums["mtp, plain"].tau == 1.0
    assert sums["transformers"].tau is None
    assert summary_table(records, {"mtp, head": {"before": 1, "peak": 2}}, "all").row_count == len(names)
    assert category_table(records).row_count == 2
    assert len(stage_table(records).columns) == 3  # the two systems whose rounds are ours
    # What is there already is not asked again.
    assert take_turns(model, systems, [*prompts, Prompt("b", "one", ids[1])], 12, records) == {}
    assert [(record["category"], record["name"]) for record in records[3:]] == [("one", "b")]


def test_a_run_goes_on_where_it_was_and_not_under_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = script("bench")
    folder = save_talking_checkpoint(tmp_path / "checkpoint")
    questions = write_jsonl(tmp_path / "questions.jsonl", [{"id": at, "turns": ["the cat"]} for at in range(2)])
    results = tmp_path / "results.json"
    common = [str(folder), "--data", str(questions), "--output", str(results), "--nodes", "4", "--max-new-tokens"]
    monkeypatch.setenv("COLUMNS", "200")
    bench.main([*common, "6", "--limit", "1"])
    first = json.loads(results.read_text(encoding="utf-8"))["dtypes"]["float32"]["records"]
    bench.main([*common, "6", "--per-category", "2", "--dtype", "float32", "bfloat16"])
    found = json.loads(results.read_text(encoding="utf-8"))["dtypes"]
    assert found["float32"]["records"][0] == first[0]
    assert [len(each["records"]) for each in found.values()] == [2, 2]
    assert found["float32"]["summary"]["mtp, head"]["prompts"] == 2
    assert "bfloat16, greedy, 6 new tokens" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="measured with another max_new_tokens"):
        bench.main([*common, "7"])
    results.write_text("[]", encoding="utf-8")
    with pytest.raises(SystemExit, match="holds no results"):
        bench.main([*common, "6"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--peer", "vllm"], "expected NAME=PYTHON"), (["--peer", "tgi=/python"], "expected NAME=PYTHON")],
)
def test_peers_are_named_with_their_python(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script("bench").main(["RUN", "--data", "questions.jsonl", *arguments])
    assert message in capsys.readouterr().err


def test_each_systems_memory_is_of_a_process_that_loads_what_it_needs(tmp_path: Path) -> None:
    bench = script("bench")
    folder = save_talking_checkpoint(tmp_path / "checkpoint")
    questions = write_jsonl(tmp_path / "questions.jsonl", [{"turns": ["the cat"]}])
    options = bench.parse_arguments([str(folder), "--data", str(questions), "--max-new-tokens", "4", "--nodes", "4"])
    for name in ("transformers", "mtp, plain", "mtp, head"):
        memory = bench.memory_of(name, options)
        assert 0 < memory.before <= memory.peak


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
