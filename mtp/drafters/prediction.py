"""Predicted outputs: the caller's own idea of the answer as the draft, taken up again where the answer departs from it.

The answer is followed through the prediction by its longest match.  Behind an edit there is none yet; then the
prediction is taken up where the edit may end, before the answer has said a word from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from mtp.drafters.lookup import Place
from mtp.drafters.ngram import NgramDrafter, Row, token_ids
from mtp.suffix import NOTHING, Match, SuffixAutomaton

ALIGNED = 3  # tokens shared with the prediction from which on a place in it is worth remembering
ASTRAY = 16  # tokens after which such a place is given up
LEAD = tuple(range(-8, 0))  # the beginning of a prediction counts as a phrase of as many tokens, which no text has


class Reading(NamedTuple):
    """Where an answer stands in a prediction.

    Attributes:
        match: the longest end of the answer that occurs in the prediction.
        anchor: where it stood when it last departed, while it has not come back.
        astray: tokens since then.
    """

    match: Match = NOTHING
    anchor: Match | None = None
    astray: int = 0

    def after(self, prediction: SuffixAutomaton, token: int) -> Reading:
        """Where the answer stands one token later."""
        here = max((prediction.advance(match, token) for match in self.places(prediction)), key=itemgetter(1))
        if here.length > ALIGNED:
            return Reading(here)
        if self.match.length >= ALIGNED:
            return Reading(here, self.match, 1)
        if self.anchor is None or self.astray == ASTRAY:
            return Reading(here)
        return Reading(here, self.anchor, self.astray + 1)

    def places(self, prediction: SuffixAutomaton) -> list[Match]:
        """Where it may stand: where its end occurs and, after a departure, where the prediction may be taken up again.

        The ``astray`` tokens since then may stand for as many of the prediction, for one, or for none.  Either is
        believed as a phrase of ``ALIGNED`` tokens.
        """
        found = [self.match]
        if self.anchor is not None:
            for replaced in sorted({self.astray, 1, 0}, reverse=True):
                resumed = prediction.further(self.anchor, replaced)
                if resumed is not None:
                    found.append(prediction.shortened(resumed, ALIGNED))
        return found


@dataclass(eq=False)
class PredictedRow(Row):
    """A row's text, with the prediction of its answer.

    Attributes:
        prediction: behind ``LEAD``.
        reading: where the answer stands in it.
    """

    prediction: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    reading: Reading = field(default_factory=Reading)

    def begin(self, prediction: SuffixAutomaton) -> None:
        """Expect an answer as predicted."""
        self.prediction, self.reading = prediction, Reading(prediction.find(LEAD))

    def read(self, token: int) -> None:
        if self.answering:
            self.reading = self.reading.after(self.prediction, token)
        super().read(token)

    def places(self, pending: int) -> list[Place]:
        reading = self.reading.after(self.prediction, pending)
        return [*((self.prediction, match) for match in reading.places(self.prediction)), *super().places(pending)]


class PredictionDrafter(NgramDrafter):
    """Guesses that the answer goes on as predicted, or else as prompt and answer went on before.

    Args:
        predictions: of each prompt's answer, as ids of the target's tokens; a batch that holds several rows of each
            prompt (``num_return_sequences``) has them side by side, as Transformers does.
    """

    state: list[PredictedRow]

    def __init__(self, predictions: Sequence[Sequence[int]]):
        super().__init__()
        self._tokens = {token for prediction in predictions for token in prediction}
        if not predictions:
            raise ValueError("Found no predictions; expected one for each prompt.")
        self._predictions = [SuffixAutomaton.of([[*LEAD, *prediction]]) for prediction in predictions]

    def rewind(self, length: int) -> int:
        self.state[0].begin(self._predictions[0])
        return super().rewind(length)

    def _new_rows(self, batch: int) -> list[PredictedRow]:
        rows = [PredictedRow() for _ in range(batch)]
        for index, row in enumerate(rows):
            row.begin(self._predictions[index * len(self._predictions) // batch])
        return rows


def predicted_ids(prediction: Any, tokenizer: Any) -> list[list[int]]:
    """The token ids of ``generate``'s ``prediction``: one text or row of ids, or a list of them, one a prompt.

    Raises:
        ValueError: for texts without a tokenizer, and for what is no text and no row of token ids.
    """
    if hasattr(prediction, "tolist"):
        prediction = prediction.tolist()
    several = isinstance(prediction, list | tuple) and not all(isinstance(item, int) for item in prediction)
    each = prediction if several else [prediction]
    return [_ids(item, tokenizer) for item in each]


def _ids(text: Any, tokenizer: Any) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError(
                "prediction is a text, and there is no tokenizer to spell it with: give the model one "
                "(SpeculativeModel(..., tokenizer=...)), or pass token ids."
            )
        return list(tokenizer.encode(text, add_special_tokens=False))
    return token_ids(text, "prediction")
