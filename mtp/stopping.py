"""Stop strings, on their way through Transformers to a decoding method."""

from __future__ import annotations

import copy
from typing import Any

from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria


def with_stop_strings(arguments: dict[str, Any]) -> dict[str, Any]:
    """``generate``'s arguments with ``stop_strings`` and ``tokenizer`` turned into a stopping criterion.

    Transformers drops the tokenizer on the way to a decoding method, and then misses it.
    """
    config = arguments.get("generation_config")
    strings = arguments.get("stop_strings") or getattr(config, "stop_strings", None)
    if not strings:
        return {name: value for name, value in arguments.items() if name != "stop_strings"}
    tokenizer = arguments.get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need the tokenizer that spells them: pass tokenizer=... as well.")
    criteria = [*(arguments.get("stopping_criteria") or []), StopStringCriteria(tokenizer, strings)]
    kept = {name: value for name, value in arguments.items() if name not in ("stop_strings", "tokenizer")}
    if config is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
        kept["generation_config"] = config
    return {**kept, "stopping_criteria": StoppingCriteriaList(criteria)}
