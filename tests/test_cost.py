"""Measured costs: kept, read back, and measured again where they cannot be."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny import FOUR, padded, tiny_head, tiny_model, tiny_target

from mtp.cost import Costs, CostTable, measure
from mtp.drafters import DRAFTERS, Budget, TargetStates, drafter_by_name
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target

TABLE = CostTable((64, 1024), (1, 4, 16), ((1.0, 1.3, 2.5), (2.0, 2.3, 3.5)), first=0.1, level=0.02)
PAYS = CostTable((64,), (1, 16, 64), ((1e3, 1e3, 1e3),), first=1.0, level=1.0)


def test_between_measured_points_costs_run_along_straight_lines() -> None:
    costs = TABLE.of_round(64, 16)
    assert [costs.verify[nodes] for nodes in (0, 1, 4, 16)] == [0.0, 1.0, 1.3, 2.5]
    assert costs.verify[10] == pytest.approx(1.9)
    assert TABLE.of_round(512, 16).verify[1] == pytest.approx(1 + 448 / 960)
    assert TABLE.of_round(1984, 16).verify[1] == pytest.approx(1 + 1920 / 960), "beyond them, along the last one"
    assert (costs.first, costs.level) == (0.1, 0.02)
    assert costs.plain == pytest.approx(1.01)


@pytest.mark.parametrize("family", sorted(HEADS))
def test_measuring_gives_a_whole_table_and_leaves_the_model_alone(family: str) -> None:
    target = tiny_target()
    head = tiny_head(family, target)
    before = target.causal_lm(torch.tensor([[3, 4, 5]])).logits
    table = measure(target, head, batch=2)
    assert all(value > 0 for row in table.verify for value in row)
    assert all(list(row) == sorted(row) for row in table.verify)
    assert table.first > 0
    assert table.level >= 0
    assert torch.equal(target.causal_lm(torch.tensor([[3, 4, 5]])).logits, before)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_drafters_that_need_no_training_are_measured_too(name: str) -> None:
    target = tiny_target()
    table = measure(target, drafter_by_name(name).attach(target), batch=2)
    assert all(value > 0 for row in table.verify for value in row)
    assert table.first > 0
    assert table.level >= 0


def test_a_slow_target_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtp.cost.PATIENCE", 0.0)
    target = tiny_target()
    passes = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *args: passes.append(1) or forward(*args))
    measure(target, tiny_head("medusa", target), batch=1)
    once = len(passes)
    monkeypatch.setattr("mtp.cost.PATIENCE", 1e9)
    measure(target, tiny_head("medusa", target), batch=1)
    assert len(passes) - once > 2 * once


def costs_in(folder: Path, monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> Costs:
    def counting(target: Target, drafter: object, batch: int) -> CostTable:
        calls.append(batch)
        return TABLE

    monkeypatch.setattr("mtp.cost.measure", counting)
    target = tiny_target()
    return Costs(target, tiny_head("medusa", target), folder)


def test_what_was_measured_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    costs_in(tmp_path, monkeypatch, calls).prepare(1)
    again = costs_in(tmp_path, monkeypatch, calls)
    again.prepare(1)
    assert again.table(1) == TABLE
    assert calls == [1]
    again.prepare(3)
    assert calls == [1, 4], "rounded up to a power of two"
    assert again.table(2) == TABLE, "the next larger one stands in when rows have ended"


def test_another_drafter_or_thread_count_has_a_table_of_its_own(tmp_path: Path) -> None:
    target = tiny_target()
    drafters = [*(tiny_head(family, target) for family in HEADS), *(drafter_by_name(name) for name in DRAFTERS)]
    paths = {Costs(target, drafter, tmp_path).path(1) for drafter in drafters}
    assert len(paths) == len(HEADS) + len(DRAFTERS)
    assert Costs(target, tiny_head("medusa", target), tmp_path).path(2) not in paths


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"contexts": [1]})])
def test_a_damaged_file_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    calls: list[int] = []
    costs = costs_in(tmp_path, monkeypatch, calls)
    costs.path(1).write_text(content, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        costs.prepare(1)
    assert calls == [1]
    assert "cannot be read" in caplog.text


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    costs = costs_in(tmp_path / "file", monkeypatch, [])
    with caplog.at_level(logging.WARNING):
        costs.prepare(1)
    assert costs.table(1) == TABLE
    assert "cannot be kept" in caplog.text


# ---- the round loop with a planner --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(HEADS))
@pytest.mark.parametrize("table", [PAYS, TABLE], ids=["always pays", "never pays"])
def test_text_is_the_targets_whatever_the_planner_decides(
    family: str, table: CostTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny model takes microseconds: against PAYS a round is always cheap, against TABLE drafting soon rests."""
    monkeypatch.setattr("mtp.cost.measure", lambda *_: table)
    lm = tiny_model()
    target = Target(lm)
    model = SpeculativeModel(target, tiny_head(family, target))
    batch = padded(FOUR)
    settings = {"max_new_tokens": 40, "do_sample": False}
    expected = lm.generate(**batch, **settings)
    for _ in range(2):  # what is learnt is kept from one generation to the next
        assert torch.equal(model.generate(**batch, nodes="auto", **settings), expected)


@pytest.mark.parametrize("family", sorted(HEADS))
def test_a_head_that_rested_proposes_what_one_that_did_not_proposes(family: str) -> None:
    """Rounds decoded plainly are read together at the next proposal."""
    target = tiny_target()
    ids = torch.tensor([FOUR[1], FOUR[1][::-1]])
    steady, rested = (tiny_head(family, target) for _ in range(2))
    hidden, taps = target.encode(ids, steady.taps)

    def states(first: int, counts: list[int]) -> TargetStates:
        last = first + max(counts)
        tapped = None if taps is None else taps[:, first:last]
        return TargetStates(ids[:, first:last], hidden[:, first:last], tapped, torch.tensor(counts))

    for head in (steady, rested):
        head.start(states(0, [4, 4]), 32)
        head.propose(ids[:, 4], Budget(4))
    steady.observe(states(4, [2, 2]))
    steady.propose(ids[:, 6], Budget(4))
    steady.observe(states(6, [3, 3]))
    for first, counts in ((4, [2, 2]), (6, [3, 3])):
        rested.observe(states(first, counts))
    ours, theirs = (head.propose(ids[:, 9], Budget(8)) for head in (rested, steady))
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.log_q, theirs.log_q, atol=1e-5, rtol=1e-5)


def test_states_of_ragged_rows_are_joined_behind_each_rows_last() -> None:
    def states(tokens: list[list[int]], counts: list[int]) -> TargetStates:
        ids = torch.tensor(tokens)
        return TargetStates(ids, ids[..., None].float(), None, torch.tensor(counts))

    pieces = [states([[1, 2, 0], [3, 0, 0]], [2, 1]), states([[4, 0], [5, 6]], [1, 2]), states([[7], [0]], [1, 0])]
    joined = TargetStates.joined(pieces)
    assert joined.counts.tolist() == [4, 3]
    assert joined.tokens[0].tolist() == [1, 2, 4, 7]
    assert joined.tokens[1, :3].tolist() == [3, 5, 6]
    assert joined.hidden[..., 0].tolist() == joined.tokens.tolist()
    alone = TargetStates.joined([piece.select_rows(torch.tensor([1])) for piece in pieces])
    assert alone.tokens.tolist() == [[3, 5, 6]]


@pytest.mark.parametrize("family", sorted(HEADS))
def test_at_batch_one_on_a_cpu_a_seed_gives_its_text_whatever_the_trees_are(family: str) -> None:
    """Under the walk, which planned trees are verified by, every token takes one draw, however it came about."""
    target = tiny_target()
    model = SpeculativeModel(target, tiny_head(family, target))
    settings = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.3, "top_k": 0, "rule": "walk"}
    texts = [
        model.generate(
            **padded(FOUR[1:2]), nodes=nodes, generator=torch.Generator().manual_seed(5), **settings
        ).tolist()
        for nodes in (1, 3, 16, "auto")
    ]
    assert all(text == texts[0] for text in texts)
