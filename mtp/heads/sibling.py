"""A smaller model of the target's vocabulary as the beginning of an assistant: read, checked, brought to its size."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mtp.drafters.vocabulary import local_tokenizer, refuse_other_vocabulary
from mtp.support import UnsupportedTargetError
from mtp.target import Target


def read_sibling(target: Target, path: str) -> PreTrainedModel:
    """The causal LM at ``path``, a folder or a Hub name, in float32 and with exactly as many tokens as ``target``.

    Families pad their matrices to different sizes for the same tokenizer; rows are left out or added accordingly.

    Raises:
        UnsupportedTargetError: for a model that cannot read trees.
        ValueError: for one that cannot be read or trained, or means other tokens by the same ids.
    """
    lm = _read(path)
    try:
        sibling = Target(lm)
    except UnsupportedTargetError as error:
        raise UnsupportedTargetError(f"sibling={path!r} drafts trees, which it would have to read: {error}") from error
    refuse_other_vocabulary(sibling.vocab_size, local_tokenizer(sibling), target.vocab_size, local_tokenizer(target))
    if {sibling.vocab_size, lm.get_input_embeddings().num_embeddings} != {target.vocab_size}:
        lm.resize_token_embeddings(target.vocab_size)
    return lm


def _read(path: str) -> PreTrainedModel:
    place = Path(path).expanduser()
    name = str(place) if place.exists() else path
    options = {"trust_remote_code": False}
    try:
        if getattr(AutoConfig.from_pretrained(name, **options), "quantization_config", None) is not None:
            raise ValueError("its weights are quantised, and an assistant's are trained; name it in plain precision")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"sibling={path!r} is no model that an assistant can be made of: {error}") from error
    return model
