"""A target and a drafter together, with the ``generate`` that Transformers' users know."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mtp.decode import Decoder, DecodeSettings, Row, StopRule
from mtp.drafters import Drafter, Draw, drafter_by_name
from mtp.heads import Head
from mtp.sampling import TargetSampler
from mtp.stats import AcceptanceStats
from mtp.target import Target

DEFAULT_NODES = 16
TokenListener = Callable[[int, int, bool], None]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[B, T]`` prompts and answers, as Transformers returns them.
        acceptance: counters of the run.
        kept: for each row, whether each generated token had been guessed by the drafter.
    """

    acceptance: AcceptanceStats | None = None
    kept: list[list[bool]] | None = None


class SpeculativeModel:
    """A frozen target and a drafter: the target's own text, in fewer passes of the target.

    Args:
        target: the verifier.
        drafter: the guesser; a trained head or one of ``mtp.available_drafters()``.
        tokenizer: kept beside them for convenience; may be None.
    """

    def __init__(self, target: Target, drafter: Drafter, tokenizer: Any = None):
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.lock = (
            threading.RLock()
        )  # a drafter keeps the state of one generation: those of several threads take turns
        if isinstance(drafter, Head):
            drafter.attach(target)

    @classmethod
    def from_target(cls, model: PreTrainedModel, drafter: str | Drafter, tokenizer: Any = None) -> SpeculativeModel:
        """Put a drafter (an object, or the name of one that needs no training) on a loaded causal LM."""
        return cls(Target(model), drafter_by_name(drafter) if isinstance(drafter, str) else drafter, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def default_nodes(self) -> int:
        """Nodes of a tree when the caller names none."""
        return self.drafter.config.nodes if isinstance(self.drafter, Head) else DEFAULT_NODES

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``transformers`` would, with the same arguments and the same result.

        Args:
            nodes: most nodes of a draft tree, the root included.
            drafter: another drafter for this call, an object or a name (``"none"`` decodes plainly).
            drawn: for sampling: draw the drafter's children at random and accept by rejection, instead of taking its
                likeliest tokens.  Both are exact.
            on_token: called with ``(row, token, kept)`` as soon as a token is committed, for every token in order;
                ``kept`` says whether the drafter had guessed it.  Unlike a streamer it takes batches too.

        Returns:
            ``[B, T]`` token ids, or a ``SpeculativeOutput`` with ``return_dict_in_generate=True``.

        Raises:
            ValueError: for what cannot be drafted for (beam search, scores of every step ...), saying why.
        """
        own = {name: kwargs.pop(name) for name in ("nodes", "drafter", "drawn", "on_token") if name in kwargs}
        decode = speculate(self, **own, streamer=kwargs.get("streamer"))
        return self.target.causal_lm.generate(*args, custom_generate=decode, **with_stop_strings(kwargs))


def speculate(
    model: SpeculativeModel,
    *,
    nodes: int | None = None,
    drafter: str | Drafter | None = None,
    drawn: bool = False,
    on_token: TokenListener | None = None,
    streamer: BaseStreamer | None = None,
) -> Callable[..., Any]:
    """The round loop as a decoding method for Transformers: ``lm.generate(..., custom_generate=speculate(model))``.

    Transformers prepares the generation config, logits processors and stopping criteria; they mean what they always do.
    It does not hand a streamer or a tokenizer on to a decoding method, though: name the streamer here as well, and pass
    stop strings as ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.  ``SpeculativeModel.generate`` does
    both by itself.
    """
    if drafter is None:
        drafter = model.drafter
    elif isinstance(drafter, str):
        drafter = drafter_by_name(drafter)
    if nodes is None:
        nodes = model.default_nodes
    if nodes < 1:
        raise ValueError(f"A draft tree has at least its root; found nodes={nodes}, expected 1 or more.")

    def decode(
        lm: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if lm is not model.target.causal_lm:
            raise ValueError(
                f"speculate(model) belongs to the {type(model.target.causal_lm).__name__} that model verifies with; "
                f"it was called on another {type(lm).__name__}, whose text would not be that model's."
            )
        refuse_unsupported_settings(generation_config, model_kwargs)
        refuse_ignored_inputs(input_ids, model_kwargs)
        if input_ids.shape[0] > 1 and padding_token(generation_config) is None and len(stopping_criteria) > 1:
            raise ValueError("Rows that end at different lengths need a pad_token_id (there is no end token).")
        sampler = TargetSampler(logits_processor, generation_config.do_sample, input_ids.shape[0])
        draw = Draw(temperature=generation_config.temperature or 1.0) if drawn and generation_config.do_sample else None
        decoder = Decoder(
            model.target,
            drafter,
            sampler,
            StopRule(stopping_criteria, input_ids.device),
            DecodeSettings(nodes, draw),
            on_token=_listener(streamer, on_token, input_ids.shape[0]),
        )
        padded = input_ids.tolist()
        with model.lock:
            rows = decoder.run(real_tokens(padded, model_kwargs.get("attention_mask")), padded)
        if streamer is not None:
            streamer.end()
        sequences = pad_sequences(rows, generation_config, input_ids)
        if not generation_config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=cast(torch.LongTensor, sequences), acceptance=decoder.stats, kept=[row.kept for row in rows]
        )

    return decode


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


def real_tokens(padded: list[list[int]], mask: Tensor | None) -> list[list[int]]:
    """The prompts without their padding, whichever side it is on."""
    if mask is None:
        return padded
    keep = mask.bool().tolist()
    if not all(any(row) for row in keep):
        raise ValueError("The attention mask hides all tokens of a row; every prompt needs at least one.")
    return [
        [token for token, real in zip(row, flags, strict=True) if real] for row, flags in zip(padded, keep, strict=True)
    ]


def pad_sequences(rows: list[Row], config: GenerationConfig, input_ids: Tensor) -> Tensor:
    """``[B, T]``: the rows, right-padded as Transformers pads rows that ended early."""
    longest = max(len(row.ids) for row in rows)
    pad = padding_token(config)
    return torch.tensor([row.ids + [pad] * (longest - len(row.ids)) for row in rows], device=input_ids.device)


def padding_token(config: GenerationConfig) -> int | None:
    """What rows that end early are filled with: the pad token, or as in Transformers the first end token."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    ends = config.eos_token_id
    return ends[0] if isinstance(ends, list | tuple) else ends


def refuse_unsupported_settings(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise for settings that would otherwise be ignored or mean something else."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: beam search keeps several continuations, drafting verifies one; use the "
            "target's own generate, or num_beams=1."
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name}=True is not supported with drafting yet; leave it out.")
    if getattr(config, "penalty_alpha", None):
        raise ValueError("Contrastive search (penalty_alpha) ranks several continuations; drafting verifies one.")
    for name in ("constraints", "force_words_ids"):
        if getattr(config, name, None):
            raise ValueError(f"{name} needs beam search, which keeps several continuations; drafting verifies one.")
    for name in ("prompt_lookup_num_tokens", "dola_layers"):
        if getattr(config, name, None):
            raise ValueError(f"{name} asks for another way of decoding; choose one with drafter=... instead.")
    if getattr(config, "guidance_scale", None) not in (None, 1, 1.0):
        raise ValueError(
            "guidance_scale runs the model on a second prompt at every step; it cannot be drafted for yet."
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds: drafting needs token ids; pass input_ids.")


# What Transformers prepares for every decoding method: the round loop reads it or makes its own.
PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep"}


def refuse_ignored_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise for inputs of the model that would not reach it: a tree pass hands over token ids and their positions.

    Raises:
        ValueError: for other inputs (images, token types ...), and for positions that do not count each row's tokens.
    """
    ignored = sorted(name for name, value in model_kwargs.items() if name not in PREPARED and value is not None)
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


def _listener(streamer: BaseStreamer | None, on_token: TokenListener | None, batch_size: int) -> TokenListener | None:
    """One listener for the streamer and the caller's own; None when there is neither."""
    if streamer is None:
        return on_token
    if batch_size > 1:
        raise ValueError(f"A streamer takes one sequence; found a batch of {batch_size}.")

    def listen(row: int, token: int, kept: bool) -> None:
        streamer.put(torch.tensor([token]))
        if on_token is not None:
            on_token(row, token, kept)

    return listen
