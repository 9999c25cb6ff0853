"""Which layers can a target spare when it drafts for itself?  Found on a handful of texts, within a time limit.

Draft & Verify (Zhang et al., arXiv 2309.08168) and SWIFT (Xia et al., arXiv 2410.06916) optimise over all sets of
layers, by Bayesian and random search.  Here layers leave one by one, each time the one whose loss costs the least
agreement with the whole model; what was measured for a layer in an earlier round is taken for an upper bound, so that a
round looks at a few layers instead of all (lazy greedy, Minoux 1978).
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.cost import measure
from mtp.drafters.base import RoundCosts
from mtp.drafters.early_exit import SHAPE, EarlyExit
from mtp.drafters.lm_tree import TreeShape
from mtp.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SkipChoice:
    """A set of layers to skip, and what to expect of it.

    Attributes:
        skip: the layers.
        agreement: share of the texts' positions where the draft's likeliest token is the target's.
        rate: tokens a second of a chain of the best length; see ``best_rate``.
    """

    skip: tuple[int, ...]
    agreement: float
    rate: float


@dataclass(frozen=True)
class SkipCosts:
    """Seconds of a round by how many layers are skipped.

    Attributes:
        round: of a draft that skips none.
        saved: seconds that a draft pass saves for each layer skipped.
    """

    round: RoundCosts
    saved: float

    @classmethod
    def measured(cls, target: Target, shape: TreeShape) -> SkipCosts:
        """Time the whole model and one with half of its layers as drafters; some seconds."""
        some = [layer for layer in range(target.num_layers) if layer not in target.needed_layers]
        some = some[: max(len(some) // 2, 1)] if target.num_layers > 1 else []
        whole = measure(target, EarlyExit((), shape).attach(target), batch=1)
        half = measure(target, EarlyExit(some, shape).attach(target), batch=1)
        saved = max(whole.level - half.level, 0.0) / max(len(some), 1)
        return cls(whole.of_round(whole.contexts[0], shape.depth + 1), saved)

    def best_rate(self, agreement: float, skipped: int, depth: int) -> float:
        """Tokens a second of the best chain of 1 to ``depth`` guesses, each right with chance ``agreement``."""
        costs, rates = self.round, []
        for guesses in range(1, depth + 1):
            tokens = sum(agreement**at for at in range(guesses + 1))
            draft = costs.first + costs.level * (guesses - 1) - self.saved * skipped * guesses
            rates.append(tokens / (max(draft, 0.0) + costs.verify[guesses + 1] + costs.other))
        return max(rates)


@torch.no_grad()
def calibrate_early_exit(
    target: Target,
    texts: Sequence[Sequence[int]],
    *,
    seconds: float = 60.0,
    shape: TreeShape = SHAPE,
    costs: SkipCosts | None = None,
) -> EarlyExit:
    """An early exit that skips the layers with the best expected tokens a second.

    Args:
        target: drafts and verifies.
        texts: token ids of a handful of texts of the kind that will be generated, best of all answers of the target; a
            few hundred tokens in all tell layers apart.
        seconds: time limit of the search; what was best by then is taken.  Costs are measured before (some seconds).
        shape: of the trees.
        costs: what passes cost; None to measure it.

    Raises:
        ValueError: if the texts are too short to compare anything.
    """
    compared = [_Comparison(target, text) for text in texts if len(text) > 1]
    if not compared:
        raise ValueError(
            f"Found {len(texts)} texts, none of two tokens or more; expected a few hundred tokens of text."
        )
    costs = costs or SkipCosts.measured(target, shape)

    def agreement(skip: tuple[int, ...]) -> float:
        hits = sum(one.hits(skip) for one in compared)
        return hits / sum(one.count for one in compared)

    candidates = [layer for layer in range(target.num_layers) if layer not in target.needed_layers]
    best = search(
        candidates[: target.num_layers - 1],  # one has to stay
        agreement,
        lambda share, skipped: costs.best_rate(share, skipped, shape.depth),
        seconds,
    )
    speedup = best.rate * costs.round.plain
    logger.log(
        logging.INFO if speedup > 1 else logging.WARNING,
        "early exit: without layers %s of %d the likeliest token is the same at %.0f %% of the positions; "
        "%.2f times the speed of plain decoding expected",
        best.skip,
        target.num_layers,
        100 * best.agreement,
        speedup,
    )
    return EarlyExit(best.skip, shape).attach(target)


def search(
    candidates: Sequence[int],
    agreement: Callable[[tuple[int, ...]], float],
    rate: Callable[[float, int], float],
    seconds: float,
) -> SkipChoice:
    """The best set on the path of a lazy greedy search.

    Args:
        candidates: layers that may be skipped.
        agreement: of a set of layers (in rising order), in 0 to 1; one pass over the texts.
        rate: of an agreement and a number of skipped layers; grows with both.
        seconds: time limit.
    """
    started = time.perf_counter()
    middle = sum(candidates) / max(len(candidates), 1)
    losses: list[tuple[float, int, int]] = []  # loss, layer, and how many layers were skipped when it was measured
    skip: tuple[int, ...] = ()
    best = SkipChoice((), 1.0, rate(1.0, 0))
    with tqdm(total=2 * len(candidates), desc="layers to skip", unit="layer", leave=False) as bar:
        # From the middle outwards: where time does not suffice for all, the ends are the least likely to be spared.
        for layer in sorted(candidates, key=lambda layer: abs(layer - middle)):
            if losses and time.perf_counter() - started > seconds / 2:
                break
            heapq.heappush(losses, (1 - agreement((layer,)), layer, 0))
            bar.update()
        while losses and (time.perf_counter() - started < seconds or not skip):
            loss, layer, measured_at = heapq.heappop(losses)
            larger = tuple(sorted((*skip, layer)))
            if measured_at < len(skip):
                heapq.heappush(losses, (1 - agreement(larger), layer, len(skip)))
                continue
            skip = larger
            best = max(best, SkipChoice(skip, 1 - loss, rate(1 - loss, len(skip))), key=lambda choice: choice.rate)
            bar.update()
            bar.set_postfix(skipped=len(skip), agreement=f"{1 - loss:.2f}")
            if rate(1 - loss, len(candidates)) <= best.rate:  # however many more leave at no loss
                break
    return best


class _Comparison:
    """One text: where does a draft that skips layers choose as the whole model does?

    At every position the draft stands as it will when decoding: the text before it was read by the whole model, the
    token itself by the layers that stay.  One pass covers all positions.
    """

    def __init__(self, target: Target, text: Sequence[int]):
        self.target = target
        self.ids = torch.tensor([list(text)], device=target.device)
        self.count = len(text)
        self.cache: TreeCache = target.new_cache(1, 2 * self.count)
        chain = AttentionPass.over_chain(self.count, self.cache.lengths, 0)
        self.choices = target.forward(self.ids, self.cache, chain).logits[0].argmax(-1)
        place = torch.arange(self.count, device=self.ids.device)
        self.cache.commit(None, torch.full_like(self.cache.lengths, self.count), self.count)
        mask = torch.cat([place[:, None] > place, place[:, None] == place], dim=1)[None]
        twice = torch.cat([place, place])[None]
        # To this pass all slots are staged ones: what a token sees of the text is up to the mask.
        self.attention = AttentionPass(torch.zeros_like(self.cache.lengths), 0, place[None], mask, twice)

    def hits(self, skip: tuple[int, ...]) -> int:
        """Positions at which the likeliest token stays the same."""
        logits: Tensor = self.target.forward(self.ids, self.cache, self.attention, skip=skip).logits
        self.cache.discard()
        return int((logits[0].argmax(-1) == self.choices).sum())
