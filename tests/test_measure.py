"""serve/measure.py: what is counted, what is compared, and what happens when something is wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from talking import knowing, plain_answer, save_talking_checkpoint, write_jsonl
from tiny import random_prompts, tiny_head, tiny_model

import mtp
import mtp.sampling
import serve.comparison
from mtp.stats import AcceptanceStats
from mtp.target import Target
from mtp.verify import Verdict
from serve.comparison import Comparison, Tally
from serve.divergence import compare_answers, divergence, first_divergence, plain_logits, rounding_of
from serve.measure import main
from serve.questions import Conversation, Question, category_batches, first_of_each, parse_question, read_questions
from serve.systems import (
    DRAFTED,
    PLAIN,
    TRANSFORMERS,
    Answer,
    Decoding,
    Outcome,
    rounds_of,
    run_system,
    up_to_end,
)
from train.data import DataError, Row, split_rows

QUESTIONS = [
    {"question_id": 1, "category": "writing", "turns": ["the cat", "and the hat?"]},
    {"question_id": 2, "category": "maths", "turns": ["the end of"]},
    {"question_id": 3, "category": "writing", "turns": ["café"]},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_checkpoint(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> mtp.SpeculativeModel:
    return mtp.load(checkpoint)


def ask(prompts: list[list[int]]) -> list[Question]:
    return [Question(f"q{at}", prompt_ids=tuple(prompt)) for at, prompt in enumerate(prompts)]


def outcome(tokens: int, seconds: float, rounds: list[int] | None = None) -> Outcome:
    stats = None
    if rounds is not None:
        stats = AcceptanceStats()
        for kept in rounds:
            stats.record(kept=kept, committed=kept + 1, drafted=7)
    return Outcome([Answer(list(range(tokens)))], seconds, seconds / 10, stats)


# Counting


def test_counts_are_summed_before_any_ratio() -> None:
    tally = Tally()
    tally.add({DRAFTED: outcome(10, 1.0, [9]), PLAIN: outcome(10, 5.0, [0] * 10), TRANSFORMERS: outcome(10, 4.0)})
    tally.add({DRAFTED: outcome(4, 1.0, [0, 0, 0, 0]), PLAIN: outcome(4, 2.0, [0] * 4), TRANSFORMERS: outcome(4, 2.0)})
    summary = tally.to_dict()
    assert summary["mean_accepted_length"] == pytest.approx(14 / 5)  # the mean of the two would be 5.5
    assert summary["speedup_over"] == {PLAIN: pytest.approx(7 / 2), TRANSFORMERS: pytest.approx(3.0)}
    assert summary["systems"][DRAFTED]["tokens_per_second"] == pytest.approx(7.0)
    assert summary["systems"][PLAIN]["mean_time_to_first_token"] == pytest.approx(0.35)
    assert summary["systems"][PLAIN]["time_per_later_token"] == pytest.approx((7.0 - 0.7) / 12, abs=1e-5)
    assert summary["acceptance_by_position"] == [0.2] * 9


def test_stage_shares_leave_the_prompt_out() -> None:
    tally = Tally()
    tally.stats.seconds.update(prefill=100.0, draft=1.0, verify=2.0, commit=0.5, other=0.5)
    assert tally.stage_shares() == {"draft": 0.25, "verify": 0.5, "commit": 0.125, "other": 0.125}


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ([False], (0, 0)),
        ([False, True, True, False, False], (2, 4)),
        ([False, True, True], (1, 2)),  # ended inside the guessed tokens
        ([False, False, True], (2, 2)),
    ],
)
def test_rounds_are_read_off_the_kept_tokens(kept: list[bool], expected: tuple[int, int]) -> None:
    assert rounds_of(kept) == expected


@pytest.mark.parametrize("max_new_tokens", range(2, 12))
def test_rounds_read_off_agree_with_the_decoder(model: mtp.SpeculativeModel, max_new_tokens: int) -> None:
    prompts = random_prompts([5, 9, 3], vocab=250)
    knower = knowing(model, prompts, max_new_tokens)
    result = run_system(knower, DRAFTED, prompts, Decoding(max_new_tokens))
    rounds = [rounds_of(answer.kept or []) for answer in result.answers]
    assert result.stats is not None
    assert sum(passes for passes, _ in rounds) == result.stats.target_passes
    assert sum(committed for _, committed in rounds) == result.stats.committed_tokens


def test_nothing_counts_after_an_end_token() -> None:
    assert up_to_end([5, 6, 1, 0, 0], [1]) == [5, 6, 1]
    assert up_to_end([1, 1, 1], [1]) == [1]
    assert up_to_end([5, 6], [1, 2]) == [5, 6]


def test_padding_of_rows_that_ended_is_not_counted(
    model: mtp.SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([4, 6, 5], vocab=250)
    third = plain_answer(model, prompts[0], 8)[2]
    monkeypatch.setattr(model.target.causal_lm.generation_config, "eos_token_id", third)
    expected = [plain_answer(model, prompt, 8) for prompt in prompts]
    assert len({len(ids) for ids in expected}) > 1, "one row should end before another"
    for system in (DRAFTED, PLAIN, TRANSFORMERS):
        result = run_system(model, system, prompts, Decoding(8))
        assert [answer.ids for answer in result.answers] == expected
        assert result.new_tokens == sum(map(len, expected))


# Comparing


def test_another_system_goes_first_at_every_prompt(
    model: mtp.SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def record(model: Any, system: str, prompts: Any, decoding: Decoding, seed: int | None = None) -> Outcome:
        calls.append((system, prompts[0][0], decoding.max_new_tokens))
        return outcome(1, 1.0, [])

    monkeypatch.setattr(serve.comparison, "run_system", record)
    comparison = Comparison(model, Decoding(20))
    comparison.run(ask([[at] for at in range(6)]), None)
    warm_up, counted = calls[:3], calls[3:]
    assert {system for system, _, _ in warm_up} == {DRAFTED, PLAIN, TRANSFORMERS}
    assert all(length == 16 for _, _, length in warm_up)
    assert [prompt for _, prompt, _ in counted] == [at for at in range(6) for _ in range(3)]
    assert Counter(counted[at][0] for at in range(0, 18, 3)) == {DRAFTED: 2, PLAIN: 2, TRANSFORMERS: 2}
    assert comparison.overall.prompts == 6
    assert comparison.records[1]["order"] == [PLAIN, TRANSFORMERS, DRAFTED]


def test_a_knowing_drafter_measures_as_it_should(model: mtp.SpeculativeModel) -> None:
    prompts = random_prompts([5, 8], vocab=250)
    comparison = Comparison(knowing(model, prompts, 13, lengths=(3,)), Decoding(13))
    comparison.run(ask(prompts), None)
    # The prompt's pass gives one token, each round three guessed ones and one of the target's.
    assert comparison.overall.stats.mean_accepted_length == 4.0
    assert comparison.overall.stats.acceptance_by_position() == [1.0, 1.0, 1.0]
    assert [record["target_passes"] for record in comparison.records] == [3, 3]
    assert all(record["new_tokens"] == dict.fromkeys(record["new_tokens"], 13) for record in comparison.records)
    assert comparison.equality() == {
        "compared": 2,
        DRAFTED: {"equal": 2, "different": []},
        PLAIN: {"equal": 2, "different": []},
    }


def test_where_answers_part() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 9, 3]) == 1
    assert first_divergence([1, 2, 3], [1, 2]) == 2
    assert first_divergence([], [4]) == 0


def test_a_divergence_names_both_tokens_and_how_near_they_were(model: mtp.SpeculativeModel) -> None:
    (prompt,) = random_prompts([5], vocab=250)
    expected = plain_answer(model, prompt, 6)
    found = [*expected[:3], (expected[3] + 1) % 250, *expected[4:]]
    difference = divergence(model, prompt, expected, found)
    assert difference is not None
    assert (difference["position"], difference["expected"], difference["found"]) == (3, expected[3], found[3])
    assert difference["logit_margin"] > difference["rounding"] > 0
    assert not difference["within_rounding"]
    shorter = divergence(model, prompt, expected, expected[:2])
    assert shorter is not None
    assert (shorter["position"], shorter["expected"], shorter["found"]) == (2, expected[2], None)
    assert (shorter["logit_margin"], shorter["within_rounding"]) == (None, False)


def test_rounding_is_in_units_of_the_last_place_of_the_largest_logit() -> None:
    for dtype, units in ((torch.float32, 40), (torch.bfloat16, 8)):
        logits = torch.tensor([1.0, -20.0, 3.0], dtype=dtype)
        next_up = torch.nextafter(torch.tensor(20.0, dtype=dtype), torch.tensor(99.0, dtype=dtype))
        assert rounding_of(logits) == pytest.approx(units * float(next_up - 20))
    assert rounding_of(torch.zeros(3)) == 0


@pytest.mark.parametrize("seed", range(3))
def test_answers_in_bfloat16_part_at_near_ties_only(seed: int) -> None:
    target = Target(tiny_model(seed=seed).to(torch.bfloat16))
    prompts = [(str(at), prompt) for at, prompt in enumerate(random_prompts([5, 9, 3, 7, 4], seed))]
    plain = mtp.SpeculativeModel(target, tiny_head("eagle3", target))
    entries = compare_answers(plain, prompts, Decoding(24), [1, 4])
    assert len(entries) == 10
    assert all(entry["divergence"] is None or entry["divergence"]["within_rounding"] for entry in entries)


def test_a_mistake_in_bfloat16_is_no_near_tie() -> None:
    target = Target(tiny_model().to(torch.bfloat16))
    model = mtp.SpeculativeModel(target, tiny_head("eagle3", target))
    (prompt,) = random_prompts([5])
    expected = run_system(model, TRANSFORMERS, [prompt], Decoding(6)).answers[0].ids
    unlikely = int(plain_logits(model, [*prompt, *expected[:2]]).argmin())
    difference = divergence(model, prompt, expected, [*expected[:2], unlikely, *expected[3:]])
    assert difference is not None
    assert (difference["position"], difference["within_rounding"]) == (2, False)


def careless_walk(tree: mtp.TokenTree, choices: torch.Tensor) -> Verdict:
    """A verifier that keeps the first guess unseen."""
    child = (tree.parents == 0).int().argmax(1)
    path = torch.stack([torch.zeros_like(child), child], dim=1)
    return Verdict(path, torch.full_like(child, 2), choices.gather(1, child[:, None])[:, 0])


def test_equality_holds_in_batches_and_fails_with_a_careless_verifier(
    model: mtp.SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts([5, 8, 3, 6, 4], vocab=250)
    named = [(f"q{at}", prompt) for at, prompt in enumerate(prompts)]
    knower = knowing(model, prompts, 10)
    for drafting in (knower, model):
        entries = compare_answers(drafting, named, Decoding(10), [1, 4])
        assert [(entry["batch_size"], entry["name"]) for entry in entries] == [
            (size, name) for size in (1, 4) for name, _ in named
        ]
        assert all(entry["divergence"] is None for entry in entries)
    monkeypatch.setattr(mtp.sampling, "walk", careless_walk)
    different = [entry for entry in compare_answers(model, named, Decoding(10), [1, 4]) if entry["divergence"]]
    assert {entry["batch_size"] for entry in different} == {1, 4}
    assert all(entry["divergence"]["position"] == 1 for entry in different)
    assert all(not entry["divergence"]["within_rounding"] for entry in different)


def test_equality_fails_the_program(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    data = write_jsonl(tmp_path / "q.jsonl", QUESTIONS)
    arguments = [str(checkpoint), "--data", str(data), "--compare", "--max-new-tokens", "6"]
    arguments += ["--output", str(tmp_path / "compare.json")]
    assert main(arguments) == 0
    assert "6 of 6 greedy answers" in capsys.readouterr().out
    monkeypatch.setattr(mtp.sampling, "walk", careless_walk)
    assert main(arguments) == 1
    assert "near-tie" in capsys.readouterr().out
    answers = json.loads((tmp_path / "compare.json").read_text())["answers"]
    assert len(answers) == 6
    assert any(answer["divergence"] and not answer["divergence"]["within_rounding"] for answer in answers)


# The program


def test_the_report_holds_everything(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_jsonl(tmp_path / "spec.jsonl", QUESTIONS)
    output = tmp_path / "deep" / "report.json"
    arguments = [str(checkpoint), "--data", str(data), "--max-new-tokens", "6", "--temperature", "0", "1.0"]
    assert main([*arguments, "--rule", "walk", "rejection", "--nodes", "5", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["complete"] is True
    assert {"mtp", "torch", "transformers", "python"} == set(report["versions"])
    assert report["machine"]["dtype"] == "float32"
    assert report["settings"]["nodes"] == 5
    greedy, walked, rejected = report["results"]
    assert greedy["equality"]["drafted"] == {"equal": 3, "different": []}
    assert [result["rule"] for result in report["results"]] == ["auto", "walk", "rejection"]
    assert walked["equality"] is rejected["equality"] is None
    for result in (greedy, walked, rejected):
        assert set(result["categories"]) == {"writing", "maths"}
        assert [record["name"] for record in result["records"]] == ["1", "3", "2"]
        parts = result["categories"].values()
        for key in ("prompts", "committed_tokens", "target_passes", "drafted_tokens"):
            assert result["overall"][key] == sum(part[key] for part in parts)
        assert set(result["overall"]["systems"]) == {DRAFTED, PLAIN, TRANSFORMERS}
        assert all(numbers["mean_time_to_first_token"] > 0 for numbers in result["overall"]["systems"].values())
        assert sum(result["overall"]["stage_shares"].values()) == pytest.approx(1, abs=1e-3)
    printed = capsys.readouterr().out
    for words in (
        "greedy",
        "sampled at temperature 1, rule rejection",
        "T = 1",
        "writing",
        "all",
        "tau",
    ):
        assert words in printed


def test_sampled_results_repeat_with_the_seed(model: mtp.SpeculativeModel) -> None:
    prompts = random_prompts([5], vocab=250)
    decoding = Decoding(12, temperature=1.0, seed=3, rule="rejection")
    first, again = (run_system(model, DRAFTED, prompts, decoding).answers[0].ids for _ in range(2))
    other = run_system(model, DRAFTED, prompts, decoding, seed=4).answers[0].ids
    assert first == again
    assert first != other


def test_only_acceptance_runs_in_batches_and_compares_nothing(checkpoint: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "q.jsonl", [{"prompt": "the " * n} for n in range(1, 6)])
    output = tmp_path / "report.json"
    arguments = [
        str(checkpoint),
        "--data",
        str(data),
        "--only-acceptance",
        "--batch-size",
        "3",
        "--max-new-tokens",
        "5",
    ]
    assert main([*arguments, "--output", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert list(result["overall"]["systems"]) == [DRAFTED]
    assert result["overall"]["prompts"] == 5
    assert "mean_time_to_first_token" not in result["overall"]["systems"][DRAFTED]
    assert sum(record["target_passes"] for record in result["records"]) == result["overall"]["target_passes"]


def test_the_default_place_of_results_is_the_checkpoint(tmp_path: Path) -> None:
    folder = save_talking_checkpoint(tmp_path)
    data = write_jsonl(tmp_path / "some.jsonl", QUESTIONS[:1])
    assert main([str(folder), "--data", str(data), "--only-acceptance", "--max-new-tokens", "2"]) == 0
    assert (folder / "measure-some.json").is_file()


def test_prompts_that_do_not_fit_are_skipped_and_named(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_jsonl(tmp_path / "q.jsonl", [{"id": "long", "prompt": "z" * 200}, {"prompt": "the cat"}])
    output = tmp_path / "report.json"
    arguments = [
        str(checkpoint),
        "--data",
        str(data),
        "--only-acceptance",
        "--max-new-tokens",
        "4",
        "--output",
        str(output),
    ]
    assert main(arguments) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert [entry["name"] for entry in result["skipped"]] == ["long"]
    assert len(result["records"]) == 1
    assert "skipped long, turn 1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="None of the 1 prompts"):
        main([*arguments, "--limit", "1"])


def test_an_interrupt_keeps_what_was_measured(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = serve.comparison.run_system, []

    def interrupted(*arguments: Any) -> Outcome:
        calls.append(arguments)
        if len(calls) == 3 + 3 + 2:  # the warm-up, one prompt, and in the middle of the second one
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(serve.comparison, "run_system", interrupted)
    data, output = write_jsonl(tmp_path / "q.jsonl", QUESTIONS), tmp_path / "report.json"
    assert main([str(checkpoint), "--data", str(data), "--max-new-tokens", "4", "--output", str(output)]) == 130
    report = json.loads(output.read_text())
    assert report["complete"] is False
    assert len(report["results"][0]["records"]) == 1


def test_all_turns_carry_the_models_own_answers(model: mtp.SpeculativeModel) -> None:
    tokenizer = model.tokenizer
    comparison = Comparison(model, Decoding(5), (DRAFTED,))
    comparison.run([Question("q", turns=("the cat", "the hat"))], tokenizer, all_turns=True)
    first = tokenizer("<|user|>the cat<end><|assistant|>")["input_ids"]
    said = tokenizer.decode(plain_answer(model, first, 5), skip_special_tokens=True)
    second = tokenizer(f"<|user|>the cat<end><|assistant|>{said}<end><|user|>the hat<end><|assistant|>")["input_ids"]
    assert [record["prompt_tokens"] for record in comparison.records] == [len(first), len(second)]
    comparison = Comparison(model, Decoding(5), (DRAFTED,))
    comparison.run([Question("q", turns=("the cat", "the hat"))], tokenizer)
    assert len(comparison.records) == 1


# Questions


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}', "", '{"prompt": '], "line 3: not JSON"),
        (['{"prompt": "a"}', "[1]"], "line 2: found a list"),
        (['{"question": "a"}'], "line 1: found keys 'question'; expected one of turns"),
        (['{"turns": []}'], "line 1: 'turns' is"),
        (['{"turns": ["a", 3]}'], "expected a non-empty list of texts"),
        (['{"prompt": ""}'], "expected a non-empty text"),
        (['{"prompt_ids": [1, "a"]}'], "expected a non-empty list of token ids"),
        (['{"prompt_ids": [1, 100000]}'], "token id 100000, but the target has"),
        (['{"messages": [{"role": "user"}]}'], "line 1: 'messages' is"),
        (['{"messages": [{"role": "assistant", "content": "a"}]}'], "one of role 'user'"),
        ([], "is empty"),
    ],
)
def test_bad_data_is_named_without_a_traceback(
    checkpoint: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    data = tmp_path / "q.jsonl"
    data.write_text("\n".join(lines))
    with pytest.raises(SystemExit) as stopped:
        main([str(checkpoint), "--data", str(data), "--output", str(tmp_path / "out.json")])
    assert str(stopped.value.code).startswith("error: ")
    assert message in str(stopped.value.code)
    assert not (tmp_path / "out.json").exists()


def test_missing_things_are_named(checkpoint: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "q.jsonl", QUESTIONS)
    with pytest.raises(SystemExit, match=r"error: No file at .*nowhere.jsonl"):
        main([str(checkpoint), "--data", str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(SystemExit, match=r"error: No config.json in .*nothing"):
        main([str(tmp_path / "nothing"), "--data", str(data)])
    assert not (tmp_path / "nothing").exists()


def test_a_wrong_target_is_refused_in_the_librarys_words(checkpoint: Path, tmp_path: Path) -> None:
    save_talking_checkpoint(tmp_path / "other", seed=1)
    data = write_jsonl(tmp_path / "q.jsonl", QUESTIONS)
    with pytest.raises(SystemExit, match=r"error: .*the target at hand has fingerprint"):
        main([str(checkpoint), "--data", str(data), "--target", str(tmp_path / "other" / "target")])


@pytest.mark.parametrize(
    "options",
    [
        ["--batch-size", "4"],
        ["--only-acceptance", "--batch-size", "1", "4"],
        ["--compare", "--temperature", "1"],
        ["--compare", "--all-turns"],
        ["--rule", "rejection"],
        ["--limit", "0"],
        ["--held-out-fraction", "0"],
    ],
)
def test_options_that_would_be_ignored_are_refused(options: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["folder", "--data", "data.jsonl", *options])
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_given_answer_is_left_for_the_model_to_give(model: mtp.SpeculativeModel) -> None:
    messages = [{"role": role, "content": text} for role, text in [("system", "s"), ("user", "u"), ("assistant", "a")]]
    question = parse_question({"messages": messages}, "here", 1)
    prompt = Conversation(question).next_prompt(model.tokenizer, raw=False)
    assert model.tokenizer.decode(prompt) == "<|system|>s<end><|user|>u<end><|assistant|>"
    raw = Conversation(question).next_prompt(model.tokenizer, raw=True)
    assert model.tokenizer.decode(raw) == "s\nu"


def test_a_distilled_folder_gives_the_rows_that_training_held_out(tmp_path: Path) -> None:
    prompts = random_prompts([4] * 40)
    rows = [Row(tuple(prompt), (1, 2)) for prompt in prompts]
    Dataset.from_list([{"prompt_ids": p, "response_ids": [1, 2], "category": "c"} for p in prompts]).to_parquet(
        str(tmp_path / "part.parquet")
    )
    held_out = [row.prompt_ids for row in split_rows(rows, 0.3)[1]]
    assert 0 < len(held_out) < 40
    assert [question.prompt_ids for question in read_questions(tmp_path, 0.3)] == held_out
    assert len(read_questions(tmp_path)) == 40


def test_a_held_out_fraction_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Leave --held-out-fraction out"):
        read_questions(write_jsonl(tmp_path / "q.jsonl", QUESTIONS), 0.1)


def test_the_first_of_each_category_and_batches_of_one() -> None:
    questions = [Question(str(at), "abcab"[at % 5]) for at in range(10)]
    assert [question.name for question in first_of_each(questions, 1, None)] == ["0", "1", "2"]
    assert [question.name for question in first_of_each(questions, 2, 4)] == ["0", "1", "2", "3"]
    batches = category_batches(questions, 3)
    assert [[question.name for question in batch] for batch in batches] == [
        ["0", "3", "5"],
        ["8"],
        ["1", "4", "6"],
        ["9"],
        ["2", "7"],
    ]
    assert all(len({question.category for question in batch}) == 1 for batch in batches)


def test_another_drafter_is_measured_by_name_and_an_unknown_one_refused(checkpoint: Path, tmp_path: Path) -> None:
    data, output = write_jsonl(tmp_path / "questions.jsonl", QUESTIONS), tmp_path / "out.json"
    arguments = [str(checkpoint), "--data", str(data), "--max-new-tokens", "6", "--output", str(output), "--drafter"]
    assert main([*arguments, "head+ngram", "--nodes", "5"]) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert report["settings"]["drafter"] == "head+ngram"
    assert report["results"][0]["equality"]["drafted"]["equal"] == len(QUESTIONS)
    with pytest.raises(SystemExit, match="No drafter 'crystal'"):
        main([*arguments, "crystal"])
