"""Counters: defined as in docs, summed before any ratio, and true of what was generated."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import OracleDrafter, padded, random_prompts, tiny_model

from mtp.model import SpeculativeModel
from mtp.stats import STAGES, AcceptanceStats
from mtp.target import Target

rounds = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def recorded(kept: list[int]) -> AcceptanceStats:
    stats = AcceptanceStats()
    for count in kept:
        stats.record(kept=count, committed=count + 1, drafted=7)
    return stats


@given(rounds)
def test_mean_accepted_length_is_tokens_over_passes(kept: list[int]) -> None:
    stats = recorded(kept)
    assert stats.mean_accepted_length == pytest.approx(sum(k + 1 for k in kept) / len(kept))
    assert stats.mean_accepted_length == pytest.approx(1 + sum(stats.acceptance_by_position()))
    assert sum(stats.histogram.values()) == stats.target_passes == len(kept)
    assert stats.drafted_tokens == 7 * len(kept)


@given(rounds)
def test_acceptance_at_a_position_is_unconditional(kept: list[int]) -> None:
    shares = recorded(kept).acceptance_by_position()
    assert shares == pytest.approx([sum(k > i for k in kept) / len(kept) for i in range(max(kept))])


@given(rounds, rounds)
def test_adding_sums_counters_and_never_averages_ratios(first: list[int], second: list[int]) -> None:
    total = recorded(first)
    total.add(recorded(second))
    together = recorded(first + second)
    assert total.to_dict() == together.to_dict()


def test_plain_decoding_and_nothing_at_all() -> None:
    assert recorded([0, 0, 0]).mean_accepted_length == 1.0
    assert recorded([0, 0]).acceptance_by_position() == []
    assert AcceptanceStats().mean_accepted_length == 0.0
    assert AcceptanceStats().acceptance_by_position() == []


def test_counters_can_be_written_as_json() -> None:
    values = json.loads(json.dumps(recorded([0, 2, 2]).to_dict()))
    assert values["histogram"] == {"0": 1, "2": 2}
    assert set(values["seconds"]) == set(STAGES)


@given(rounds)
def test_counters_are_read_back(kept: list[int]) -> None:
    stats = recorded(kept)
    stats.notes, stats.drift = ["a"], {"measured": 2.0, "recent": 1.5}
    assert AcceptanceStats.from_dict(json.loads(json.dumps(stats.to_dict()))) == stats


def test_the_later_window_is_kept() -> None:
    total = AcceptanceStats(drift={"recent": 2.0})
    total.add(AcceptanceStats())
    assert total.drift == {"recent": 2.0}
    total.add(AcceptanceStats(drift={"recent": 1.5}))
    assert total.drift == {"recent": 1.5}


def test_notes_are_kept_once() -> None:
    total, other = AcceptanceStats(notes=["a"]), AcceptanceStats(notes=["a", "b"])
    total.add(other)
    assert total.notes == ["a", "b"]


def test_time_of_a_failing_stage_is_counted() -> None:
    stats = AcceptanceStats()
    with pytest.raises(RuntimeError), stats.timed("draft"):
        raise RuntimeError
    assert stats.seconds["draft"] > 0


@pytest.mark.parametrize("eos", [None, [4, 9]])
def test_counters_are_true_of_the_text(eos: list[int] | None) -> None:
    lm = tiny_model("llama")
    batch = padded(random_prompts([4, 11, 7], 4))
    plain = lm.generate(**batch, max_new_tokens=25, do_sample=False)[:, 11:].tolist()
    drafter = OracleDrafter(plain, lengths=[3, 1, 4], clutter=3)
    model = SpeculativeModel(Target(lm), drafter)
    out = model.generate(**batch, max_new_tokens=19, do_sample=False, eos_token_id=eos, return_dict_in_generate=True)
    stats = out.acceptance
    # Every token but a row's first, which the prompt's own pass gives, was committed by a round.
    assert stats.committed_tokens == sum(len(kept) - 1 for kept in out.kept)
    assert sum(k * n for k, n in stats.histogram.items()) == sum(map(sum, out.kept))
    assert sum(stats.histogram.values()) == stats.target_passes
    assert isinstance(stats.histogram, Counter)
    assert stats.mean_accepted_length <= 5
    assert stats.seconds["verify"] > 0
    assert stats.seconds["prefill"] > 0


def test_a_slow_path_is_noted() -> None:
    model = SpeculativeModel.from_target(tiny_model("llama"), "none")
    out = model.generate(
        **padded(random_prompts([4])),
        max_new_tokens=3,
        do_sample=False,
        repetition_penalty=1.3,
        return_dict_in_generate=True,
    )
    assert any("RepetitionPenalty" in note for note in out.acceptance.notes)
