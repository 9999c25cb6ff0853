"""What a server's reply says: which tokens the target wrote, as exact ids or not at all.

Ids are those that a server gives (``return_token_ids`` of vLLM and SGLang, or of older vLLM
``return_tokens_as_token_ids``), or token texts of ``logprobs`` where the tokenizer leaves no doubt which ids they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from train.data import DataError

TOKEN_ID = "token_id:"  # how vLLM spells ids in the place of token texts
FINISHED = ("stop", "length")


def first_choice(reply: dict[str, Any]) -> dict[str, Any]:
    """The only answer in a reply of ``/completions``.

    Raises:
        DataError: if there is none.
    """
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise DataError(f"A reply has no choices: {json.dumps(reply)[:200]}; expected that of /v1/completions.")
    choice: dict[str, Any] = choices[0]
    return choice


def unfinished(reply: dict[str, Any]) -> str:
    """What is wrong with an answer that was not written to its end, in words; empty where it was."""
    choices = reply.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else "stop"
        if reason not in FINISHED:  # the server was restarted or overfull: "abort", "error", null
            return f"an answer ended with finish_reason {reason!r}, expected {' or '.join(FINISHED)}"
    return ""


def token_ids(choice: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that were generated, from whatever the server gives that leaves no doubt about them.

    Raises:
        DataError: where nothing does.
    """
    if choice.get("token_ids") is not None:
        return _integers(choice["token_ids"])
    tokens = (choice.get("logprobs") or {}).get("tokens")
    if tokens is None:
        raise DataError(
            "The server gives text without token ids, and the same text has many spellings in tokens. Serve the target "
            "with vLLM 0.10.2 or newer, or with another server that gives token ids or logprobs in /v1/completions."
        )
    if all(token.startswith(TOKEN_ID) for token in tokens):
        return _integers([token.removeprefix(TOKEN_ID) for token in tokens])
    return spelled(tokens, choice.get("text", ""), tokenizer)


def _integers(tokens: Sequence[Any]) -> list[int]:
    try:
        return [int(token) for token in tokens]
    except (TypeError, ValueError) as error:
        raise DataError(f"A reply has no token ids but {str(tokens)[:100]} where they should be.") from error


def check_text(ids: Sequence[int], text: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse ids that the target's tokenizer reads as another text than the server's own: another model's ids.

    Only letters and digits are compared: spaces, special tokens and beginnings of characters are shown differently.

    Raises:
        DataError: with both texts.
    """
    if not isinstance(text, str) or not text:  # a server that was told to give ids alone
        return
    # The last one may be an end token, which is not shown.
    read = [
        str(tokenizer.decode(list(shown), skip_special_tokens=skip))
        for shown in (ids, ids[:-1])
        for skip in (True, False)
    ]
    if _letters(text) not in map(_letters, read):
        raise DataError(
            f"The server's text is {text[:60]!r}, but its token ids read {read[0][:60]!r} by the target's tokenizer: "
            "it serves a model with another one. Serve the target itself."
        )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def spelled(tokens: Sequence[str], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of token texts, where tokenising their text again gives these very tokens.

    Raises:
        DataError: where it does not.
    """
    ids = list(tokenizer(text, add_special_tokens=False).input_ids)
    again = [str(tokenizer.decode([token])) for token in ids]
    if "".join(tokens) != text or again != list(tokens):
        raise DataError(
            f"The server gives token texts, and {text[:60]!r} does not come back as the tokens that it generated "
            f"({list(tokens)[:8]} there, {again[:8]} here). Ask a server that gives token ids (vLLM 0.10.2 or newer)."
        )
    return ids


def with_end(ids: list[int], choice: dict[str, Any], end_ids: set[int]) -> list[int]:
    """``ids`` and the end token, which many servers leave out.

    Raises:
        DataError: if an end token stopped the answer and nothing says which.
    """
    if choice.get("finish_reason") != "stop" or (ids and ids[-1] in end_ids):
        return ids
    stopped_by = choice.get("stop_reason")
    if stopped_by in end_ids:
        return [*ids, stopped_by]
    if len(end_ids) == 1:
        return [*ids, *end_ids]
    raise DataError(
        f"An answer was stopped by an end token, and the server does not say by which of {sorted(end_ids)}. Ask a "
        "server that gives token ids (vLLM 0.10.2 or newer)."
    )
