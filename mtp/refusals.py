"""What ``generate`` cannot do with drafting, and why: nothing that a caller asks for is ignored in silence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from mtp.past import Past
from mtp.target import Target
from mtp.traffic import TrafficLog

# What Transformers prepares for every decoding method: the round loop reads it or makes its own.
PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}

# Arguments of ``generate`` that name another way of decoding or something that drafting has no place for.
ARGUMENTS = {
    "pixel_values": "images cannot be drafted for yet; text prompts of the same model can",
    "pixel_values_videos": "videos cannot be drafted for yet; text prompts of the same model can",
    "assistant_model": "a smaller model is a drafter here: pass drafter=mtp.Assistant(model) instead",
    "custom_generate": "SpeculativeModel.generate is itself one; call the target's own generate for another",
    "inputs_embeds": "drafting needs token ids; pass input_ids",
    "negative_prompt_ids": "guidance runs the model on a second prompt at every step, which cannot be drafted for yet",
}

# Settings of a GenerationConfig, with the values that ask for nothing, and why anything else is refused.
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "beam search keeps several continuations, drafting verifies one; use the target's own"),
    "num_beam_groups": ((None, 1), "beam search keeps several continuations, drafting verifies one"),
    "constraints": ((None,), "constrained beam search keeps several continuations; use prefix_allowed_tokens_fn"),
    "force_words_ids": ((None,), "constrained beam search keeps several continuations; drafting verifies one"),
    "penalty_alpha": ((None, 0, 0.0), "contrastive search ranks several continuations; drafting verifies one"),
    "dola_layers": ((None,), "it contrasts layers at every step, which cannot be drafted for yet"),
    "prompt_lookup_num_tokens": (
        (None,),
        'looking the prompt up is a drafter here: pass drafter="ngram" instead',
    ),
    "guidance_scale": (
        (None, 1, 1.0),
        "guidance runs the model on a second prompt at every step, which cannot be drafted for yet",
    ),
    "output_attentions": ((None, False), "attention weights over a tree are not those of a text"),
    "output_hidden_states": (
        (None, False),
        "hidden states are those of the verified trees; run the target on the result",
    ),
    "token_healing": ((None, False), "heal the prompt first, with the target's own heal_tokens"),
}


def refuse_unsupported_arguments(arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` for arguments of ``generate`` that have no meaning here."""
    for name, reason in ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} is not supported with drafting: {reason}.")
    refuse_quantized_cache(arguments.get("cache_implementation"))


def refuse_unsupported_settings(config: GenerationConfig) -> None:
    """Raise ``ValueError`` for settings that would otherwise be ignored or mean something else."""
    for name, (harmless, reason) in SETTINGS.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise ValueError(f"{name}={value!r} is not supported with drafting: {reason}.")
    refuse_quantized_cache(config.cache_implementation)


def refuse_quantized_cache(implementation: str | None) -> None:
    """Raise ``ValueError`` for a cache whose numbers are others; with all other kinds the text is the same."""
    if implementation == "quantized":
        raise ValueError(
            "cache_implementation='quantized' changes the target's text; drafting keeps a cache of its own, in full "
            "precision. Leave it out."
        )


def refuse_ignored_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise for inputs of the model that would not reach it: a tree pass hands over token ids and their positions.

    Raises:
        ValueError: for other inputs (images, token types ...), for positions that do not count each row's tokens, and
            for a cache that holds something.
    """
    # Vision-language models are handed an empty collection where there is no image.
    nothing: tuple[Any, ...] = (None, {}, [], ())
    ignored = sorted(
        name
        for name, value in model_kwargs.items()
        if name not in PREPARED and (isinstance(value, Tensor) or value not in nothing)
    )
    if ignored:
        raise ValueError(
            f"Found {', '.join(ignored)}: drafting hands token ids to the target and nothing else, so the text would "
            "not depend on them. Leave them out, or use the target's own generate."
        )
    positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
    real = torch.ones_like(input_ids) if mask is None else mask
    if positions is not None and ((positions != real.cumsum(-1) - 1) & real.bool()).any():
        raise ValueError(
            "position_ids: drafting counts the tokens of each row from 0, padding left out; found other positions. "
            "Leave them out, or use the target's own generate."
        )
    for name in ("cache", "past_key_values"):  # Transformers has made an empty one; one with tokens is the caller's
        if (cache := model_kwargs.get(name)) is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name} holds {cache.get_seq_length()} tokens, but a drafter has a state too: pass past=..., as an "
                "earlier drafted call returned it, or an empty cache."
            )


def refuse_foreign_past(past: Any, target: Target) -> None:
    """Raise ``ValueError`` for a past that is not one of ours over this very target."""
    if past is None:
        return
    if not isinstance(past, Past):
        raise ValueError(
            f"past is a {type(past).__name__}; expected what an earlier drafted generate returned as past, which holds "
            "the drafter's state too. Leave it out to read the prompt anew."
        )
    if past.target is not target:
        raise ValueError("past belongs to another target: its keys and values mean nothing to this one.")


def refuse_foreign_log(traffic: Any, target: Target) -> None:
    """Raise ``ValueError`` for a log that is not one of ours over this very target."""
    if traffic is None:
        return
    if not isinstance(traffic, TrafficLog):
        raise ValueError(f"traffic is a {type(traffic).__name__}; expected an mtp.TrafficLog(folder, model.target).")
    if traffic.target is not target:
        raise ValueError("traffic logs the answers of another target: make a log for this one, in a folder of its own.")
