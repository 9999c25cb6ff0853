"""Losses: one pure function each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def soft_cross_entropy(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Cross-entropy against the target's own distribution, one value a row.

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


class _SoftCrossEntropy(torch.autograd.Function):
    """``logsumexp(z) - p . z`` with its gradient ``softmax(z) - p`` written down.

    Left to autograd, the same loss makes eight passes over ``[M, V]`` and keeps three copies of it; on a CPU these cost
    as much time as the head's own products.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_probs: Tensor) -> Tensor:
        scores = logits.float()
        ctx.save_for_backward(logits, target_probs)
        return torch.logsumexp(scores, dim=-1) * target_probs.sum(-1) - torch.linalg.vecdot(target_probs, scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, target_probs = ctx.saved_tensors
        (gradient,) = gradients
        mass = target_probs.sum(-1, keepdim=True)
        difference = torch.softmax(logits.float(), dim=-1).mul_(mass).sub_(target_probs)
        return difference.mul_(gradient[:, None]).to(logits.dtype), None


def confidence_loss(log_probs: Tensor, ids: Tensor, confidence: Tensor, tokens: Tensor, guesses: int = 4) -> Tensor:
    """How well a head knows which of its guesses will be accepted, one value a row.

    Binary cross-entropy of each of its likeliest guesses being the token that came; the probability it holds to is its
    own, moved by its confidence output.  No gradient flows into the guesses themselves.

    Args:
        log_probs: ``[M, Vd]`` of the head, over the token ids ``ids [Vd]``.
        confidence: ``[M]`` added to the logits of the guesses' probabilities.
        tokens: ``[M]`` the tokens that came.
    """
    best = log_probs.detach().float().topk(min(guesses, log_probs.shape[-1]), dim=-1)
    logits = torch.logit(best.values.exp(), eps=1e-6) + confidence.float()[:, None]
    came = (ids[best.indices] == tokens[:, None]).float()
    return F.binary_cross_entropy_with_logits(logits, came, reduction="none").mean(-1)
