"""Losses between a head's guess and what the target says: one pure function each, and mixtures of them.

Shapes: M predictions, V tokens of the draft vocabulary, H hidden.  Each function gives one value a prediction, ``[M]``.
p is the target's distribution over the draft vocabulary, q = softmax(logits) the head's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.heads import Prediction

LossName = Literal[
    "soft_cross_entropy",
    "forward_kl",
    "hard_cross_entropy",
    "total_variation",
    "negative_log_acceptance",
    "top_k",
    "smooth_l1",
]
BLOCK_ON_CPU, BLOCK = 2**19, 2**27  # entries of [M, V] that are worked on together
OUTSIDE = -1  # label of a token that the draft vocabulary does not hold


def full_precision(x: Tensor) -> Tensor:
    """Half-precision values as float32; sums over a vocabulary lose too much in less."""
    return x.float() if x.dtype.itemsize < 4 else x


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Cross-entropy against the target's own distribution, ``-sum p log q``.

    Its gradient is that of the forward KL divergence KL(target || head), which bounds the total variation between the
    two from above (Pinsker), and one minus that is the probability of acceptance (Leviathan et al., arXiv 2211.17192).

    Args:
        logits: ``[M, V]`` of the head.
        target_probs: ``[M, V]`` of the target, over the same vocabulary.

    Returns:
        ``[M]``.
    """
    loss: Tensor = _SoftCrossEntropy.apply(logits, target_probs)
    return loss


def forward_kl(logits: Tensor, target_probs: Tensor) -> Tensor:
    """KL(target || head), ``sum p log(p / q)``: soft cross-entropy less the target's entropy.

    The same gradients, but a loss of zero means a perfect head, so that positions and data sets can be compared.
    """
    return soft_cross_entropy(logits, target_probs) - torch.special.entr(target_probs).sum(-1)


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """``-log q(label)``, as Medusa-1 trains (Cai et al., arXiv 2401.10774).

    Args:
        labels: ``[M]`` index of the text's token in the draft vocabulary; ``OUTSIDE`` where that does not hold it, for
            which the loss is zero: no weights of the head could guess it.
    """
    return F.cross_entropy(full_precision(logits), labels, ignore_index=OUTSIDE, reduction="none")


def total_variation(logits: Tensor, target_probs: Tensor) -> Tensor:
    """``sum |p - q| / 2``: exactly the probability that a token drawn from the head is refused.

    Leviathan et al., arXiv 2211.17192.  Bounded, so that positions which nobody could guess do not lead the training;
    but where p and q have nothing in common its gradient vanishes.
    """
    return (target_probs - full_precision(logits).softmax(-1)).abs().sum(-1) / 2


def negative_log_acceptance(logits: Tensor, target_probs: Tensor) -> Tensor:
    """``-log sum min(p, q)``: minus the logarithm of the probability that a drawn token is accepted.

    Samarin et al. (LK losses), arXiv 2602.23881.  The gradient of the total variation, divided by the acceptance: it
    does not vanish where the two have little in common.
    """
    accepted = torch.minimum(target_probs, full_precision(logits).softmax(-1)).sum(-1)
    return -torch.log(accepted.clamp_min(torch.finfo(accepted.dtype).tiny))


def top_k(logits: Tensor, target_probs: Tensor, k: int = 10) -> Tensor:
    """Soft cross-entropy over the target's k likeliest tokens alone, ``-sum_{top k of p} p log q``.

    HASS (Zhang et al., arXiv 2408.15766), in addition to another loss: what is accepted is decided by these tokens.
    """
    best = target_probs.topk(min(k, target_probs.shape[-1]), dim=-1)
    scores = full_precision(logits)
    log_q = scores.gather(-1, best.indices) - scores.logsumexp(-1, keepdim=True)
    return -(best.values * log_q).sum(-1)


def smooth_l1(estimate: Tensor, hidden: Tensor) -> Tensor:
    """Huber's loss between hidden states, mean over dimensions: quadratic for errors below 1, linear above.

    EAGLE's feature regression (Li et al., arXiv 2401.15077).

    Args:
        estimate: ``[M, H]`` the head's.
        hidden: ``[M, H]`` the target's.
    """
    return F.smooth_l1_loss(full_precision(estimate), full_precision(hidden), reduction="none").mean(-1)


@dataclass(frozen=True)
class Labels:
    """What the target says where a head predicts.

    Attributes:
        probs: ``[M, V']`` its distribution over the batch's vocabulary (``Head.vocabulary``).
        tokens: ``[M]`` the text's tokens, as indices into that; ``OUTSIDE`` for those that cannot be guessed there.
        hidden: ``[M, H]`` its last hidden states.
    """

    probs: Tensor
    tokens: Tensor
    hidden: Tensor


def mixture(weights: Mapping[LossName, float], prediction: Prediction, labels: Labels) -> Tensor:
    """``[M]`` the weighted sum of the losses that ``weights`` names."""
    parts = [weight * _loss(name, prediction, labels) for name, weight in weights.items() if weight]
    return torch.stack(parts).sum(0)


def _loss(name: LossName, prediction: Prediction, labels: Labels) -> Tensor:
    if name == "hard_cross_entropy":
        return hard_cross_entropy(prediction.logits, labels.tokens)
    if name == "smooth_l1":
        assert prediction.hidden is not None  # what makes no estimate is refused before training
        return smooth_l1(prediction.hidden, labels.hidden)
    return DISTRIBUTION_LOSSES[name](prediction.logits, labels.probs)


DISTRIBUTION_LOSSES = {
    "soft_cross_entropy": soft_cross_entropy,
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "top_k": top_k,
}


def step_weights(setting: float | Sequence[float], steps: int) -> list[float]:
    """What each unrolled step counts, summing to one: ``setting ** i`` for a number, else the weights themselves."""
    weights = [setting**step for step in range(steps)] if isinstance(setting, float) else list(setting[:steps])
    return [weight / sum(weights) for weight in weights]


class _SoftCrossEntropy(torch.autograd.Function):
    """``logsumexp(z) - p . z`` with its gradient ``softmax(z) - p``, both from one look at the scores.

    Left to autograd, the same loss makes eight passes over ``[M, V]`` and keeps three copies of it; on a CPU these cost
    as much time as the head's own products.  Here a block of rows goes through all passes while it is in the cache, and
    what is kept is the gradient itself: neither the logits nor the target's distribution are needed again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_probs: Tensor) -> Tensor:
        wants_gradient = ctx.needs_input_grad[0]
        # Narrow as the logits: what flows back is rounded to them anyway.  In float16, which loss scaling keeps from
        # underflow only behind this point, small differences would be lost.
        precision = torch.float32 if logits.dtype == torch.float16 else logits.dtype
        gradient = torch.empty_like(logits, dtype=precision) if wants_gradient else logits.new_empty(0)
        losses = target_probs.new_empty(len(logits))
        for rows in _blocks(logits):
            scores, probs = full_precision(logits[rows]), target_probs[rows]
            guessed, mass = scores.softmax(-1), probs.sum(-1)
            # The likeliest token has at least the probability 1 / V, so that this logarithm is exact.
            log_total = scores.amax(-1) - guessed.amax(-1).log()
            losses[rows] = log_total * mass - torch.linalg.vecdot(probs, scores)
            if wants_gradient:
                gradient[rows] = guessed.mul_(mass[:, None]).sub_(probs)
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        (outer,) = gradients
        # Rounded as it is written: a copy in full precision would be twice as large.
        return torch.mul(difference, outer[:, None], out=torch.empty_like(difference, dtype=ctx.dtype)), None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Rows of ``logits [M, V]`` in blocks: on a CPU so small that they stay in its cache, elsewhere large."""
    entries = BLOCK_ON_CPU if logits.device.type == "cpu" else BLOCK
    rows = max(1, entries // logits.shape[-1])
    for first in range(0, len(logits), rows):
        yield slice(first, first + rows)


def confidence_loss(prediction: Prediction, labels: Labels, guesses: int = 4) -> Tensor:
    """``[M]`` how well a head knows which of its guesses will be accepted; zeros for one without a confidence output.

    Binary cross-entropy of each of its likeliest guesses being the token that came; the probability it holds to is its
    own, moved by its confidence output.  No gradient flows into the guesses themselves.
    """
    if prediction.confidence is None:
        return prediction.logits.new_zeros(len(prediction.logits), dtype=torch.float32)
    logits = full_precision(prediction.logits.detach())
    best = logits.log_softmax(-1).topk(min(guesses, logits.shape[-1]), dim=-1)
    doubted = torch.logit(best.values.exp(), eps=1e-6) + full_precision(prediction.confidence)[:, None]
    came = (best.indices == labels.tokens[:, None]).to(doubted)
    return F.binary_cross_entropy_with_logits(doubted, came, reduction="none").mean(-1)
