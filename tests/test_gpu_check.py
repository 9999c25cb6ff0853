"""scripts/gpu_check.py runs through on a CPU; what it times with is right as often as it says."""

from __future__ import annotations

import pytest
import torch
from test_bench import script

from mtp.model import SpeculativeModel
from mtp.target import Target


def counting_target() -> Target:
    script("bench_passes")
    check = script("gpu_check")
    torch.manual_seed(0)
    model = check.random_llama(check.SMALL, torch.bfloat16, torch.device("cpu"))
    check.make_it_count(model)
    return Target(model)


def test_it_runs_through(capsys: pytest.CaptureFixture[str]) -> None:
    script("bench_passes")
    check = script("gpu_check")
    check.HEADS = {"medusa": check.HEADS["medusa"], "eagle3": check.HEADS["eagle3"]}
    check.main(["--new-tokens", "6", "--context", "20", "--rounds", "1", "--nodes", "8"])
    printed = capsys.readouterr().out
    for expected in ("equals that of transformers", "largest difference", "verify 64 nodes", "mtp, drafting"):
        assert expected in printed


@pytest.mark.parametrize(("probability", "expected"), [(0.0, 1.0), (0.5, 2.0), (1.0, 9.0)])
def test_the_drafter_is_right_as_often_as_asked(probability: float, expected: float) -> None:
    """With probability p a round of d guesses commits (1 - p^(d + 1)) / (1 - p) tokens."""
    target = counting_target()
    check = script("gpu_check")
    prompt = torch.arange(100, 110)[None]
    drafter = check.KnowingDrafter(torch.arange(110, 400), probability)
    out = SpeculativeModel(target, drafter).generate(
        prompt, do_sample=False, max_new_tokens=271, nodes=20, return_dict_in_generate=True
    )
    assert out.sequences[0].tolist() == list(range(100, 381))
    assert out.acceptance.mean_accepted_length == pytest.approx(expected, rel=0.15)
