"""Losses: one pure function each."""

from __future__ import annotations

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
    return -(target_probs * torch.log_softmax(logits.float(), dim=-1)).sum(-1)
