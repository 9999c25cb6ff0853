"""Transformers' logits processors, asked about the tokens of one row at a time.

Plain decoding calls the processors once a token with all rows of the batch.  In drafting the rows grow by different
lengths, and a round asks about several positions of each.  Which of the caller's processors may be asked how is settled
here, by the exact class: a subclass may do anything.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process


def _classes(*names: str) -> tuple[type, ...]:
    """The classes of these names that the installed Transformers has."""
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


# The result depends on the logits alone.
LOGITS_ONLY = _classes(
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TopHLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# ... on the logits and the row's own tokens.
ROW_ONLY = _classes(
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "SuppressTokensAtBeginLogitsProcessor",
    "WatermarkLogitsProcessor",
)
# ... and on the row's place in the caller's batch, for which something was kept.
PLACE_ONLY = _classes(
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)


def names_of_stateful(processors: LogitsProcessorList) -> list[str]:
    """Those that may keep a state from token to token."""
    return [type(p).__name__ for p in processors if type(p) not in (*LOGITS_ONLY, *ROW_ONLY, *PLACE_ONLY)]


class RowProcessors:
    """The caller's processors as each row of the batch meets them.

    What is not known may keep a state from token to token (a grammar, a watermark).  Every row then has its own copy,
    which must be asked once a token, in order, as in plain decoding.

    Args:
        processors: as Transformers prepared them.
        batch_size: rows of the caller's batch.

    Attributes:
        logits_only: no processor looks at the tokens.
        in_order: names of those that may keep a state.
        token_processors: names of those that look at the tokens.

    Raises:
        ValueError: if a processor that may keep a state cannot be copied for the rows of a batch.
    """

    def __init__(self, processors: LogitsProcessorList, batch_size: int):
        self.processors = processors
        self.batch_size = batch_size
        self.token_processors = [type(p).__name__ for p in processors if type(p) not in LOGITS_ONLY]
        self.logits_only = not self.token_processors
        self.in_order = names_of_stateful(processors)
        self._needs_place = bool(self.in_order) or any(type(p) in PLACE_ONLY for p in processors)
        self._of_row = [processors] * batch_size
        if self.in_order and batch_size > 1:
            self._of_row = [processors, *(_copied(processors) for _ in range(batch_size - 1))]

    def __bool__(self) -> bool:
        return bool(self.processors)

    def all_rows(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores ``[B, V]`` in float32 at the same position of every row; ``ids [B, T]`` come before it."""
        if not self.in_order:
            return _apply(self.processors, ids, logits)
        return torch.cat([self.one_row(row, ids[row : row + 1], logits[row : row + 1]) for row in range(len(ids))])

    def one_row(self, place: int, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores ``[1, V]`` of the row at ``place`` of the caller's batch: ``ids [1, T]``, ``logits [1, V]``.

        Where it matters the processors are shown a batch of the size they were made for, with the row at its place.
        """
        if not self._needs_place or self.batch_size == 1:
            return _apply(self._of_row[place], ids, logits)
        scores = _apply(self._of_row[place], ids.repeat(self.batch_size, 1), logits.expand(self.batch_size, -1))
        return scores[place : place + 1]

    def any_position(self, logits: Tensor) -> Tensor:
        """Processed scores ``[M, V]`` at any positions, where no processor looks at the tokens."""
        return _apply(self.processors, torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device), logits)


def _apply(processors: LogitsProcessorList, ids: Tensor, logits: Tensor) -> Tensor:
    # A copy: processors may write in place, and Transformers hands them float32 too.
    scores = logits.to(dtype=torch.float32, copy=True)
    return processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))


def _copied(processors: LogitsProcessorList) -> LogitsProcessorList:
    try:
        return copy.deepcopy(processors)
    except Exception as error:
        names = ", ".join(type(p).__name__ for p in processors)
        raise ValueError(
            f"One of the logits processors ({names}) cannot be copied, and may keep a state from token to token: in a "
            "batch every row needs its own. Generate the rows one by one, or give the processor a __deepcopy__."
        ) from error
