"""A finished head trained further on logged traffic: it learns, and takes the old one's place only if it is as good."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import padded, tiny_head, tiny_model
from workshop import make_workshop, recipe

import mtp
import train.gate
from mtp.drafters import NgramDrafter
from mtp.heads import HEADS
from mtp.stats import AcceptanceStats
from mtp.target import Target
from mtp.traffic import TrafficLog, TrafficRow
from train import heads as program
from train.config import ConfigError, RunConfig, StartConfig
from train.data import DataError, Row
from train.gate import compare, put_in_place
from train.recipe import load_config
from train.traffic import CATEGORY, SETTLED, as_row, fixed_rows, mix, take_turns

TRAFFIC_START = 20  # the traffic's prompts begin with this token, and the workshop's do not


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its answers, a head that has learnt next to nothing, a better one, and a log of traffic."""
    folder = make_workshop(tmp_path_factory.mktemp("workshop"))
    for name, *options in (
        ("weak", "optim.epochs=1", "optim.lr=1e-6", "head.warm_start_positions=0"),
        ("good", "optim.epochs=4"),
    ):
        program.main(recipe(folder, folder / name, "head.draft_vocab_size=null", *options))
    target = mtp.load(folder / "weak" / "best").target
    model = mtp.SpeculativeModel(target, NgramDrafter())
    with TrafficLog(folder / "traffic", target, context=None) as log:
        for _ in range(3):  # what is asked in use comes again
            model.generate(**padded(asked_in_use()), max_new_tokens=16, do_sample=False, traffic=log)
    return folder


def asked_in_use(count: int = 12, seed: int = 1) -> list[list[int]]:
    """Prompts that the workshop has no answers to."""
    generator = torch.Generator().manual_seed(seed)
    return [[TRAFFIC_START, *torch.randint(12, 24, (5,), generator=generator).tolist()] for _ in range(count)]


def link_to(head: Path, link: Path) -> Path:
    link.symlink_to(head)
    return link


def further(workshop: Path, output: Path, head: Path, *overrides: str) -> list[str]:
    """The recipe of a run that goes on from ``head``."""
    return recipe(
        workshop,
        output,
        f"start.head={head}",
        "head.draft_vocab_size=null",
        "optim.lr=1e-3",
        "eval.rows=100",
        *overrides,
    )


def tau_on_traffic(head: Path) -> float:
    """Mean accepted length on the log's prompts."""
    output = mtp.load(head).generate(
        **padded(asked_in_use()), max_new_tokens=12, do_sample=False, nodes=8, return_dict_in_generate=True
    )
    return output.acceptance.mean_accepted_length


def test_a_head_follows_the_traffic_and_takes_the_old_ones_place(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = workshop / "weak" / "best"
    link = link_to(old, tmp_path / "served")
    arguments = further(
        workshop,
        tmp_path / "run",
        link,
        f"start.traffic={workshop / 'traffic'}",
        "start.replace=true",
        "optim.epochs=10",
    )
    program.main(arguments)
    assert tau_on_traffic(tmp_path / "run" / "best") > tau_on_traffic(old) + 0.3
    gate = json.loads((tmp_path / "run" / "gate.json").read_text())
    assert gate["passes"]
    assert gate["after"] >= gate["before"]
    assert link.resolve() == (tmp_path / "run" / "best").resolve()
    assert mtp.load(link).generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    assert mtp.load(old) is not None  # the old head is where it was
    assert re.search(r"mean accepted length on \d+ fixed held-out prompts: .* before, .* now", capsys.readouterr().out)
    measured = json.loads((tmp_path / "run" / "best" / "acceptance.json").read_text())
    assert CATEGORY in measured["categories"]
    with pytest.raises(SystemExit, match="a run that has replaced the head is done"):
        program.main(arguments)


def test_a_worse_head_leaves_the_old_one_in_place(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = workshop / "good" / "best"
    link = link_to(old, tmp_path / "served")
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    program.main(further(workshop, tmp_path / "run", link, "start.replace=true", "optim.epochs=1", "optim.lr=1.0"))
    gate = json.loads((tmp_path / "run" / "gate.json").read_text())
    assert not gate["passes"]
    assert gate["after"] < gate["before"]
    assert link.resolve() == old.resolve()
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before
    assert "The new head does not pass" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_with_the_traffic_of_its_beginning(workshop: Path, tmp_path: Path) -> None:
    traffic = tmp_path / "traffic"
    target = mtp.load(workshop / "good" / "best").target
    with TrafficLog(traffic, target, context=None) as log:
        log.add(asked_in_use(20, 5), asked_in_use(20, 6), [[False] * 6] * 20, {"do_sample": False})
    arguments = further(workshop, tmp_path / "run", workshop / "good" / "best", f"start.traffic={traffic}")
    trainer = program.build_trainer(load_config(arguments))
    step = trainer._step

    def interrupt(batches: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return step(batches)

    trainer._step = interrupt  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        trainer.run()
    with TrafficLog(traffic, target, context=None) as log:
        log.add(asked_in_use(20, 7), asked_in_use(20, 8), [[False] * 6] * 20, {"do_sample": False})
    resumed = program.build_trainer(load_config(arguments))
    assert resumed.train.rows == trainer.train.rows
    assert len(program.build_trainer(load_config([*arguments, "resume=none"])).train.rows) > len(trainer.train.rows)


def test_a_dry_run_tries_it_out_and_leaves_nothing_behind(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = link_to(workshop / "good" / "best", tmp_path / "served")
    traffic = f"start.traffic={workshop / 'traffic'}"
    program.main(further(workshop, tmp_path / "run", link, traffic, "start.replace=true", "dry_run=true"))
    assert "all in order" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("*"))
    assert link.resolve() == (workshop / "good" / "best").resolve()


@pytest.mark.parametrize("family", sorted(HEADS))
def test_heads_of_all_families_are_continued_from_their_weights(family: str, workshop: Path, tmp_path: Path) -> None:
    target = Target(mtp.load(workshop / "good" / "best").target.causal_lm)
    mtp.save_checkpoint(tmp_path / "head", tiny_head(family, target, seed=5))
    saved = mtp.load_head(tmp_path / "head", target)
    steps = saved.config.steps
    overrides = (f"head.family={family}", f"head.steps={steps}")
    trainer = program.build_trainer(load_config(further(workshop, tmp_path / "run", tmp_path / "head", *overrides)))
    trainer.begin()
    weights = trainer.head.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in saved.state_dict().items())
    trainer._step(next(trainer.order.steps(trainer.step_batches)))
    assert any(not torch.equal(value, weights[name]) for name, value in saved.state_dict().items())


# What is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head.family=medusa"], r"another head than the recipe's: family 'eagle3' there, 'medusa' here"),
        (["head.steps=2"], "steps 3 there, 2 here"),
        (["head.draft_vocab_size=20"], "draft_vocab_size 24 there, 20 here"),
        (["head.sizes={intermediate_size: 8}"], "intermediate_size .* there, 8 here"),
        (["start.head=/nowhere"], r"start\.head: No config\.json in /nowhere"),
        (["start.replace=true"], r"is no symbolic link.*mv .* && ln -s best-1"),
        (["start.head=null", "start.replace=true"], "there is no head to replace"),
        (["target.adapter.rank=2"], "heads of an adapted target"),
        (["start.traffic=/nowhere"], r"start\.traffic: No logged answers in /nowhere"),
        (["start.traffic=TRAFFIC", "start.traffic_share=0"], r"traffic_share: found 0\.0, expected more than 0"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_training(
    overrides: list[str], message: str, workshop: Path, tmp_path: Path
) -> None:
    overrides = [override.replace("TRAFFIC", str(workshop / "traffic")) for override in overrides]
    with pytest.raises((ConfigError, DataError), match=message):
        program.build_trainer(load_config(further(workshop, tmp_path / "run", workshop / "good" / "best", *overrides)))


def test_a_head_or_a_log_of_another_target_is_refused(workshop: Path, tmp_path: Path) -> None:
    other = Target(tiny_model(seed=2))
    mtp.save_checkpoint(tmp_path / "head", tiny_head("eagle3", other))
    with pytest.raises(ConfigError, match=r"start\.head: .* fingerprint .* differ"):
        program.build_trainer(load_config(further(workshop, tmp_path / "run", tmp_path / "head")))
    with TrafficLog(tmp_path / "traffic", other) as log:
        log.add([[1]], [[1] * 40], [[False] * 40], {"do_sample": False})
    arguments = recipe(workshop, tmp_path / "run", f"start.traffic={tmp_path / 'traffic'}")
    with pytest.raises(DataError, match=r"start\.traffic: .* fingerprint .* differ"):
        program.build_trainer(load_config(arguments))


# Rows


def test_an_answer_without_its_prompt_is_trained_on_where_it_speaks_for_itself() -> None:
    header, answer = (7, 8), tuple(range(1, 41))
    flags = (False,) * 40

    def row(context: Sequence[int], whole: bool) -> Row | None:
        return as_row(TrafficRow(answer, flags, tuple(context), whole, {}), header)

    assert row((), False) == Row(header + answer[:SETTLED], answer[SETTLED:], CATEGORY)
    assert row((3,) * 10, False) == Row((3,) * 10 + answer[: SETTLED - 10], answer[SETTLED - 10 :], CATEGORY)
    assert row((3,) * 50, False) == Row((3,) * 50, answer, CATEGORY)
    assert row((3,), True) == Row((3,), answer, CATEGORY)
    assert as_row(TrafficRow(answer[:SETTLED], flags[:SETTLED], (), False, {}), header) is None


def test_logged_and_distilled_rows_are_mixed_by_trained_tokens(caplog: pytest.LogCaptureFixture) -> None:
    distilled = [Row((1,), (2,) * (at % 5 + 1)) for at in range(200)]
    logged = [Row((1,), (3,) * 10, CATEGORY)] * 6
    for share, expected in ((0.5, 60), (0.25, 180), (1.0, 0)):
        mixed = mix(distilled, logged, share, seed=0)
        old = [row for row in mixed if row.category != CATEGORY]
        assert expected <= sum(len(row.response_ids) for row in old) < expected + 5
        assert len(mixed) - len(old) == 6
    assert not caplog.text
    assert len(mix(distilled[:3], logged, 0.5, seed=0)) == 9
    assert "too few distilled rows: it is 0.91" in caplog.text


def test_the_first_held_out_rows_are_of_both_kinds_and_the_gate_sees_one_of_them() -> None:
    distilled, logged = [Row((1,), (at,)) for at in range(4)], [Row((2,), (at,), CATEGORY) for at in range(2)]
    rows = take_turns(distilled, logged)
    assert [row.category == CATEGORY for row in rows] == [False, True, False, True, False, False]
    assert fixed_rows(rows) == distilled


# The gate


def passes_of(counts: Sequence[int]) -> list[AcceptanceStats]:
    """Counters of answers of 60 tokens in so many passes each."""
    return [AcceptanceStats(committed_tokens=60, target_passes=count) for count in counts]


OLD = [30, 20, 40, 25, 35, 30, 22, 38] * 8


@pytest.mark.parametrize(
    ("new", "passes"),
    [
        (OLD, True),
        ([count - 2 for count in OLD], True),
        ([count + 1 for count in OLD], False),  # a little worse, everywhere
        ([count + (20 if at == 0 else 0) for at, count in enumerate(OLD)], False),  # much worse, once
        (
            [count + (9 if at % 2 else -10) for at, count in enumerate(OLD)],
            False,
        ),  # better by luck, as far as one knows
        ([count + (1 if at % 2 else -2) for at, count in enumerate(OLD)], True),
    ],
)
def test_the_bar_is_on_the_new_head(new: list[int], passes: bool) -> None:
    config = RunConfig(start=StartConfig(gate_tolerance=0.02))
    comparison = compare(passes_of(OLD), passes_of(new), config)
    assert comparison.passes == passes
    assert comparison.lowest <= comparison.change + 1e-9
    assert comparison == compare(passes_of(OLD), passes_of(new), config)


def test_a_wider_tolerance_needs_fewer_questions() -> None:
    new = passes_of([count + (9 if at % 2 else -10) for at, count in enumerate(OLD)])
    narrow = compare(passes_of(OLD), new, RunConfig())
    assert replace(narrow, tolerance=0.2).passes


@pytest.mark.parametrize("moment", ["before the link is made", "before it takes the old one's place", "behind it"])
def test_a_replacement_that_is_cut_short_leaves_one_of_the_two(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "config.json").write_text(folder.name)
    link = link_to(old, tmp_path / "served")
    real = os.replace

    def killed(*arguments: Any, **_: Any) -> None:
        if moment == "behind it":
            real(*arguments)
        raise KeyboardInterrupt

    if moment == "before the link is made":
        monkeypatch.setattr(Path, "symlink_to", killed)
    else:
        monkeypatch.setattr(train.gate.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        put_in_place(link, old, new)
    expected = "new" if moment == "behind it" else "old"
    assert (link / "config.json").read_text() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "served"]


def test_a_head_that_another_run_has_put_in_place_is_not_overwritten(tmp_path: Path) -> None:
    for name in ("old", "new", "other"):
        (tmp_path / name).mkdir()
    link = link_to(tmp_path / "other", tmp_path / "served")
    with pytest.raises(DataError, match="when the heads were compared"):
        put_in_place(link, tmp_path / "old", tmp_path / "new")
    assert link.resolve() == tmp_path / "other"
