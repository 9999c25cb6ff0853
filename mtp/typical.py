"""Typical acceptance: more accepted guesses for a text that is no longer the target's own.  The one lossy rule."""

from __future__ import annotations

import torch
from torch import Tensor

from mtp.verify import Distribution, Randomness, RowVerdict

# What Medusa's own program starts from; the paper has delta = sqrt(epsilon) throughout.
EPSILON = 0.09
DELTA = 0.3


def typical_row(
    children: list[list[int]],
    tokens: list[int],
    target_probs: Distribution,
    draft_probs: Distribution,
    randomness: Randomness,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> RowVerdict:
    """Medusa's typical acceptance, for top-k children.  **Lossy**: the text is not distributed as the target's.

    A guess x is plausible if p[x] > min(epsilon, delta exp(-H(p))) with H the entropy of the target's distribution p at
    its parent: the less certain the target is, the less is asked of a guess (Cai et al., arXiv 2401.10774, 2.3.1).  The
    longest path of plausible guesses is kept, of several the one the target finds likeliest.  The token behind it,
    which is the next tree's root, is drawn from the target: every round commits one token that was not guessed.
    (The paper takes the likeliest token there; with a draw, sampled text stays random, and a drafter that guesses
    nothing gives the target's own distribution.)

    Args:
        epsilon: a guess of this probability is always plausible.
        delta: scales the threshold where the target is uncertain.
    """
    paths = {0: [0]}
    log_p = {0: 0.0}
    asked: dict[int, Tensor] = {}
    for node in range(len(tokens)):  # parents come before children
        if node not in paths or not children[node]:
            continue
        p = asked[node] = target_probs(node).double()
        threshold = (delta * torch.exp(-torch.special.entr(p).sum())).clamp_max(epsilon)
        for child in children[node]:
            if p[tokens[child]] > threshold:
                paths[child] = [*paths[node], child]
                log_p[child] = log_p[node] + float(p[tokens[child]].log())
    end = max(paths, key=lambda node: (len(paths[node]), log_p[node]))
    return paths[end], randomness.draw(asked[end] if end in asked else target_probs(end))
