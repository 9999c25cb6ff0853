"""scripts/compare_heads.py: contenders are trained and measured by the programs themselves, once each."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from test_bench import script
from tiny import random_prompts
from workshop import make_workshop

from mtp.drafters import DRAFTERS

HEAD = {"draft_vocab_size": 20, "steps": 2, "nodes": 8}
OPTIM = {"epochs": 1, "batch_positions": 200}
EVAL = {"rows": 4, "batch_size": 4, "max_new_tokens": 6}


def write_recipe(folder: Path, family: str, **sections: dict[str, Any]) -> str:
    values = {
        "data": {"held_out_fraction": 0.2},
        "head": {"family": family, **HEAD},
        "optim": OPTIM,
        "eval": EVAL,
        "log_every": 1,
        **sections,
    }
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(path)


def write_questions(folder: Path) -> Path:
    path = folder / "asked.jsonl"
    asked = [
        {"prompt_ids": ids, "category": "odd" if at % 2 else "even"} for at, ids in enumerate(random_prompts([5] * 4))
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in asked), encoding="utf-8")
    return path


@pytest.mark.slow
def test_contenders_are_trained_measured_and_timed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = script("compare_heads")
    workshop = make_workshop(tmp_path / "workshop")
    questions = write_questions(tmp_path)
    medusa, eagle = write_recipe(tmp_path, "medusa"), write_recipe(tmp_path, "eagle3")
    output = tmp_path / "out"
    fixed = ["--data", str(workshop / "rows.jsonl"), "--questions", str(questions), "--output", str(output)]
    fixed += ["--target", str(workshop / "target"), "--epochs", "1", "--tokens", "6", "--threads", "1"]

    def run(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["compare_heads.py", *arguments, *fixed])
        return compare.main()

    # One that cannot be trained is named; the others go on.
    assert run(medusa, f"{eagle},head.steps=0", eagle) == 1
    assert "eagle3 head.steps=0: training ended with exit code 1" in capsys.readouterr().err
    assert run(medusa, eagle, "--drafters", "head+ngram") == 0

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("what is done is done again"))
    assert run(medusa, eagle, "--drafters", "head+ngram") == 0
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in results] == ["medusa", "eagle3", "medusa+ngram"]
    for each in results[:2]:
        assert each["parameters"] > 0
        assert each["curve"][-1]["positions"] == each["positions"] > 0
    mixed = {name: results[2].get(name) for name in ("parameters", "minutes", "curve")}
    assert mixed == {name: results[0][name] for name in ("parameters", "minutes")} | {"curve": None}
    for each in results:
        assert set(each["acceptance"]["asked"]) == {"0", "1"}
        assert set(each["acceptance"]["asked"]["0"]) == {"all", "even", "odd"}
        assert each["acceptance"]["asked"]["0"]["all"] >= 1
        assert each["tokens_per_second"] > 0
        assert each["draft_milliseconds"] > 0
    # A finished head is measured as it is, under whatever drafters; rows to train on are not asked for.
    monkeypatch.undo()
    best = str(output / "eagle3" / "run" / "best")
    elsewhere = tmp_path / "elsewhere"
    shared = ["--questions", str(questions), "--tokens", "6", "--threads", "1", "--target", str(workshop / "target")]
    drafters = ["head", "+".join(["head", *sorted(set(DRAFTERS) - {"none"})])]
    arguments = [best, *shared, "--output", str(elsewhere), "--timed", "0", "--drafters", *drafters]
    monkeypatch.setattr("sys.argv", ["compare_heads.py", *arguments])
    assert compare.main() == 0
    found = json.loads((elsewhere / "results.json").read_text(encoding="utf-8"))
    assert [each["name"] for each in found] == [best, *(drafter.replace("head", best) for drafter in drafters)]
    assert found[0]["parameters"] == results[1]["parameters"]
    assert found[0]["acceptance"] == found[1]["acceptance"] == results[1]["acceptance"]
    assert all(each["acceptance"]["asked"]["0"]["all"] >= 1 for each in found)
    table = (output / "results.md").read_text(encoding="utf-8")
    assert table.count("| medusa |") == table.count("| eagle3 |") == 1 + table.count("| medusa+ngram |") == 4
    assert "asked, greedy | asked, T = 1" in table


@pytest.mark.slow
def test_what_needs_no_training_and_what_trains_the_target_too_are_rows_of_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = script("compare_heads")
    workshop, output = make_workshop(tmp_path / "workshop"), tmp_path / "out"
    adapter = {"adapter": {"rank": 2, "lr": 1e-2}}
    medusa2 = write_recipe(tmp_path, "medusa", target=adapter, features={"mode": "online"})
    assistant = write_recipe(tmp_path, "assistant")
    subset = f"{assistant},optim.epochs=0,features.mode=online,head.sizes.layers=[0]"
    asked = ["--questions", str(write_questions(tmp_path)), "--tokens", "6", "--threads", "1", "--timed", "2"]
    target = ["--data", str(workshop / "rows.jsonl"), "--target", str(workshop / "target"), "--epochs", "1"]
    untrained = ["ngram", "recycling", "early_exit:0", "head+ngram"]
    arguments = [medusa2, *asked, *target, "--output", str(output), "--drafters", *untrained]
    monkeypatch.setattr("sys.argv", ["compare_heads.py", *arguments])
    assert compare.main() == 1, "an adapted target's numbers would not compare with those of a head"
    assert "without an adapter; there is none" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["compare_heads.py", arguments[0], subset, *arguments[1:]])
    assert compare.main() == 0
    found = {each["name"]: each for each in json.loads((output / "results.json").read_text(encoding="utf-8"))}
    name = "assistant optim.epochs=0 features.mode=online head.sizes.layers=[0]"
    assert list(found) == ["medusa", name, "ngram", "recycling", "early_exit:0", f"{name}+ngram"]
    assert [each for each in found if found[each]["adapted"]] == ["medusa"]
    adapted = output / "medusa" / "run" / "best"
    heads = sum(weight.numel() for weight in load_file(adapted / "heads.safetensors").values())
    assert found["medusa"]["parameters"] > heads, "the adapter is trained too"
    assert found["medusa"]["minutes"] > 0
    for each in ("ngram", "recycling", "early_exit:0"):
        assert (found[each]["parameters"], found[each]["minutes"]) == (0, 0)
    assert found[name]["positions"] == 0
    for each in found.values():
        assert set(each["acceptance"]["asked"]) == {"0", "1"}
        assert set(each["acceptance"]["asked"]["1"]) == {"all", "even", "odd"}
        assert min(each["tokens_per_second"], each["draft_milliseconds"]) > 0
    table = (output / "results.md").read_text(encoding="utf-8")
    assert table.count("| medusa\\* |") == table.count("| ngram |") == 3
    assert "\\* decodes the target with an adapter" in table
    assert "| ngram | 0 | 0.0 |" in table


def test_minutes_are_those_of_all_work_before_an_evaluation(tmp_path: Path) -> None:
    """Of a run that was continued, too; its second start found the states on disk."""
    start = {"event": "start", "features_seconds": 60.0, "warm_start_seconds": 30.0}
    evaluation = {"event": "evaluation", "seconds": 60.0, "trained_positions": 100, "mean_accepted_length": 1.5}
    again = {**start, "features_seconds": 6.0, "warm_start_seconds": 0.0}
    last = {**evaluation, "seconds": 120.0, "trained_positions": 200}
    (tmp_path / "run").mkdir()
    lines = [start, {"event": "step", "seconds": 9.0}, evaluation, again, last]
    (tmp_path / "run" / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    compare = script("compare_heads")
    found = compare.trained_with(compare.Contender("name", tmp_path, tmp_path / "run" / "best", "recipe.yaml"))
    assert [(point["positions"], point["minutes"]) for point in found["curve"]] == [(100, 2.5), (200, 3.6)]
    assert (found["positions"], found["minutes"]) == (200, 3.6)


def test_a_folder_that_holds_no_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(SystemExit, match="describes no head"):
        script("compare_heads").Contender.of(str(tmp_path), tmp_path)


def test_a_change_of_a_recipe_may_be_a_list(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "assistant")
    found = script("compare_heads").Contender.of(f"{recipe},head.sizes.layers=[0,1],optim.lr=1e-3", tmp_path)
    assert found.overrides == ("head.sizes.layers=[0,1]", "optim.lr=1e-3")


def test_what_is_not_there_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = script("compare_heads")
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    here = ["--data", str(tmp_path / "rows.jsonl"), "--questions"]
    monkeypatch.setattr("sys.argv", ["compare_heads.py", *here, str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        compare.main()
    assert "none.jsonl" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["compare_heads.py", "configs/none.yaml", *here, str(tmp_path / "rows.jsonl")])
    with pytest.raises(SystemExit, match="no recipe and no finished head at configs"):
        compare.main()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--data", "{rows}", "--drafters", "ngram", "recycle"], "No drafter 'recycle'; there are .*recycling"),
        (["--data", "{rows}", "--drafters", "ngram+ngram"], "a mix names each drafter once"),
        ([], "recipes are trained: name distilled rows with --data"),
        (["--data", "{rows}", "--questions", "{rows}", "{other}"], "two of these are the same"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"rows": tmp_path / "rows.jsonl", "other": tmp_path / "other" / "rows.jsonl"}
    for place in places.values():
        place.parent.mkdir(exist_ok=True)
        place.write_text("", encoding="utf-8")
    given = ["--questions", str(places["rows"]), *(each.format(**places) for each in arguments)]
    monkeypatch.setattr("sys.argv", ["compare_heads.py", *given])
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing is to be started"))
    with pytest.raises(SystemExit):
        script("compare_heads").main()
    assert re.search(reason, capsys.readouterr().err)
