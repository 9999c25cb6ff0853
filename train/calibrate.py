"""How far a head's confidences can be believed: counted on held-out text, and made into a curve."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp.planner import FixedPlanner, RoundReport

BINS = 10
FEWEST = 200  # guesses at a depth from which a curve is fitted to them alone
# Surer guesses count as this sure, and likewise at the other end.  Those beyond it come in loops of one answer, all
# right or all wrong together, and by their distance alone would outweigh hundreds of others.
CLIP = 0.02
LEAST_SLOPE = 0.1


@dataclass
class Reliability:
    """Guesses that were put to the test (those whose parent was accepted), by depth.

    Attributes:
        confidences: at each depth from 1 on, the head's probability of each guess given its parent.
        accepted: whether the target said the same.
    """

    confidences: list[list[float]] = field(default_factory=list)
    accepted: list[list[bool]] = field(default_factory=list)

    def add(self, depth: int, confidence: float, accepted: bool) -> None:
        """Count one guess at ``depth`` (from 1 on)."""
        while len(self.accepted) < depth:
            self.confidences.append([])
            self.accepted.append([])
        self.confidences[depth - 1].append(confidence)
        self.accepted[depth - 1].append(accepted)

    def add_all(self, other: Reliability) -> None:
        """Count the guesses of ``other`` too."""
        for depth, pairs in enumerate(zip(other.confidences, other.accepted, strict=True), start=1):
            for confidence, accepted in zip(*pairs, strict=True):
                self.add(depth, confidence, accepted)

    def table(self) -> list[list[dict[str, float]]]:
        """For each depth, bins of equal width: guesses in it, their mean confidence and the share that was accepted."""
        return [_bins(*pair) for pair in zip(self.confidences, self.accepted, strict=True)]

    def fit(self) -> tuple[tuple[float, float], ...]:
        """For each depth, offset and slope of the logit of being accepted over the logit of the confidence.

        Platt's scaling.  From the first depth on that was seen too seldom, all deeper guesses share one curve.
        """
        curves = []
        for depth in range(len(self.accepted)):
            enough = len(self.accepted[depth]) >= FEWEST
            depths = [depth] if enough else range(depth, len(self.accepted))
            confidences = [value for at in depths for value in self.confidences[at]]
            accepted = [value for at in depths for value in self.accepted[at]]
            if len(accepted) >= FEWEST // 4:
                curves.append(fit_logistic(torch.tensor(confidences), torch.tensor(accepted)))
            if not enough:
                break
        return tuple(curves)


def _bins(confidences: list[float], accepted: list[bool]) -> list[dict[str, float]]:
    table = []
    for at in range(BINS):
        members = [i for i, value in enumerate(confidences) if min(int(value * BINS), BINS - 1) == at]
        if members:
            table.append(
                {
                    "guesses": len(members),
                    "confidence": round(sum(confidences[i] for i in members) / len(members), 4),
                    "accepted": round(sum(accepted[i] for i in members) / len(members), 4),
                }
            )
    return table


def fit_logistic(confidences: Tensor, accepted: Tensor, ridge: float = 1.0) -> tuple[float, float]:
    """Offset and slope of the likeliest curve, with a weak pull towards the identity (0, 1).

    Guesses that are surer are never taken for less likely: the slope is at least ``LEAST_SLOPE``.

    Args:
        confidences: ``[M]`` probabilities.
        accepted: ``[M]`` bool.
        ridge: strength of the pull, in guesses.
    """
    logits = torch.logit(confidences.double(), eps=CLIP)
    wanted = accepted.double()
    identity = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def fitted(free: int) -> Tensor:
        """The curve whose last ``2 - free`` coefficients are held at the least slope."""
        found = identity[:free].clone().requires_grad_()
        held = torch.tensor([LEAST_SLOPE], dtype=torch.float64)[: 2 - free]
        # A line search, since plain Newton steps fly off where a few sure guesses were wrong.
        optimizer = torch.optim.LBFGS([found], max_iter=100, line_search_fn="strong_wolfe")

        @torch.enable_grad()
        def loss() -> Tensor:
            optimizer.zero_grad()
            curve = torch.cat([found, held])
            pull = ridge / 2 * (curve - identity).square().sum()
            value = F.binary_cross_entropy_with_logits(curve[0] + curve[1] * logits, wanted, reduction="sum") + pull
            value.backward()
            return value

        optimizer.step(loss)
        return torch.cat([found.detach(), held])

    curve = fitted(2)
    if curve[1] < LEAST_SLOPE:
        curve = fitted(1)
    return round(float(curve[0]), 5), round(float(curve[1]), 5)


class Watching(FixedPlanner):
    """Trees of a fixed size, whose guesses are counted."""

    def __init__(self, nodes: int):
        super().__init__(nodes)
        self.reliability = Reliability()

    def learn(self, report: RoundReport) -> None:
        tree, verdict = report.tree, report.verdict
        if tree.log_q is None:
            return
        for row in range(tree.batch_size):
            path = verdict.path[row, : int(verdict.counts[row])].tolist()
            children = tree.children(row)
            confidence = tree.log_q[row].exp().tolist()
            for depth, node in enumerate(path, start=1):
                for child in children[node]:
                    self.reliability.add(depth, confidence[child], child in path)
