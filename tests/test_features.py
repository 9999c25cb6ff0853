"""Hidden states for training: the precision they are computed in."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model

from mtp.target import Target
from train.config import ConfigError
from train.data import Row
from train.features import OnlineFeatures, resolve_dtype


def target_in(dtype: torch.dtype) -> Target:
    return Target(tiny_model("llama").to(dtype))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_float32_target_computes_in_every_precision(name: str) -> None:
    target = target_in(torch.float32)
    dtype = resolve_dtype(name, target)
    assert dtype == getattr(torch, name)
    row = Row(prompt_ids=[3, 5, 7], response_ids=[2, 4])
    exact, states = (OnlineFeatures(target, [row], (1,), kind).batch([0]) for kind in (torch.float32, dtype))
    assert states.hidden.dtype == torch.float32
    assert torch.equal(states.hidden, exact.hidden) == (name == "float32")
    torch.testing.assert_close(states.hidden, exact.hidden, rtol=0.1, atol=0.1)


def test_the_targets_own_precision_may_be_named() -> None:
    assert resolve_dtype("bfloat16", target_in(torch.bfloat16)) == torch.bfloat16
    assert resolve_dtype("auto", target_in(torch.float16)) == torch.float16


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_precision_that_a_narrow_target_cannot_give_is_refused(name: str) -> None:
    message = rf"features\.dtype: found {name}, but the target is loaded in bfloat16.*target\.dtype={name}"
    with pytest.raises(ConfigError, match=message):
        resolve_dtype(name, target_in(torch.bfloat16))
