"""How far confidences can be believed, learnt from what became of the guesses."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp.tree import TokenTree
from mtp.verify import Verdict

BINS, BIN_WIDTH = 8, 1.5  # of a confidence's logit: edges at 0.01, 0.05, 0.18, 0.5, 0.82, 0.95 and 0.99
FORGET = 0.98  # weight of what was known, a round later: about fifty rounds count
FAITH = 1.0  # accepted guesses' worth of belief in the confidences as they are, before any is seen
MOST = 0.99  # nothing is certain: a node is worth less than its parent


class Reliability:
    """Accepted guesses over those that were promised, by group and by confidence.

    A guess is put to the test when the text went as far as its parent, whether it was verified or only thought of: so a
    group that has fallen out of every tree is still watched, and comes back when its guesses are right again.

    Args:
        groups: kinds of guesses that are told apart.
    """

    def __init__(self, groups: int = 1):
        self.kept = torch.zeros(groups * BINS)
        self.promised = torch.zeros(groups * BINS)

    def believed(self, confidence: Tensor, group: Tensor | int = 0) -> Tensor:
        """Probability of being right, from probabilities as promised and the groups ``[...]`` they belong to."""
        ratio = (self.kept + FAITH) / (self.promised + FAITH)
        return (confidence * ratio.to(confidence.device)[_place(confidence, group)]).clamp_max(MOST)

    def learn(self, confidence: Tensor, tried: Tensor, right: Tensor, group: Tensor | int = 0) -> None:
        """Take in guesses ``[...]``: as promised, whether put to the test, and whether right."""
        place = _place(confidence, group).flatten()
        self.kept, self.promised = self.kept.to(place.device), self.promised.to(place.device)
        seen = torch.zeros_like(self.kept)
        tested = tried.flatten().to(seen.dtype)
        # What was not put to the test is not forgotten either.
        decay = torch.where(seen.index_add(0, place, tested) > 0, FORGET, 1.0)
        self.kept = (decay * self.kept).index_add(0, place, tested * right.flatten())
        self.promised = (decay * self.promised).index_add(0, place, tested * confidence.flatten().to(seen.dtype))


def _place(confidence: Tensor, group: Tensor | int) -> Tensor:
    """Where in the flat table a confidence is counted."""
    logit = torch.logit(confidence.float(), eps=1e-6)
    return (logit / BIN_WIDTH + BINS / 2).floor().long().clamp(0, BINS - 1) + BINS * group


def committed_text(tree: TokenTree, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """What followed each row's root: ``[B, A]`` tokens, the one that no guess stands for included, and their number."""
    kept = tree.tokens.gather(1, verdict.path)
    following = torch.cat([kept[:, 1:], verdict.next_token[:, None]], dim=1)
    return following.scatter(1, verdict.counts[:, None] - 1, verdict.next_token[:, None]), verdict.counts


def held_against(tree: TokenTree, text: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Which guesses a text puts to the test, and which of them are right.

    Args:
        tree: of guesses, verified or not.
        text: ``[B, T]`` what followed the root.
        counts: ``[B]`` tokens of it that count.

    Returns:
        two masks ``[B, N]``, both False at the root.
    """
    known = tree.valid & (tree.depths <= counts[:, None])
    place = (tree.depths - 1).clamp(0, text.shape[1] - 1)
    on_text = known & (text.gather(1, place) == tree.tokens)
    on_text[:, 0] = True
    above = tree.parents.clamp_min(0)
    # Each round looks twice as far up the path.
    for _ in range((tree.num_nodes - 1).bit_length()):
        on_text = on_text & on_text.gather(1, above)
        above = above.gather(1, above)
    tried = known & on_text.gather(1, tree.parents.clamp_min(0))
    right = on_text.clone()
    tried[:, 0] = right[:, 0] = False
    return tried, right
