"""Distilled rows: reading, splitting, batching."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from train.data import DataError, Row, is_held_out, length_batches, load_rows, split_rows


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


GOOD = {"prompt_ids": [1, 2], "response_ids": [3, 4], "category": "qa"}


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, {**GOOD, "response_ids": [5]}])
    assert load_rows(path) == [Row((1, 2), (3, 4), "qa"), Row((1, 2), (5,), "qa")]
    assert load_rows(path, limit=1) == [Row((1, 2), (3, 4), "qa")]


def test_gzipped_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(GOOD))
    assert len(load_rows(path)) == 1


def test_missing_data_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No distilled data at .*train/distill\.py"):
        load_rows(tmp_path / "nothing")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        load_rows(tmp_path / "rows.jsonl")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.parquet files"):
        load_rows(tmp_path)


@pytest.mark.parametrize("line", ['{"prompt_ids": [1', "[1, 2]", '"text"'])
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{line}\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3: "):
        load_rows(path)


@pytest.mark.parametrize("change", [{"response_ids": []}, {"prompt_ids": None}, {"response_ids": ["a"]}])
def test_a_row_without_token_ids_is_refused(tmp_path: Path, change: dict) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [GOOD, {**GOOD, **change}])
    with pytest.raises(DataError, match=f"row 2: '{next(iter(change))}'"):
        load_rows(path)


def test_a_prompt_is_always_on_the_same_side_of_the_split() -> None:
    rows = [Row((i, i + 1), (7,)) for i in range(2000)]
    train, held_out = split_rows(rows, 0.1)
    assert 140 < len(held_out) < 260
    assert len(train) + len(held_out) == len(rows)
    again = split_rows(rows[::-1], 0.1)[1]
    assert set(again) == set(held_out)
    # A larger fraction only adds prompts to those that were held out already.
    assert all(is_held_out(row.prompt_ids, 0.2) for row in held_out)


def test_the_answer_does_not_decide_the_split() -> None:
    prompts = [(i, i + 1) for i in range(200)]
    one = {r.prompt_ids for r in split_rows([Row(p, (1,)) for p in prompts], 0.3)[1]}
    other = {r.prompt_ids for r in split_rows([Row(p, (2, 3)) for p in prompts], 0.3)[1]}
    assert one == other


@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_hold_every_row_once_within_their_budget(shuffled: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 500).tolist()
    batches = length_batches(lengths, 1024, np.random.default_rng(1) if shuffled else None)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= 1024


def test_the_same_seed_gives_the_same_batches() -> None:
    lengths = list(range(1, 100))
    first, second = (length_batches(lengths, 300, np.random.default_rng([3, 1])) for _ in range(2))
    assert first == second
    assert first != length_batches(lengths, 300, np.random.default_rng([3, 2]))
