"""The least-squares start of a block drafter: every slot a linear map of what is known before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.heads.base import TrainingBatch
from mtp.heads.layers import unit_scale
from mtp.heads.warmstart import RidgeRegression, TooFewRowsError


@dataclass(frozen=True)
class BlockMaps:
    """Where a block drafter starts.

    Attributes:
        feature_mean: ``[F]`` of each of the target's F features.
        feature_scale: ``[F]`` standard deviation of each.
        context: ``[H, F]`` from centred features to the H directions that say most about all slots, each of unit
            variance.
        slots: ``[K, H, 2H]`` from [embedding of the pending token; context] to the state that slot k guesses from.
        slots_bias: ``[K, H]`` what the features' means add to it.
        markov_up: ``[H, r]``, and ``markov_down``: ``[r, H]`` for each slot but the first, what the embedding of the
            token before a guess adds to that state.
        scale: of the target's final states, by which the states above are divided.
    """

    feature_mean: Tensor
    feature_scale: Tensor
    context: Tensor
    slots: Tensor
    slots_bias: Tensor
    markov_up: Tensor
    markov_down: list[Tensor]
    scale: float


class BlockFit:
    """Regressions of the target's final states at the K positions ahead.

    With e the embedding of the pending token, f the target's features at the last committed one, and p the embedding
    of the token before the k-th guess: ``u[k] ~ A[k] e + F[k] f + M[k] p`` by ridge regression, u being the target's
    final state where it chooses that token.  The ``F[k]`` of all slots are then read from one context of H directions,
    and the ``M[k]`` share r directions; both are the best ones in the least-squares sense.

    Args:
        width: H.
        features: F.
        slots: K.
    """

    def __init__(self, width: int, features: int, slots: int, device: torch.device):
        self.width, self.slots = width, slots
        inputs = width + features
        # Outputs: the K states, then the K - 1 embeddings that the later guesses follow.
        self.known = RidgeRegression(inputs, (2 * slots - 1) * width, device)
        self.before = [RidgeRegression(width, width, device) for _ in range(slots - 1)]
        self.total = torch.zeros(features, dtype=torch.float64, device=device)
        self.scale = 0.0

    def add(self, batch: TrainingBatch, embed: Callable[[Tensor], Tensor]) -> None:
        """Take in the base positions of a batch from which the whole block is trained."""
        states, slots = batch.states, self.slots
        assert states.taps is not None
        whole = torch.stack([batch.bases(slot + 2) for slot in range(slots)]).all(0)
        rows, bases = whole.nonzero(as_tuple=True)
        self.scale = self.scale or unit_scale(states.hidden[rows, bases])
        known = torch.cat(
            [embed(states.tokens[rows, bases + 1]), states.taps[rows, bases], states.hidden[rows, bases]], dim=-1
        )
        ahead = [states.hidden[rows, bases + 1 + slot] / self.scale for slot in range(slots)]
        before = [embed(states.tokens[rows, bases + 1 + slot]) for slot in range(1, slots)]
        self.known.add(known, torch.cat([*ahead, *before], dim=-1))
        self.total += known[:, self.width :].sum(0)
        for fit, embedding, state in zip(self.before, before, ahead[1:], strict=True):
            fit.add(embedding, state)

    def solve(self, rank: int) -> BlockMaps:
        """The maps, with a Markov bias of the given rank.

        Raises:
            TooFewRowsError: if no batch held a whole block.
        """
        if not self.known.count:
            raise TooFewRowsError(f"of at least {self.slots} tokens, one for each slot of the block")
        width, known = self.width, self.known
        maps = [known.solve(cross=known.cross[:, :width])]
        maps += [self._joint(slot) for slot in range(1, self.slots)]
        inputs = known.gram.shape[0]
        from_embedding = torch.stack([w[:, :width] for w in maps])
        from_features = torch.stack([w[:, width:inputs] for w in maps])
        mean = self.total / known.count
        covariance = known.gram[width:, width:] / known.count - mean[:, None] * mean
        context, reading = _shared_rows(from_features.double(), covariance, width)
        up, down = _shared_columns([w[:, inputs:] for w in maps[1:]], width, rank)
        return BlockMaps(
            feature_mean=mean.float(),
            feature_scale=covariance.diagonal().clamp_min(1e-12).sqrt().float(),
            context=context.float(),
            slots=torch.cat([from_embedding, reading.float()], dim=-1),
            slots_bias=(from_features.double() @ mean).float(),
            markov_up=up.to(from_embedding),
            markov_down=down,
            scale=self.scale,
        )

    def _joint(self, slot: int) -> Tensor:
        """``[H, H + F + H]``: the map of a later slot, from what is known and from the token before its guess."""
        width, known, before = self.width, self.known, self.before[slot - 1]
        at = (self.slots + slot - 1) * width
        mixed = known.cross[:, at : at + width]
        joint = RidgeRegression(known.gram.shape[0] + width, width, known.gram.device)
        joint.count = known.count
        joint.gram = torch.cat([torch.cat([known.gram, mixed], dim=1), torch.cat([mixed.T, before.gram], dim=1)], dim=0)
        joint.cross = torch.cat([known.cross[:, slot * width : (slot + 1) * width], before.cross], dim=0)
        return joint.solve()


def _shared_rows(maps: Tensor, covariance: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` directions of features from which ``maps [K, H, F]`` can be read best, and how to read them.

    Args:
        covariance: ``[F, F]`` of the features.

    Returns:
        ``C [width, F]`` and ``R [K, H, width]`` with ``maps ~ R C``; ``C f`` has unit variance in each direction.
    """
    scale = covariance.diagonal().clamp_min(1e-12).sqrt()
    normalised = covariance / scale[:, None] / scale
    normalised.diagonal().add_(1e-4)
    root = torch.linalg.cholesky(normalised) * scale[:, None]  # features = root @ white noise
    whitened = maps @ root
    rows = whitened.flatten(0, 1)
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -width:]
    return torch.linalg.solve_triangular(root, directions.T, upper=False, left=False), whitened @ directions


def _shared_columns(maps: list[Tensor], width: int, rank: int) -> tuple[Tensor, list[Tensor]]:
    """``up [H, rank]`` and a ``down [rank, H]`` for each of ``maps [H, H]``, whose products are closest to them."""
    gram = sum((m.double() @ m.double().T for m in maps), torch.zeros(width, width, dtype=torch.float64))
    up = torch.linalg.eigh(gram).eigenvectors[:, -rank:]
    return up, [(up.T @ m.double()).float() for m in maps]
