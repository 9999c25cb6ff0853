"""Training-time test without an L x L tensor a step: which positions are unrolled, and what each one sees.

An unrolled step at base position p sees the true entries up to p and its own entries of the steps before (EAGLE-3,
arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtp.heads.base import TrainingBatch
from mtp.heads.layers import DraftLayer, Rotary

QUERIES = 256  # whose scores exist at one time


@dataclass(frozen=True)
class Bases:
    """The positions of a batch from which some step's guess is trained.

    Attributes:
        grid: ``[B, P]`` them, as one range a row; past a row's last any valid position.
        place: two index vectors ``[M]``: where in the grid the M real ones are.  All work but attention itself is done
            on these.
        rows: ``[M]`` the batch row of each.
        positions: ``[M]`` the token position of each.
    """

    grid: Tensor
    place: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, batch: TrainingBatch, steps: int) -> Self:
        """Those from which one of the first ``steps`` steps is trained."""
        ranges = base_ranges(batch, steps)
        rows, columns = (ranges >= 0).nonzero(as_tuple=True)
        # The last token of a row has no entry: an entry holds the token after its position.
        return cls(ranges.clamp(0, batch.states.tokens.shape[1] - 2), (rows, columns))

    @property
    def rows(self) -> Tensor:
        return self.place[0]

    @property
    def positions(self) -> Tensor:
        return self.grid[self.place]

    def spread(self, x: Tensor) -> Tensor:
        """``[M, C]`` put at their places into zeros ``[B, P, C]``."""
        return x.new_zeros(*self.grid.shape, x.shape[1]).index_put(self.place, x)


class UnrolledAttention:
    """Attention of the steps at each base position: to the true entries up to it, and to its own of earlier steps.

    Args:
        layer: the draft layer.
        rotary: its positions.
        entries: ``[B, T, I]`` the layer's input at every position, the true tokens' entries.
        bases: where steps are unrolled from.
    """

    def __init__(self, layer: DraftLayer, rotary: Rotary, entries: Tensor, bases: Bases):
        self.layer, self.rotary, self.bases = layer, rotary, bases
        everywhere = torch.arange(entries.shape[1], device=entries.device)[None]
        key = layer.split_heads(layer.k_proj(entries))
        (self.key,) = rotary(everywhere, key)
        self.value = layer.split_heads(layer.v_proj(entries))

    def entry(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Key and value of ``x [M, I]``, the input of a step from 1 on; it and later steps at its base see them."""
        key, value = (
            self.layer.split_heads(self.bases.spread(project(x))) for project in (self.layer.k_proj, self.layer.v_proj)
        )
        return *self.rotary(self.bases.grid + step, key), value

    def __call__(self, x: Tensor, step: int, own: Sequence[Tensor] = ()) -> Tensor:
        """``[M, heads * D]`` what the layer's inputs ``x [M, I]`` attend to at a step.

        Args:
            own: ``entry`` of the steps from 1 to this one, one behind the other.
        """
        query = self.layer.split_heads(self.bases.spread(self.layer.q_proj(x)))
        (query,) = self.rotary(self.bases.grid + step, query)
        attended = attend_with_own(query, self.key, self.value, self.bases.grid, own[::2], own[1::2])
        return attended[self.bases.place]


def base_ranges(batch: TrainingBatch, steps: int) -> Tensor:
    """``[B, P]`` consecutive positions of each row from which some step trains; those past a row's last are -1."""
    wanted = torch.stack([batch.bases(step + 2) for step in range(steps)]).any(0)
    count = wanted.shape[1]
    index = torch.arange(count, device=wanted.device)
    first = torch.where(wanted, index, count).amin(1, keepdim=True)
    last = torch.where(wanted, index, -1).amax(1, keepdim=True)
    length = max(int((last - first).max()) + 1, 1)
    bases = first + torch.arange(length, device=wanted.device)
    return torch.where(bases <= last, bases, -1)


def attend_with_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    scaling: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of ``query [B, h, P, D]`` to ``key [B, h, T, D]`` up to position ``seen [B, P]``, and to the key of the
    same index p in each of ``own_keys``.  Returns ``[B, P, h * D]``.  For ``softcap`` see ``mtp.attention.attend``."""
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)

    def attend(rows: slice, length: int) -> Tensor:
        keys, values = ([states[:, :, rows] for states in own] for own in (own_keys, own_values))
        text = key[:, :, :length], value[:, :, :length]
        return _attend_with_own(query[:, :, rows], *text, seen[:, rows], keys, values, softcap)

    return in_blocks(attend, seen, QUERIES)


def _attend_with_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    softcap: float | None,
) -> Tensor:
    """``attend_with_own`` of scaled queries, all at once."""
    scores = torch.cat([query @ key.transpose(2, 3), *((query * k).sum(-1, keepdim=True) for k in own_keys)], dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length = key.shape[2]
    scores[..., :length].masked_fill_(hidden_from(seen, length)[:, None], float("-inf"))
    weights = scores.softmax(-1)
    out = weights[..., :length] @ value
    for at, v in enumerate(own_values):
        out = out + weights[..., length + at, None] * v
    return out.transpose(1, 2).flatten(2)


def attend_with_block(
    key: Tensor, value: Tensor, seen: Tensor, query: Tensor, block_key: Tensor, block_value: Tensor
) -> Tensor:
    """Attention of every base position's block to the text before it and to the whole of itself.

    Args:
        key: ``[B, h, T, D]``, and ``value``: of the text.
        seen: ``[B, P]`` the last of its positions that each base position sees.
        query: ``[B, h, P, K, D]`` of K slots for each of P base positions; ``block_key``, ``block_value`` likewise.

    Returns:
        ``[B, P, K, h * D]``.
    """
    query = query * query.shape[-1] ** -0.5

    def attend(rows: slice, length: int) -> Tensor:
        block = [states[:, :, rows] for states in (query, block_key, block_value)]
        return _attend_with_block(key[:, :, :length], value[:, :, :length], seen[:, rows], *block)

    return in_blocks(attend, seen, max(1, QUERIES // query.shape[3]))


def _attend_with_block(
    key: Tensor, value: Tensor, seen: Tensor, query: Tensor, block_key: Tensor, block_value: Tensor
) -> Tensor:
    """``attend_with_block`` of scaled queries, all at once."""
    slots, length = query.shape[3], key.shape[2]
    shared = (query.flatten(2, 3) @ key.transpose(2, 3)).unflatten(2, (-1, slots))
    shared = shared.masked_fill(hidden_from(seen, length)[:, None, :, None], float("-inf"))
    weights = torch.cat([shared, query @ block_key.transpose(3, 4)], dim=-1).softmax(-1)
    out = (weights[..., :length].flatten(2, 3) @ value).unflatten(2, (-1, slots))
    out = out + weights[..., length:] @ block_value
    return out.permute(0, 2, 3, 1, 4).flatten(3)


def hidden_from(seen: Tensor, length: int) -> Tensor:
    """``[B, P, length]`` bool: which positions lie behind the last one that is ``seen [B, P]``."""
    return torch.arange(length, device=seen.device) > seen[:, :, None]


def in_blocks(attend: Callable[[slice, int], Tensor], seen: Tensor, size: int) -> Tensor:
    """What all base positions attend to, ``[B, P, ...]``, from ``attend`` of ``size`` of them at a time.

    Scores of a long row are never there all at once, neither forward nor backward: those of a block are dropped, and
    computed again when its gradients are due (Rabe and Staats, arXiv 2112.05682).

    Args:
        attend: from a range of base positions, and how much of the text these see, to ``[B, size, ...]``.
        seen: ``[B, P]`` the last position of the text that each base position sees.
    """
    ends = seen.amax(0).tolist()
    blocks = [slice(first, first + size) for first in range(0, len(ends), size)]
    run = attend if len(blocks) == 1 else partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([run(block, max(ends[block]) + 1) for block in blocks], dim=1)


@torch.no_grad()
def misses_own_token(logits: Tensor, labels: Tensor) -> Tensor:
    """``[M]`` bool: whether a token that the head draws for itself would not be the text's.

    What comes after a token of its own has a label only where that token is the text's: the target was never asked what
    follows any other.  There it is all the same which of the two is fed, and elsewhere the deeper steps are left out.
    So the token need not be drawn: a coin that shows the text's token with the head's probability decides as well.

    Args:
        logits: ``[M, Vd]`` what the head guesses from.
        labels: ``[M]`` the text's tokens as indices into the draft vocabulary; negative where it does not hold them.
    """
    scores = logits.float()
    log_q = scores.gather(1, labels.clamp_min(0)[:, None])[:, 0] - scores.logsumexp(-1)
    return (torch.rand_like(log_q) >= log_q.exp()) | (labels < 0)
