"""The log of what a target answered in use: whole, bounded, shared, and silent about prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import OracleDrafter, padded, random_prompts, tiny_head, tiny_model, tiny_target

import mtp
from mtp.stats import AcceptanceStats
from mtp.target import Target
from mtp.traffic import TrafficError, TrafficLog, TrafficRow, read_traffic

PROMPTS = random_prompts([5, 9, 1], seed=1)
GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def model() -> mtp.SpeculativeModel:
    target = tiny_target(seed=3)
    return mtp.SpeculativeModel(target, tiny_head("eagle3", target))


def logged(model: mtp.SpeculativeModel, folder: Path, context: int | None = 0, **options: Any) -> list[TrafficRow]:
    """What the log holds of one batch."""
    with TrafficLog(folder, model.target, context=context) as log:
        model.generate(**padded(PROMPTS), max_new_tokens=12, traffic=log, **options)
    return read_traffic(folder, model.target)


def lines(folder: Path) -> list[str]:
    return [line for segment in sorted(folder.glob("*.jsonl")) for line in segment.read_text().splitlines()]


# What is logged


def test_answers_are_logged_with_the_tokens_that_were_guessed(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    truth = model.target.causal_lm.generate(**padded(PROMPTS), max_new_tokens=12, do_sample=False)[:, 9:].tolist()
    rows = logged(model, tmp_path, do_sample=False, drafter=OracleDrafter(truth, lengths=(3, 0)))
    assert [list(row.answer) for row in rows] == truth
    # Rounds: three guesses and the token behind them, then a plain one, and so on; the prompt's own token comes first.
    flags = [False, *([True] * 3 + [False, False]) * 3][:12]
    assert [list(row.kept) for row in rows] == [flags] * 3
    assert rows[0].acceptance.histogram == {3: 2, 0: 2, 1: 1}


def test_no_prompt_is_logged_unless_asked_for(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    assert [(row.context, row.whole) for row in logged(model, tmp_path / "none")] == [((), False)] * 3
    assert not any(json.loads(line).get("context") for line in lines(tmp_path / "none"))
    ends = logged(model, tmp_path / "some", context=4)
    assert [(list(row.context), row.whole) for row in ends] == [
        (PROMPTS[0][-4:], False),
        (PROMPTS[1][-4:], False),
        (PROMPTS[2], True),
    ]
    assert [list(row.context) for row in logged(model, tmp_path / "all", context=None)] == PROMPTS


def test_only_its_owner_may_read_a_log(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    logged(model, tmp_path / "log")
    for path in (tmp_path / "log", *(tmp_path / "log").iterdir()):
        assert path.stat().st_mode & 0o077 == 0


def test_settings_are_logged(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    assert logged(model, tmp_path / "greedy", do_sample=False)[0].sampling == {"do_sample": False}
    torch.manual_seed(0)
    drawn = logged(model, tmp_path / "drawn", do_sample=True, temperature=0.7, repetition_penalty=1.2)[0].sampling
    assert (drawn["do_sample"], drawn["temperature"], drawn["rule"]) == (True, 0.7, "walk")
    assert "RepetitionPenaltyLogitsProcessor" in drawn["processors"]


def test_logging_does_not_change_the_text(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    without = model.generate(**padded(PROMPTS), max_new_tokens=12, do_sample=False)
    with TrafficLog(tmp_path, model.target) as log:
        assert torch.equal(model.generate(**padded(PROMPTS), max_new_tokens=12, do_sample=False, traffic=log), without)


@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_rounds_are_found_again_in_the_flags(kept: list[bool]) -> None:
    stats = AcceptanceStats.from_kept(kept)
    assert stats.committed_tokens == len(kept) - 1
    ended_by_the_target = kept[1:].count(False)
    assert stats.target_passes == ended_by_the_target + (len(kept) > 1 and kept[-1])
    assert sum(guessed * rounds for guessed, rounds in stats.histogram.items()) == sum(kept[1:])


def test_rounds_of_the_flags_are_the_decoders(model: mtp.SpeculativeModel) -> None:
    output = model.generate(
        **padded(PROMPTS), max_new_tokens=17, do_sample=False, return_dict_in_generate=True, nodes=8
    )
    counted = [AcceptanceStats.from_kept(kept) for kept in output.kept]
    assert sum(stats.target_passes for stats in counted) == output.acceptance.target_passes
    assert sum(stats.committed_tokens for stats in counted) == output.acceptance.committed_tokens


# How it is kept


def add(log: TrafficLog, number: int, length: int = 8) -> None:
    log.add([[1]], [[number] * length], [[False] * length], GREEDY)


def held(folder: Path) -> int:
    """Bytes in the folder, unfinished files too."""
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_oldest_answers_make_room_for_new_ones(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    with TrafficLog(tmp_path, model.target, max_bytes=4000) as log:
        for number in range(200):
            add(log, number % 20)
            log.flush()
            assert held(tmp_path) <= 4000
    numbers = [row.answer[0] for row in read_traffic(tmp_path, model.target)]
    assert numbers == [number % 20 for number in range(200 - len(numbers), 200)]
    assert len(numbers) > 10
    assert log.lost == 0


def test_an_answer_larger_than_the_log_is_lost_and_counted(
    model: mtp.SpeculativeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with TrafficLog(tmp_path, model.target, max_bytes=500) as log:
        add(log, 1)
        add(log, 2, length=300)
    assert log.lost == 1
    assert "may take 500" in caplog.text
    assert len(read_traffic(tmp_path, model.target)) == 1


def test_a_full_disk_costs_answers_and_no_generation(
    model: mtp.SpeculativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with TrafficLog(tmp_path, model.target) as log:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            add(log, 1)
            log.flush()
        add(log, 2)
    assert log.lost == 1
    assert not list(tmp_path.glob(".*"))
    assert [row.answer[0] for row in read_traffic(tmp_path, model.target)] == [2]


def test_threads_share_a_log(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    with TrafficLog(tmp_path, model.target, max_bytes=2_000_000) as log:
        threads = [threading.Thread(target=lambda n=n: [add(log, n) for _ in range(50)]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    numbers = sorted(row.answer[0] for row in read_traffic(tmp_path, model.target))
    assert numbers == sorted([*range(6)] * 50)


WRITER = """
import sys
from tiny import tiny_target
from mtp.traffic import TrafficLog
with TrafficLog(sys.argv[1], tiny_target(seed=3), max_bytes=int(sys.argv[3])) as log:
    for number in range(60):
        log.add([[1]], [[int(sys.argv[2]), number % 20]], [[False, True]], {"do_sample": False})
        log.flush()
"""


@pytest.mark.parametrize("bound", [10_000_000, 3000])
def test_processes_share_a_log(bound: int, model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(n), str(bound)], env=environment) for n in range(2)]
    while any(writer.poll() is None for writer in writers):
        for segment in tmp_path.glob("answers-*.jsonl"):
            try:
                text = segment.read_text()
            except FileNotFoundError:
                continue
            assert text.endswith("\n")
            assert len(text.splitlines()) == 2
    assert [writer.returncode for writer in writers] == [0, 0]
    assert held(tmp_path) <= bound
    rows = read_traffic(tmp_path, model.target)
    for writer in range(2):
        numbers = [row.answer[1] for row in rows if row.answer[0] == writer]
        assert numbers == [number % 20 for number in range(60 - len(numbers), 60)]
    if bound > 3000:
        assert len(rows) == 120


def test_what_a_killed_writer_left_unfinished_is_no_answer_and_goes_in_time(
    model: mtp.SpeculativeModel, tmp_path: Path
) -> None:
    with TrafficLog(tmp_path, model.target) as log:
        add(log, 1)
    left, recent = tmp_path / ".answers-1.jsonl.7.partial", tmp_path / ".answers-2.jsonl.7.partial"
    for path in (left, recent):
        path.write_text('{"format": 1, "finger')
    os.utime(left, (0, 0))
    assert len(read_traffic(tmp_path, model.target)) == 1
    TrafficLog(tmp_path, model.target).close()
    assert (left.exists(), recent.exists()) == (False, True)


# What is refused


def test_another_targets_log_is_refused_by_writer_and_reader(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    logged(model, tmp_path)
    other = Target(tiny_model(seed=4))
    for use in (TrafficLog, read_traffic):
        with pytest.raises(TrafficError, match=r"holds answers of a target with fingerprint .* differ"):
            use(tmp_path, other)
    log = TrafficLog(tmp_path / "other", other)
    with pytest.raises(ValueError, match="traffic logs the answers of another target"):
        model.generate(**padded(PROMPTS), max_new_tokens=2, traffic=log)
    with pytest.raises(ValueError, match=r"traffic is a str; expected an mtp\.TrafficLog"):
        model.generate(**padded(PROMPTS), max_new_tokens=2, traffic="log")


HEAD = object()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([], "does not begin as a segment"),
        (["no json"], "does not begin as a segment"),
        (['{"format": 1}'], "does not begin as a segment"),
        (['{"format": 2, "fingerprint": "a-b-c"}'], "has format 2; this version of mtp reads up to 1"),
        ([HEAD, '{"answer": [1'], "line 2: no answer"),
        ([HEAD, '{"answer": [1], "kept": "0"}'], "line 2: no answer"),
        ([HEAD, {"answer": [1, 2], "kept": "0"}], "2 tokens and 1 flags"),
        ([HEAD, {"answer": [], "kept": ""}], "0 tokens and 0 flags"),
        ([HEAD, {"answer": [24], "kept": "0"}], "token ids beyond the target's 24"),
        ([HEAD, {"answer": [-1], "kept": "0"}], "token ids beyond the target's 24"),
    ],
)
def test_a_damaged_segment_is_refused_by_name(
    written: list[Any], message: str, model: mtp.SpeculativeModel, tmp_path: Path
) -> None:
    def line(part: Any) -> str:
        if part is HEAD:
            return json.dumps({"format": 1, "fingerprint": model.target.fingerprint()})
        return part if isinstance(part, str) else json.dumps({"context": [], "whole": False, "sampling": {}, **part})

    (tmp_path / "answers-1.jsonl").write_text("".join(line(part) + "\n" for part in written))
    with pytest.raises(TrafficError, match=rf"answers-1\.jsonl.*{message}"):
        read_traffic(tmp_path, model.target)


def test_an_empty_log_and_bounds_that_hold_nothing_are_refused(model: mtp.SpeculativeModel, tmp_path: Path) -> None:
    with pytest.raises(TrafficError, match="No logged answers in"):
        read_traffic(tmp_path, model.target)
    for options in ({"max_bytes": 0}, {"context": -1}):
        with pytest.raises(TrafficError, match="expected more than 0 bytes, and 0 or more tokens"):
            TrafficLog(tmp_path, model.target, **options)
