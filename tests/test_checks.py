"""Mistakes in the data are found before the first step."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.test_distill import tiny_tokenizer
from tests.test_training import recipe, workshop  # noqa: F401  (a fixture)
from train import heads as program
from train.checks import answer_header, check_rows, report, template_digest, trained_tokens
from train.data import DataError, Row
from train.prompts import prompt_ids
from train.recipe import load_config
from train.rows import check_origin

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def row(question: str, answer: str, end: bool = True) -> Row:
    answer_ids = tuple(TOKENIZER(answer, add_special_tokens=False).input_ids)
    return Row(prompt_ids(TOKENIZER, question), answer_ids + ((END,) if end else ()))


TRAIN = [row(f"question {at}", f"this is the answer to number {at}") for at in range(20)]
HELD_OUT = [row(f"other {at}", f"and that is the answer to {at}") for at in range(4)]


def found(train: list[Row] = TRAIN, held_out: list[Row] = HELD_OUT, **options: Any) -> list[tuple[bool, str]]:
    settings = {"steps": 3, "window": None, "end_ids": [END], "tokenizer": TOKENIZER, "record": {}, **options}
    return [(finding.fatal, finding.text) for finding in check_rows(train, held_out, **settings)]


def test_sound_data_is_not_complained_about() -> None:
    assert found() == []
    assert found(record={"chat_template": template_digest(TOKENIZER)}) == []


def test_trained_tokens_are_those_with_enough_before_them() -> None:
    short = Row((1,), (2, 3, 4))
    assert [trained_tokens(short, step, None) for step in range(4)] == [2, 1, 0, 0]
    long = Row((1,) * 9, (2, 3, 4))
    assert [trained_tokens(long, step, None) for step in range(4)] == [3, 3, 3, 3]
    assert [trained_tokens(long, step, 3) for step in range(4)] == [3, 3, 2, 1]


def test_masks_that_select_nothing_are_fatal() -> None:
    ((fatal, text),) = found(train=[Row((1,), (2, END))] * 2, tokenizer=None)[:1]
    assert fatal
    assert "step 2 of 3 (head.steps) has no token to train in any of 2 training rows" in text


def test_single_rows_that_select_nothing_are_counted() -> None:
    (first, *_) = found(train=[*TRAIN, Row((1,), (END,))])
    assert first == (False, "1 of 21 training rows select no token to train: too short.")


def test_answers_cut_by_the_length_limit_are_counted() -> None:
    half = [replace(each, response_ids=each.response_ids[:-1]) if at < 12 else each for at, each in enumerate(TRAIN)]
    assert found(train=half) == [(False, "60% of the answers were cut by the length limit; raise it when distilling.")]
    none = [replace(each, response_ids=each.response_ids[:-1]) for each in TRAIN]
    ((fatal, text),) = found(train=none)
    assert not fatal
    assert "none of 20 answers ends with one of the target's end tokens" in text
    assert found(train=none, end_ids=[]) == []


def test_empty_answers_are_counted() -> None:
    empty = [replace(each, response_ids=(END,)) if at < 5 else each for at, each in enumerate(TRAIN)]
    assert found(train=empty) == [
        (False, "25% of the answers are empty: nothing but an end token. Look at the prompts.")
    ]


OTHER = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}ANSWER:{% endif %}"


def test_prompts_of_another_template_are_found_with_what_differs() -> None:
    foreign = [replace(each, prompt_ids=prompt_ids(tiny_tokenizer(OTHER), "hello")) for each in TRAIN]
    foreign = [replace(each, prompt_ids=(*each.prompt_ids, 40 + at)) for at, each in enumerate(foreign)]
    ((fatal, text),) = found(train=foreign)
    assert not fatal
    assert "0 of 20 prompts end as the target's chat template ends them, with '<|end|>\\n<|assistant|>'" in text
    assert "ANSWER:" in text
    ((fatal, _),) = found(train=foreign, record={"chat_template": template_digest(TOKENIZER)})
    assert fatal
    assert found(train=foreign, record={"chat_template": None}) == []  # plain prompts, and said so
    assert found(train=foreign, tokenizer=tiny_tokenizer(template=None)) == []


def test_a_template_that_was_changed_since_is_fatal() -> None:
    ((fatal, text),) = found(record={"chat_template": "0123456789abcdef"})
    assert fatal
    assert "another chat template than the target's tokenizer has now" in text


def test_the_header_is_what_follows_the_users_words() -> None:
    assert TOKENIZER.decode(answer_header(TOKENIZER)) == "<|end|>\n<|assistant|>"
    assert answer_header(None) == ()


def test_repeated_prompts_are_counted() -> None:
    ((fatal, text),) = found(train=[*TRAIN, *TRAIN[:5]])
    assert not fatal
    assert text.startswith("5 of 25 training rows repeat the prompt")


def test_held_out_rows_that_are_trained_on_are_found_in_other_spelling() -> None:
    shouted = row("QUESTION, 3!", "something else entirely, at length")
    same = row("fresh", "this is the answer to number 7")
    ((fatal, text),) = found(held_out=[*HELD_OUT, shouted, same])
    assert not fatal
    assert "of 6 held-out rows 1 ask what a training row asks (letters and digits alike) and 1 have the answer" in text
    ((fatal, _),) = found(held_out=[row(f"Question {at}?", f"different {at}") for at in range(4)])
    assert fatal


def test_fatal_findings_are_raised_together_and_the_others_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    findings = check_rows(
        [*TRAIN, *TRAIN[:5]], HELD_OUT, steps=3, window=None, end_ids=[END], tokenizer=TOKENIZER,
        record={"chat_template": "other"},
    )  # fmt: skip
    with pytest.raises(DataError, match="another chat template"):
        report(findings)
    assert "5 of 25 training rows repeat" in caplog.text


def test_the_program_refuses_masks_that_select_nothing(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt_ids": [1 + at % 20], "response_ids": [2]} for at in range(20)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(SystemExit, match=r"error: step 1 of 3 \(head\.steps\) has no token to train"):
        program.main(recipe(workshop, tmp_path / "run", f"data.path={path}", "data.held_out_fraction=0.5"))


def test_a_split_other_than_the_datas_own_is_refused(workshop: Path, tmp_path: Path) -> None:  # noqa: F811
    config = load_config(recipe(workshop, tmp_path))
    record = {"settings": {"held_out": {"fraction": 0.05}}}
    with pytest.raises(DataError, match=r"split with held_out_fraction 0\.05; the recipe says 0\.15"):
        check_origin(config, None, record)  # type: ignore[arg-type]


def spoiled(rows: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """The workshop's rows with one kind of mistake in all of them."""
    if how == "masks":
        return [{**row, "prompt_ids": row["prompt_ids"][:1], "response_ids": row["response_ids"][:1]} for row in rows]
    if how == "cut":
        return [{**row, "response_ids": [token for token in row["response_ids"] if token != 2] or [3]} for row in rows]
    if how == "leaks":  # every question twice, in token ids that read the same
        return [*rows, *({**row, "prompt_ids": [0, *row["prompt_ids"]]} for row in rows)]
    return rows


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("masks", "has no token to train in any of"),
        ("cut", "answers ends with one of the target's end tokens"),
        ("leaks", "ask what a training row asks"),
        ("template", "rendered with another chat template"),
    ],
)
def test_the_program_says_it_before_anything_is_computed(
    how: str,
    found: str,
    workshop: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target, data = shutil.copytree(workshop / "target", tmp_path / "target"), tmp_path / "data"
    (target / "generation_config.json").write_text('{"eos_token_id": 2}')
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %} t7 t8")
    rows = [json.loads(line) for line in (workshop / "rows.jsonl").read_text().splitlines()]
    data.mkdir()
    Dataset.from_list(spoiled(rows, how)).to_parquet(str(data / "answers-00000.parquet"))
    (data / "distill.json").write_text(json.dumps({"chat_template": "of then" if how == "template" else None}))

    def computed(*arguments: Any) -> None:
        raise AssertionError("a pass of the target came first")

    monkeypatch.setattr("mtp.target.Target.encode", computed)
    with pytest.raises((SystemExit, AssertionError)) as ended:
        program.main(recipe(workshop, tmp_path / "run", f"data.path={data}", f"target.path={target}"))
    assert found in f"{ended.value} {caplog.text}"
