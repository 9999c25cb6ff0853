"""Where two greedy answers part, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mtp.model import SpeculativeModel
from serve.systems import DRAFTED, TRANSFORMERS, Decoding, run_system

# In units in the last place of the largest logit; twice what was seen.  With SmolLM2-135M, one pass over a text and a
# pass a token differ in the margins between a position's first five tokens by up to 3.5 units in bfloat16, and by up to
# 19 of the far smaller units of float32, where the sums themselves are rounded to the unit as well.
ROUNDING_UNITS = 8
ROUNDING_UNITS_FLOAT32 = 40


def first_divergence(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first position at which two answers differ, the end of the shorter one included; None if they are equal."""
    if list(expected) == list(found):
        return None
    shared = min(len(expected), len(found))
    return next((at for at in range(shared) if expected[at] != found[at]), shared)


@torch.no_grad()
def plain_logits(model: SpeculativeModel, prefix: Sequence[int]) -> Tensor:
    """``[V]``: what the plain target says behind a text, in its own dtype, from one pass over all of it."""
    tokens = torch.tensor([list(prefix)], device=model.target.device)
    logits: Tensor = model.target.causal_lm(input_ids=tokens, logits_to_keep=1).logits[0, -1]
    return logits


def rounding_of(logits: Tensor) -> float:
    """The margin between two of ``logits [V]`` that rounding can turn around.

    It is some units in the last place of the largest logit: the size of the hidden state, not of one logit, sets the
    error.  The hidden state is rounded at every layer, and passes over other numbers of tokens sum in
    another order.
    """
    largest = float(logits.abs().max())
    if largest == 0:
        return 0.0
    units = ROUNDING_UNITS_FLOAT32 if logits.dtype == torch.float32 else ROUNDING_UNITS
    return float(units * torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(largest)))


def divergence(
    model: SpeculativeModel, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]
) -> dict[str, Any] | None:
    """Where ``found`` leaves ``expected``; None if it does not.

    Returns:
        ``position``, the tokens ``expected`` and ``found`` there (None: the answer had ended), the ``logit_margin`` by
        which the plain target prefers the expected one, the ``rounding`` that could turn such a margin around, and
        whether it is ``within_rounding``: a near-tie.  An answer that merely ends early or late is never one.
    """
    at = first_divergence(expected, found)
    if at is None:
        return None
    right, wrong = (ids[at] if at < len(ids) else None for ids in (expected, found))
    entry = {"position": at, "expected": right, "found": wrong}
    if right is None or wrong is None:
        return {**entry, "logit_margin": None, "rounding": None, "within_rounding": False}
    logits = plain_logits(model, [*prompt, *expected[:at]])
    margin, rounding = float(logits[right].double() - logits[wrong].double()), rounding_of(logits)
    return {**entry, "logit_margin": margin, "rounding": rounding, "within_rounding": abs(margin) <= rounding}


def compare_answers(
    model: SpeculativeModel, prompts: Sequence[tuple[str, list[int]]], decoding: Decoding, batch_sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Drafted greedy answers, in batches of several sizes, beside ``transformers``' answers one by one.

    Args:
        prompts: ``(name, token ids)``.

    Returns:
        For every batch size and prompt: ``batch_size``, ``name`` and ``divergence``, which is None for equal answers.
    """
    expected = [
        run_system(model, TRANSFORMERS, [ids], decoding).answers[0].ids
        for _, ids in tqdm(prompts, desc="transformers", unit="prompt")
    ]
    entries = []
    for size in batch_sizes:
        for start in tqdm(range(0, len(prompts), size), desc=f"drafted, batches of {size}", unit="batch"):
            chunk = prompts[start : start + size]
            outcome = run_system(model, DRAFTED, [ids for _, ids in chunk], decoding)
            for (name, ids), answer, reference in zip(chunk, outcome.answers, expected[start:], strict=False):
                difference = divergence(model, ids, reference, answer.ids)
                entries.append({"batch_size": size, "name": name, "divergence": difference})
    return entries
