"""Losses: their gradients, where their minimum is, and what each of them means."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from mtp.heads import Prediction
from train.losses import (
    DISTRIBUTION_LOSSES,
    OUTSIDE,
    Labels,
    LossName,
    forward_kl,
    hard_cross_entropy,
    mixture,
    negative_log_acceptance,
    smooth_l1,
    soft_cross_entropy,
    step_weights,
    top_k,
    total_variation,
)

VOCAB = 12
LOSS_NAMES = get_args(LossName)
LEAST_AT_EQUALITY = sorted(set(DISTRIBUTION_LOSSES) - {"top_k"})


def example(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Random logits ``[5, VOCAB]`` and target distributions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, VOCAB, generator=generator, dtype=dtype)
    return logits.requires_grad_(), (2 * torch.randn(5, VOCAB, generator=generator, dtype=dtype)).softmax(-1)


def predict(logits: Tensor, hidden: Tensor | None = None) -> Prediction:
    nothing = torch.zeros(len(logits), dtype=torch.long)
    return Prediction(logits, nothing, nothing, hidden)


def labels_for(probs: Tensor) -> Labels:
    return Labels(probs, torch.tensor([0, 3, OUTSIDE, VOCAB - 1, 5]), torch.ones(len(probs), 4, dtype=probs.dtype))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_gradients_are_those_of_finite_differences(name: LossName) -> None:
    logits, probs = example()
    # Errors of 0.25 and of 3: on both sides of the bend of smooth_l1.
    hidden = torch.full((5, 4), 1.25, dtype=torch.float64)
    hidden[:, 0] = 4.0
    hidden.requires_grad_()

    def loss(logits: Tensor, hidden: Tensor) -> Tensor:
        return mixture({name: 0.7}, predict(logits, hidden), labels_for(probs)) + 0 * (logits.sum() + hidden.sum())

    assert torch.autograd.gradcheck(loss, (logits, hidden))


@pytest.mark.parametrize("name", LEAST_AT_EQUALITY)
def test_a_loss_between_distributions_is_least_where_they_are_equal(name: LossName) -> None:
    _, probs = example()
    equal = probs.log()
    least = DISTRIBUTION_LOSSES[name](equal, probs)
    for seed in range(20):
        moved = equal + 0.1 * torch.randn(equal.shape, generator=torch.Generator().manual_seed(seed), dtype=equal.dtype)
        assert (DISTRIBUTION_LOSSES[name](moved, probs) > least).all()


@pytest.mark.parametrize("name", ["forward_kl", "total_variation", "negative_log_acceptance"])
def test_a_perfect_head_has_no_loss(name: LossName) -> None:
    _, probs = example()
    torch.testing.assert_close(DISTRIBUTION_LOSSES[name](probs.log(), probs), torch.zeros(5, dtype=probs.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_soft_cross_entropy_in_blocks_is_that_of_all_rows_at_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(40, 2**15, generator=generator)).to(dtype).requires_grad_()  # two blocks and a half
    exact = logits.detach().double().requires_grad_()
    probs = (5 * torch.randn(40, 2**15, generator=generator, dtype=torch.float64)).softmax(-1)
    weights = torch.rand(40, generator=generator)
    expected = (exact.logsumexp(-1) - (probs * exact).sum(-1)) * weights
    found = soft_cross_entropy(logits, probs.to(torch.promote_types(dtype, torch.float32))) * weights
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    for loss in (found, expected):
        loss.sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    rounding = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}.get(dtype, 1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=rounding, atol=1e-7)


def test_soft_cross_entropy_keeps_its_gradient_and_nothing_else() -> None:
    kept: list[Tensor] = []
    logits, probs = example(dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        soft_cross_entropy(logits, probs)
        soft_cross_entropy(logits.detach(), probs)
    assert [x.shape for x in kept] == [logits.shape]


def test_forward_kl_is_soft_cross_entropy_less_what_no_head_can_change() -> None:
    logits, probs = example()
    difference = soft_cross_entropy(logits, probs) - forward_kl(logits, probs)
    torch.testing.assert_close(difference, -(probs * probs.log()).sum(-1))
    one_hot = torch.eye(VOCAB, dtype=probs.dtype)[:5]
    torch.testing.assert_close(forward_kl(logits, one_hot), soft_cross_entropy(logits, one_hot))


def test_total_variation_and_negative_log_acceptance_are_about_what_is_accepted() -> None:
    logits, probs = example()
    q = logits.softmax(-1)
    # Accept a token x drawn from q with min(1, p(x) / q(x)), summed over all x.
    accepted = (q * (probs / q).clamp_max(1)).sum(-1)
    torch.testing.assert_close(total_variation(logits, probs), 1 - accepted)
    torch.testing.assert_close(negative_log_acceptance(logits, probs), -accepted.log())


def test_negative_log_acceptance_stays_finite_where_nothing_would_be_accepted() -> None:
    logits = torch.tensor([[200.0, -200.0]], requires_grad=True)
    loss = negative_log_acceptance(logits, torch.tensor([[0.0, 1.0]]))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logits.grad).all()


def test_top_k_counts_the_targets_likeliest_tokens_alone_and_is_least_at_their_share() -> None:
    logits, probs = example()
    torch.testing.assert_close(top_k(logits, probs, k=VOCAB), soft_cross_entropy(logits, probs))
    k = 3
    best = probs.topk(k).values
    kept = torch.where(probs >= best[:, -1:], probs, 0)
    torch.testing.assert_close(top_k(logits, probs, k), soft_cross_entropy(logits, kept))
    least = top_k((kept / kept.sum(-1, keepdim=True)).log(), probs, k)
    assert (top_k(logits, probs, k) > least).all()


def test_hard_cross_entropy_leaves_out_tokens_that_the_draft_vocabulary_does_not_hold() -> None:
    logits, _ = example()
    loss = hard_cross_entropy(logits, torch.tensor([0, 3, OUTSIDE, VOCAB - 1, 5]))
    assert loss[2] == 0
    torch.testing.assert_close(loss[1], -logits[1].log_softmax(-1)[3])


def test_smooth_l1_is_quadratic_near_and_linear_far() -> None:
    truth = torch.zeros(2, 1)
    torch.testing.assert_close(smooth_l1(torch.tensor([[0.5], [3.0]]), truth), torch.tensor([0.125, 2.5]))


def test_a_mixture_is_the_weighted_sum_and_leaves_out_what_has_no_weight() -> None:
    logits, probs = example()
    labels = labels_for(probs)
    found = mixture({"soft_cross_entropy": 0.1, "total_variation": 0.9, "smooth_l1": 0.0}, predict(logits), labels)
    torch.testing.assert_close(found, 0.1 * soft_cross_entropy(logits, probs) + 0.9 * total_variation(logits, probs))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_losses_of_half_precision_logits_are_summed_in_full(name: LossName) -> None:
    logits, probs = example(dtype=torch.float32)
    rounded = logits.detach().bfloat16()
    labels = labels_for(probs)
    found = mixture({name: 1.0}, predict(rounded, torch.ones(5, 4).bfloat16()), labels)
    expected = mixture({name: 1.0}, predict(rounded.float(), torch.ones(5, 4)), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_steps_count_by_a_power_or_by_weights_of_their_own() -> None:
    assert step_weights(0.5, 3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert step_weights((1.0, 0.0, 3.0), 3) == pytest.approx([0.25, 0.0, 0.75])
