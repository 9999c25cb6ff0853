"""Losses: one pure function each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
