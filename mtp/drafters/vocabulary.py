"""Do two models mean the same by the same token ids?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mtp.target import Target


def local_tokenizer(target: Target) -> Any:
    """The tokenizer lying beside a model's weights on this machine; None where there is none."""
    name = getattr(target.causal_lm.config, "name_or_path", "")
    if not name or (Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file()):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, ImportError):
        return None


def refuse_other_vocabulary(drafts: int, ours: Any, verifies: int, theirs: Any) -> None:
    """Raise unless an assistant's token ids are the target's.

    Where both tokenizers are known, every id that both know has to be the same token in both; the matrices may have
    different numbers of rows beyond (families pad them differently, and chat models have some tokens more).  Where they
    are not known, equal sizes have to do.

    Args:
        drafts: rows of the assistant's output matrix; verifies: of the target's.
        ours: the assistant's tokenizer, or None; theirs: the target's.

    Raises:
        ValueError: saying where they differ.
    """
    if ours is not None and theirs is not None:
        if (difference := first_difference(ours.get_vocab(), theirs.get_vocab())) is not None:
            token, there, here = difference
            raise ValueError(
                f"The assistant has another vocabulary: token id {token} is {here!r} to it and {there!r} to the "
                "target. Expected a model with the target's tokenizer, for example a smaller one of its family."
            )
        return
    if drafts != verifies:
        raise ValueError(
            f"The assistant has {drafts} tokens and the target {verifies}, and without both tokenizers it cannot be "
            "told whether one of them is only padded. Pass Assistant(model, tokenizer=..., target_tokenizer=...), or "
            "use a model of the target's vocabulary."
        )


def first_difference(ours: dict[str, int], theirs: dict[str, int]) -> tuple[int, str, str] | None:
    """The lowest id that stands for different tokens, with the target's and the assistant's; None for no such id."""
    here, there = ({number: token for token, number in vocabulary.items()} for vocabulary in (ours, theirs))
    both = sorted(here.keys() & there.keys())
    return next(((number, there[number], here[number]) for number in both if here[number] != there[number]), None)
