"""Which targets can be verified in trees exactly, and why the others cannot.

A tree pass differs from a plain one in three ways, and a model must not depend on any of them.  Branches lie side by
side in one sequence: a state that runs from token to token would mix them up.  A token's slot in the cache is not its
position in the text: everything must be computed from positions.  And the text grows by pieces of any size: what was
computed for its first tokens must still hold when it has become longer.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mtp.errors import ExplainedError

# Layers whose pattern of attention is a mask over positions, which is all that tree attention needs to know of it.
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}

# Scalings whose angles depend on how long the text is.  They are constant up to a limit; see ``position_limit``.
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")

# Architectures that take their attention function from the interface without declaring it.
UNDECLARED_INTERFACE = {"stablelm"}

# Architectures that compute attention by themselves, but from nothing else than the mask that they are given.
MASKED_BY_ARGUMENT = {"falcon"}

# Architectures that compute attention by themselves, and where they use a token's slot in doing so.
SLOT_DEPENDENT = {
    "bloom": "adds ALiBi biases by a key's slot in the cache",
    "mpt": "adds ALiBi biases by a key's slot in the cache",
    "gpt_neo": "cuts its local windows by slots in the cache",
}


class UnsupportedTargetError(ExplainedError):
    """The model cannot be verified in trees; the message says why and what to do."""


def refuse_unsupported(model: PreTrainedModel, config: Any) -> None:
    """Raise ``UnsupportedTargetError`` for a model whose trees could not be verified exactly.

    Args:
        config: the language model's own config (``model.config`` or its text part).
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedTargetError(f"{name} is an encoder-decoder; mtp drafts for decoder-only causal models.")
    _refuse_states(model, config)
    if getattr(config, "alibi", False):
        raise UnsupportedTargetError(
            f"{name} adds ALiBi biases by a key's slot in the cache, but the nodes of a tree have slots that are not "
            "their positions. Expected rotary or learned positions."
        )
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", [1])):
        raise UnsupportedTargetError(
            f"{name} scales the queries of its layers without rotary positions by a token's slot in the cache "
            "(config.attn_temperature_tuning), but the nodes of a tree have slots that are not their positions."
        )
    if reason := SLOT_DEPENDENT.get(config.model_type):
        raise UnsupportedTargetError(
            f"{name} {reason}, but the nodes of a tree have slots that are not their positions."
        )
    declared = getattr(model, "_supports_attention_backend", False)
    if not declared and config.model_type not in UNDECLARED_INTERFACE | MASKED_BY_ARGUMENT:
        raise UnsupportedTargetError(
            f"{name} does not take its attention function from Transformers' AttentionInterface, so tree masks cannot "
            "reach it. Expected an architecture with `_supports_attention_backend = True`."
        )


def _refuse_states(model: PreTrainedModel, config: Any) -> None:
    """Refuse recurrent, convolutional and linear layers."""
    name = type(model).__name__
    unknown = sorted(set(getattr(config, "layer_types", None) or []) - SUPPORTED_LAYER_TYPES)
    if getattr(model, "_is_stateful", False):
        kinds = f" (layers of type {', '.join(unknown)})" if unknown else ""
        raise UnsupportedTargetError(
            f"{name} has a recurrent state{kinds}: a state that runs from token to token cannot hold several branches "
            "of a tree at once and cannot be rolled back after a rejected draft. Expected a target with attention only."
        )
    if unknown:
        raise UnsupportedTargetError(
            f"{name} has layers of type {', '.join(unknown)}; tree attention knows "
            f"{', '.join(sorted(SUPPORTED_LAYER_TYPES))}. Recurrent, convolutional and linear layers cannot hold "
            "several branches of a tree at once."
        )


def position_limit(config: Any) -> int | None:
    """The longest text whose rotary angles are the same as those of every shorter text; None for no limit.

    ``longrope`` and ``dynamic`` scalings turn all keys anew when a text grows past the length that the model was first
    trained on; keys in the cache would not fit those that come later.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    limits = [
        part.get("original_max_position_embeddings") or config.max_position_embeddings
        for part in parts
        if part.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
    return min(limits, default=None)
