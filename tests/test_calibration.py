"""Confidences against what the target said: counted, fitted, kept in the checkpoint, and used."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from tiny import FOUR, padded, tiny_head, tiny_target

import mtp
from mtp.model import SpeculativeModel
from mtp.planner import RoundReport
from mtp.stats import FEWEST, WINDOW, Drift
from train.calibrate import CLIP, Reliability, Watching, fit_logistic


@pytest.mark.parametrize(("offset", "slope"), [(0.0, 1.0), (-1.0, 0.7), (0.5, 1.3)])
def test_a_curve_is_found_again(offset: float, slope: float) -> None:
    generator = torch.Generator().manual_seed(0)
    confidences = torch.rand(20_000, generator=generator).clamp(0.01, 0.99)
    truth = torch.sigmoid(offset + slope * torch.logit(confidences))
    found = fit_logistic(confidences, torch.rand(20_000, generator=generator) < truth)
    assert found == pytest.approx((offset, slope), abs=0.08)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_curve_of_one_outcome_stays_finite(accepted: bool) -> None:
    offset, slope = fit_logistic(torch.linspace(0.1, 0.9, 50), torch.full((50,), accepted))
    assert (offset > 0) == accepted
    assert abs(slope) < 10


@pytest.mark.parametrize("wrong", [0, 10, 22, 35, 200])
@pytest.mark.parametrize("seed", range(3))
def test_sure_guesses_that_were_wrong_leave_a_curve_that_fits(wrong: int, seed: int) -> None:
    """Such guesses come with loops in a text; a fit that flew off once took the surest guesses for the least likely."""
    generator = torch.Generator().manual_seed(seed)
    confidences = torch.cat([torch.rand(700, generator=generator) ** 3, torch.full((35,), 0.9999)])
    accepted = torch.rand(735, generator=generator) < confidences
    accepted[700 : 700 + min(wrong, 35)] = False
    accepted[: max(wrong - 35, 0)] = False
    with torch.no_grad():  # as in an evaluation
        offset, slope = fit_logistic(confidences, accepted)
    assert slope >= (0.35 if wrong <= 35 else 0.1)

    def loss(offset: float, slope: float) -> float:
        logits = offset + slope * torch.logit(confidences.double(), eps=CLIP)
        likely = torch.nn.functional.binary_cross_entropy_with_logits(logits, accepted.double(), reduction="sum")
        return float(likely) + (offset**2 + (slope - 1) ** 2) / 2

    best = loss(offset, slope)
    for nearby in (
        (offset + 0.02, slope),
        (offset - 0.02, slope),
        (offset, slope + 0.02),
        (offset, max(slope - 0.02, 0.1)),
    ):
        assert best <= loss(*nearby) + 1e-6


def test_depths_that_are_seldom_reached_share_a_curve() -> None:
    rng, reliability = random.Random(0), Reliability()
    for depth, guesses in ((1, 400), (2, 300), (3, 90), (4, 30)):
        for _ in range(guesses):
            confidence = rng.random()
            reliability.add(depth, confidence, rng.random() < confidence)
    assert len(reliability.fit()) == 3
    assert len(reliability.table()) == 4
    assert sum(row["guesses"] for row in reliability.table()[0]) == 400
    assert Reliability().fit() == ()


def test_guesses_are_counted_where_their_parent_was_accepted() -> None:
    """Of the tree's guesses exactly those are put to the test that the target had an answer to."""
    target = tiny_target()
    head = tiny_head("eagle3", target)
    planner = Watching(nodes=8)
    out = SpeculativeModel(target, head).generate(
        **padded(FOUR), max_new_tokens=20, do_sample=False, planner=planner, return_dict_in_generate=True
    )
    stats, counted = out.acceptance, planner.reliability
    accepted = sum(map(sum, counted.accepted))
    # The last block of a row may be cut by the length limit after it was verified.
    kept = sum(count * rounds for count, rounds in stats.histogram.items())
    assert kept <= accepted <= kept + 4 * 6
    assert len(counted.accepted[0]) >= stats.target_passes


def test_a_calibrated_head_changes_what_is_drafted_and_not_what_is_said(tmp_path: Path) -> None:
    target = tiny_target()
    head = tiny_head("eagle3", target)
    plain = target.causal_lm.generate(**padded(FOUR), max_new_tokens=12, do_sample=False)
    before = SpeculativeModel(target, head).generate(**padded(FOUR), max_new_tokens=12, do_sample=False)
    head.set_calibration(((-2.0, 0.5), (1.0, 1.0)))
    mtp.save_checkpoint(tmp_path / "head", head, acceptance={"mean_accepted_length": 2.5, "calibration": {}})
    loaded = mtp.load(tmp_path / "head", target=target)
    assert tuple(map(tuple, loaded.drafter.config.calibration)) == ((-2.0, 0.5), (1.0, 1.0))
    assert loaded.drift.expected == 2.5
    after = loaded.generate(**padded(FOUR), max_new_tokens=12, do_sample=False)
    assert before.tolist() == after.tolist() == plain.tolist()


def test_worths_are_calibrated_probabilities_along_the_path() -> None:
    target = tiny_target()
    head = tiny_head("eagle3", target)
    head.set_calibration(((-1.0, 0.5), (0.5, 1.0)))
    seen = []

    class Looking(Watching):
        def learn(self, report: RoundReport) -> None:
            seen.append(report.tree)

    SpeculativeModel(target, head).generate(**padded(FOUR), max_new_tokens=6, do_sample=False, planner=Looking(8))
    tree = seen[-1]
    for row in range(tree.batch_size):
        for node in range(1, tree.num_nodes):
            parent, depth = int(tree.parents[row, node]), int(tree.depths[row, node])
            offset, slope = ((-1.0, 0.5), (0.5, 1.0))[min(depth, 2) - 1]
            share = torch.sigmoid(offset + slope * torch.logit(tree.log_q[row, node].exp(), eps=1e-6))
            assert float(tree.worth[row, node]) == pytest.approx(float(tree.worth[row, parent] * share), rel=1e-3)


# ---- drift --------------------------------------------------------------------------------------------------------


def test_a_warning_is_given_once_when_acceptance_falls_off() -> None:
    drift = Drift(expected=3.0)
    for _ in range(FEWEST - 1):
        drift.record(1, promised=3.0)
    assert drift.recent is drift.warning() is None, "too few rounds to tell"
    drift.record(1, promised=3.0)
    assert drift.recent == 1.0
    assert "fallen to 1.00 where 3.00 was promised" in drift.warning()
    assert drift.warning() is None
    for _ in range(1000):
        drift.record(3, promised=3.0)
    assert drift.warning() is None
    for _ in range(1000):
        drift.record(1, promised=3.0)
    assert drift.warning() is not None, "it had recovered"


def test_what_is_measured_and_what_is_seen_of_late_stand_side_by_side() -> None:
    assert Drift(None).to_dict() is None
    drift = Drift(expected=3.0)
    assert drift.to_dict() == {"measured": 3.0, "recent": None, "promised": None, "rounds": 0, "fallen": False}
    for _ in range(FEWEST):
        drift.record(1, promised=2.0)
    assert drift.to_dict() == {"measured": 3.0, "recent": 1.0, "promised": 2.0, "rounds": FEWEST, "fallen": True}
    for _ in range(1000):
        drift.record(2, promised=2.0)
    assert drift.to_dict() == {"measured": 3.0, "recent": 2.0, "promised": 2.0, "rounds": WINDOW, "fallen": False}


def test_small_trees_are_not_taken_for_a_drift() -> None:
    drift = Drift(expected=3.0)
    for _ in range(1000):
        drift.record(2, promised=1.9)
    assert drift.warning() is None


def test_a_head_that_does_worse_than_measured_says_so(caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    head = tiny_head("eagle3", target)
    head.set_calibration(((4.0, 1.0),))  # nearly sure of everything
    model = SpeculativeModel(target, head, expected_length=5.0)
    out = model.generate(**padded(FOUR), max_new_tokens=60, do_sample=False, return_dict_in_generate=True)
    assert any("was measured at 5.00" in note for note in out.acceptance.notes)
    assert "was measured at 5.00" in caplog.text
    assert model.drift.recent == pytest.approx(out.acceptance.mean_accepted_length, rel=0.2)
    shown = json.loads(json.dumps(out.acceptance.to_dict()))["drift"]
    assert shown["measured"] == 5.0
    assert shown["fallen"]
    assert shown["recent"] == pytest.approx(model.drift.recent, abs=1e-4)
    other = model.generate(**padded(FOUR), max_new_tokens=4, drafter="ngram", return_dict_in_generate=True)
    assert other.acceptance.drift is None, "what another drafter does says nothing about the head"
