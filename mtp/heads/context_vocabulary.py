"""What the text at hand adds to a draft vocabulary.

A draft vocabulary of the most frequent tokens keeps a head's output matrix small, and makes it mute where it matters:
an answer that takes up a name, a number or a foreign word from its prompt does so in rare tokens.  Of the answers of
SmolLM2-135M-Instruct to Spec-Bench, 12.8 % of the tokens are outside of the 8,192 most frequent ones of its other
answers (translation: 31 %), but only 2.3 % are neither among these nor in the text so far.

So a head may guess all tokens of the text so far as well: those that it lacks borrow their rows of the target's own
output matrix.  It is trained with what each position's own text holds up to there.  (Drafted tokens are no part of the
text yet: steps further ahead are trained with a few tokens more than they are drafted with.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from mtp import growth, packing
from mtp.target import Target

NEVER = torch.iinfo(torch.long).max
UNKNOWN = -1e4  # logit of a token that a text does not hold yet: a probability of zero, and still a number


def lacking(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """``[V]`` bool: which tokens a draft vocabulary ``draft_ids [Vd]`` does not hold."""
    lacks = torch.ones(vocab_size, dtype=torch.bool, device=draft_ids.device)
    return lacks.index_fill(0, draft_ids, False)


@dataclass(frozen=True)
class ContextTokens:
    """Tokens of some texts that a draft vocabulary lacks.

    Attributes:
        ids: ``[E]`` them, in rising order.
        first: ``[B, E]`` the position at which each text has each of them first; ``NEVER`` where it does not.
    """

    ids: Tensor
    first: Tensor

    @classmethod
    def none(cls, batch: int, device: torch.device) -> Self:
        nothing = torch.zeros(0, dtype=torch.long, device=device)
        return cls(nothing, nothing.expand(batch, 0))

    def joined_by(self, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Self:
        """With the ``wanted [B, T]`` ones of ``tokens [B, T]``, which stand at ``positions [B, T]`` of their texts."""
        rows, columns = wanted.nonzero(as_tuple=True)
        found = tokens[rows, columns]
        ids = torch.cat([self.ids, found]).unique()
        first = self.first.new_full((len(self.first), len(ids)), NEVER)
        first[:, torch.searchsorted(ids, self.ids)] = self.first
        place = rows * len(ids) + torch.searchsorted(ids, found)
        first = first.flatten().scatter_reduce(0, place, positions[rows, columns], "amin").view_as(first)
        return type(self)(ids, first)

    def before(self, length: int) -> Self:
        """Those that the first ``length`` tokens of each text hold."""
        first = self.first.masked_fill(self.first >= length, NEVER)
        held = (first < NEVER).any(0)
        return type(self)(self.ids[held], first[:, held])

    def of_rows(self, rows: Tensor) -> Self:
        return type(self)(self.ids, self.first[rows])

    def unknown(self, rows: Tensor, positions: Tensor) -> Tensor:
        """``[M, E]`` bool: which of them the texts ``rows [M]`` do not hold up to ``positions [M]``."""
        return self.first[rows] > positions[:, None]


@dataclass(frozen=True)
class BatchVocabulary:
    """The tokens that a head can guess in a batch, as columns of its logits.

    Attributes:
        ids: ``[V']`` the target's token of each column: the draft vocabulary, then what the batch's texts add to it.
        index: ``[V]`` the column of each of the target's tokens; -1 for those that have none.
        context: what the texts add; None for heads that guess from their draft vocabulary alone.
    """

    ids: Tensor
    index: Tensor
    context: ContextTokens | None = None

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int, context: ContextTokens | None = None) -> Self:
        index = ids.new_full((vocab_size,), -1)
        index[ids] = torch.arange(ids.numel(), device=ids.device)
        return cls(ids, index, context)

    def labels(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """``[M]`` columns of the tokens behind ``positions [M]`` of texts ``rows [M]``; -1 for those that cannot be
        guessed there.

        Args:
            tokens: ``[B, T]`` the batch's texts.
        """
        columns = self.index[tokens[rows, positions + 1]]
        if self.context is None or not self.context.ids.numel():
            return columns
        own = self.ids.numel() - self.context.ids.numel()
        first = self.context.first[rows, (columns - own).clamp_min(0)]
        return columns.masked_fill((columns >= own) & (first > positions), -1)

    def rule_out_(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Rule out in ``logits [M, V']`` what texts ``rows [M]`` do not hold up to ``positions [M]``."""
        if self.context is not None and self.context.ids.numel():
            added = logits[:, -self.context.ids.numel() :]
            added.masked_fill_(self.context.unknown(rows, positions), UNKNOWN)
        return logits


@dataclass(frozen=True)
class OutputRows:
    """Rows of the target's output matrix, as a layer.

    Attributes:
        weight: ``[E, H]``; packed (``mtp.packing``) if ``is_packed``.
        bias: ``[E]``, if the matrix has one.
    """

    weight: Tensor
    bias: Tensor | None
    is_packed: bool = False

    @classmethod
    def of(cls, target: Target, ids: Tensor, like: Tensor, pack: bool = False) -> Self:
        """Those of tokens ``ids [E]``, in precision and on the device of ``like``.

        Args:
            pack: for products with a few rows on a CPU, through which no gradient flows.
        """
        weight, bias = (None if part is None else part.detach().to(like) for part in target.output.rows(ids))
        assert weight is not None
        if pack and packing.is_available() and packing.is_packable(weight):
            return cls(packing.pack(weight), bias, is_packed=True)
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., H] -> [..., E]``."""
        if self.is_packed:
            return packing.multiply(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class ContextVocabulary:
    """What the texts of one generation add to a head's vocabulary, as they grow.

    Args:
        target: whose output matrix is borrowed from.
        draft_ids: ``[Vd]`` the head's own vocabulary.
        batch: rows.
        like: precision and device of the head's weights.

    Attributes:
        tokens: the texts' tokens that it adds.
        ids: ``[Vd + E]`` all that can be guessed.
        lengths: ``[B]`` of the texts that were observed.
    """

    def __init__(self, target: Target, draft_ids: Tensor, batch: int, like: Tensor):
        self.target, self.draft_ids, self.like = target, draft_ids, like
        self.lengths = torch.zeros(batch, dtype=torch.long, device=draft_ids.device)
        self._lacks = lacking(draft_ids, target.vocab_size)
        self._has_read = False
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, how many of each row, and behind how many
        self._set(ContextTokens.none(batch, draft_ids.device))

    def observe(self, tokens: Tensor, counts: Tensor) -> None:
        """Let ``tokens [B, T]``, of which ``counts [B]`` are real, wait to be read behind the others."""
        self._waiting.append((tokens, counts, self.lengths))
        self.lengths = self.lengths + counts

    def read(self, pending: Tensor) -> None:
        """Take in what waits, and ``pending [B]`` behind it.

        Away from the CPU what comes behind a prompt is taken in with the next prompt alone: whether some of it is new
        would be one more wait a round.
        """
        if not self._has_read or growth.may_ask(self.lengths.device):
            self._take_in(*self._waiting, (pending[:, None], torch.ones_like(self.lengths), self.lengths))

    def _take_in(self, *pieces: tuple[Tensor, Tensor, Tensor]) -> None:
        self._waiting, self._has_read = [], True
        tokens, real, positions = [], [], []
        for piece, counts, before in pieces:
            offsets = torch.arange(piece.shape[1], device=piece.device)
            tokens.append(piece)
            real.append(offsets < counts[:, None])
            positions.append(before[:, None] + offsets)
        text = torch.cat(tokens, dim=1)
        wanted = self._lacks[text] & torch.cat(real, dim=1)
        if wanted.any():
            self._set(self.tokens.joined_by(text, torch.cat(positions, dim=1), wanted))

    def select_rows(self, rows: Tensor) -> None:
        if self._has_read and not growth.may_ask(rows.device):
            self._waiting = []  # of a batch, which no prompt follows
        self._waiting = [(tokens[rows], counts[rows], before[rows]) for tokens, counts, before in self._waiting]
        self.lengths = self.lengths[rows]
        self._set(self.tokens.of_rows(rows))

    def rewind(self, length: int) -> None:
        """Forget what is behind the first ``length`` tokens; a prompt that goes on from there may follow."""
        if self._waiting:
            self._take_in(*self._waiting)
        self._has_read = False
        self.lengths = self.lengths.clamp_max(length)
        self._set(self.tokens.before(length))

    def _set(self, tokens: ContextTokens) -> None:
        known = getattr(self, "tokens", None)
        self.tokens = tokens
        unknown = tokens.first == NEVER
        self._hidden = unknown[:, None] if unknown.any() else None  # [B, 1, E]
        if known is None or not torch.equal(known.ids, tokens.ids):
            self.ids = torch.cat([self.draft_ids, tokens.ids])
            self._rows: OutputRows | None = None

    @property
    def rows(self) -> OutputRows:
        """Of the output matrix, for the tokens that it adds."""
        if self._rows is None:
            self._rows = OutputRows.of(self.target, self.tokens.ids, self.like, pack=True)
        return self._rows

    def mask(self, logits: Tensor) -> Tensor:
        """``[B, W, E]`` logits of the tokens that it adds, those of other rows' texts ruled out."""
        return logits if self._hidden is None else logits.masked_fill(self._hidden, float("-inf"))
