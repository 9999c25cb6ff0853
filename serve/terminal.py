"""Tokens into text as they come, and text into a terminal, with the drafter's share of it in colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

KEPT_STYLE = "bold green"
UNFINISHED = "\ufffd"  # what a tokenizer gives for bytes that are no whole character yet
CONTEXT = 6


class Piece(NamedTuple):
    """Some new text.

    Attributes:
        kept: whether the drafter had guessed all tokens that it comes from.
    """

    text: str
    kept: bool


class TokenText:
    """The text of a sequence that grows token by token.

    A token's text depends on its neighbours: a character may take several tokens, and some tokenizers drop the space
    before the first token they are given.  So a piece is what decoding some tokens more adds to the text of those just
    before, and it is held back while it ends inside a character.

    Args:
        tokenizer: decodes.
        prompt: the tokens before the first one.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._told = list(prompt)[-CONTEXT:]
        self._held: list[int] = []
        self._all_kept = True

    def push(self, token: int, kept: bool = False) -> Piece | None:
        """Add a token; returns the text that became complete, or None when there is none yet."""
        self._held.append(token)
        self._all_kept = self._all_kept and kept
        text = self._new_text()
        if text.endswith(UNFINISHED):
            return None
        return self._release(text)

    def flush(self) -> Piece | None:
        """The text that was held back, when no token follows."""
        return self._release(self._new_text()) if self._held else None

    def _new_text(self) -> str:
        before = self._decode(self._told)
        return self._decode(self._told + self._held)[len(before) :]

    def _release(self, text: str) -> Piece | None:
        piece = Piece(text, self._all_kept) if text else None
        # Tokens without text (special ones) stay out of the context: it is there to have text before the next ones.
        self._told = self._held[-CONTEXT:] if text else self._told
        self._held, self._all_kept = [], True
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, prompt: Sequence[int], ids: Iterable[int], kept: Iterable[bool]) -> list[Piece]:
    """A whole answer in pieces."""
    text = TokenText(tokenizer, prompt)
    pieces = [text.push(token, guessed) for token, guessed in zip(ids, kept, strict=True)]
    return [piece for piece in [*pieces, text.flush()] if piece is not None]


def styled(pieces: Iterable[Piece]) -> Text:
    """Pieces as rich text: what the drafter had guessed stands out."""
    text = Text()
    for piece in pieces:
        text.append(visible(piece.text), KEPT_STYLE if piece.kept else None)
    return text


def visible(text: str) -> str:
    """Text that cannot steer the terminal: a model may say escape sequences too."""
    return "".join(char if char in "\n\t" or char.isprintable() else _picture(char) for char in text)


def _picture(char: str) -> str:
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else UNFINISHED if 0x7F <= ord(char) < 0xA0 else char


class Printer:
    """Writes an answer while it grows: in colour to a terminal, exactly as it is to a file or a pipe.

    Args:
        tokenizer: of the target.
        prompt: the token ids behind which the answer comes.
        console: where to; None is standard output.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], console: Console | None = None):
        self._console = console or Console()
        self._text = TokenText(tokenizer, prompt)

    def on_token(self, row: int, token: int, kept: bool) -> None:
        """The listener that ``SpeculativeModel.generate`` takes."""
        self._write(self._text.push(token, kept))

    def end(self) -> None:
        """What was held back, and the end of the line."""
        self._write(self._text.flush())
        self._write(Piece("\n", False))

    def _write(self, piece: Piece | None) -> None:
        if piece is None:
            return
        if self._console.is_terminal:
            self._console.print(styled([piece]), end="", soft_wrap=True)
        else:
            self._console.file.write(piece.text)
            self._console.file.flush()
