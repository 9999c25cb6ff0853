"""Arguments of ``generate`` that Transformers tests for itself mean the same here, or are refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import pytest
import torch
from talking import byte_tokenizer
from tiny import PAD, ClutteringDrafter, OracleDrafter, padded, random_prompts, tiny_model
from torch import Tensor
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)

import mtp
from mtp.model import SpeculativeModel
from mtp.target import Target

NEW = 16
ONE = random_prompts([5], seed=3)
THREE = random_prompts([4, 9, 1], seed=4)


@cache
def target_of(architecture: str = "llama") -> Target:
    return Target(tiny_model(architecture))


def both(inputs: dict[str, Any], target: Target | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """What Transformers generates and what is generated here, with drafts that are right up to four tokens deep."""
    target = target or target_of()
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    expected = target.causal_lm.generate(**inputs, **settings)
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1
    drafter = OracleDrafter(expected[:, width:].tolist(), lengths=[4, 0, 2], clutter=3)
    return expected, SpeculativeModel(target, drafter).generate(**inputs, **settings)


def speculative(model: PreTrainedModel | None = None) -> SpeculativeModel:
    return SpeculativeModel(target_of() if model is None else Target(model), ClutteringDrafter(nodes=6))


# ---- settings -----------------------------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.8},
    "encoder n-grams": {"encoder_no_repeat_ngram_size": 2},
    "suppressed at the beginning": {"begin_suppress_tokens": [15, 16]},
    "renormalised": {"renormalize_logits": True, "repetition_penalty": 1.4},
    "invalid values removed": {"remove_invalid_values": True},
    "min_length": {"min_length": 16, "eos_token_id": [4, 9, 14]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "a time that is over": {"max_time": 0.0},
    "a time that is not over": {"max_time": 1000.0},
    "no cache": {"use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "prefill in chunks": {"prefill_chunk_size": 2},
    "logits_to_keep": {"logits_to_keep": 1},
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_setting_gives_the_text_that_it_gives_in_transformers(name: str) -> None:
    expected, found = both(padded(THREE), **SETTINGS[name])
    assert found.tolist() == expected.tolist()


def test_the_targets_own_generation_config_is_followed() -> None:
    model = tiny_model("llama")
    plain, _ = both(padded(THREE), Target(model))
    model.generation_config.repetition_penalty = 1.7
    expected, found = both(padded(THREE), Target(model))
    assert found.tolist() == expected.tolist() != plain.tolist()


class AfterTheLast(LogitsProcessor):
    """Favours the token after the last one, and writes into the scores that it was given."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(scores.shape[0])
        scores[rows, (input_ids[:, -1] + 1) % scores.shape[1]] += 2.0
        return scores


@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.3}], ids=["alone", "behind a setting's"])
def test_the_callers_own_processors_are_applied(penalty: dict[str, float]) -> None:
    expected, found = both(padded(THREE), logits_processor=LogitsProcessorList([AfterTheLast()]), **penalty)
    assert found.tolist() == expected.tolist()
    assert expected.tolist() != both(padded(THREE), **penalty)[0].tolist()


def test_a_processor_of_the_callers_stands_in_for_the_settings_own() -> None:
    mine = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    expected, found = both(padded(THREE), logits_processor=mine, repetition_penalty=1.1)
    assert found.tolist() == expected.tolist()


# ---- inputs -------------------------------------------------------------------------------------------------------


def test_without_a_prompt_the_text_begins_with_the_first_token_there_is() -> None:
    expected, found = both({}, bos_token_id=3)
    assert found.tolist() == expected.tolist()


def test_a_mask_may_hide_tokens_in_the_middle_of_a_prompt() -> None:
    inputs = {"input_ids": torch.tensor(ONE), "attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}
    expected, found = both(inputs)
    assert found.tolist() == expected.tolist() != both(padded(ONE))[0].tolist()


def test_an_empty_cache_and_the_usual_positions_may_be_handed_in() -> None:
    positions = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 2, 3], list(range(9)), [0] * 9])
    expected, found = both({**padded(THREE), "position_ids": positions})
    assert found.tolist() == expected.tolist()
    plain = both(padded(ONE))[0]
    assert (
        speculative()
        .generate(**padded(ONE), past_key_values=DynamicCache(), max_new_tokens=NEW, do_sample=False)
        .equal(plain)
    )


WRONG: dict[str, dict[str, Any]] = {
    "no token to generate": {"max_new_tokens": 0},
    "several greedy texts of one prompt": {"num_return_sequences": 2},
    "a length below the prompt's": {"max_length": 3, "max_new_tokens": None},
    "a name that nobody knows": {"number_of_beams": 2},
    "a mask of four dimensions": {"attention_mask": torch.ones(1, 1, 5, 5)},
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_argument_is_refused_in_transformers_words(name: str) -> None:
    settings = {**padded(ONE), "max_new_tokens": NEW, "do_sample": False, **WRONG[name]}
    with pytest.raises(ValueError) as expected:
        target_of().causal_lm.generate(**settings)
    with pytest.raises(ValueError) as found:
        speculative().generate(**settings)
    assert str(found.value) == str(expected.value)


def test_a_row_whose_mask_hides_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="hides all tokens of a row"):
        speculative().generate(torch.tensor(ONE), attention_mask=torch.zeros(1, 5, dtype=torch.long), max_new_tokens=2)


UNFIT: dict[str, tuple[str, dict[str, Any]]] = {
    "position_ids": ("gpt2", {"position_ids": torch.arange(5)[None] + 7}),
    "token_type_ids": ("gpt2", {"token_type_ids": torch.ones(1, 5, dtype=torch.long)}),
    "inputs_embeds": ("llama", {"inputs_embeds": torch.ones(1, 5, 32)}),
    "pixel_values": ("gemma3_vision", {"pixel_values": torch.ones(1, 3, 8, 8)}),
    "force_words_ids": ("llama", {"force_words_ids": [[5]]}),
    "penalty_alpha": ("llama", {"penalty_alpha": 0.5}),
    "dola_layers": ("llama", {"dola_layers": "high"}),
}


@pytest.mark.parametrize("name", sorted(UNFIT))
def test_what_a_tree_pass_would_ignore_is_refused_by_name(name: str) -> None:
    architecture, settings = UNFIT[name]
    model = SpeculativeModel(target_of(architecture), ClutteringDrafter(nodes=6))
    with pytest.raises(ValueError, match=name):
        model.generate(torch.tensor(ONE), max_new_tokens=4, do_sample=False, **settings)


# ---- streamers and pipelines ---------------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()


@cache
def talking() -> tuple[PreTrainedModel, Tensor, str]:
    """A model with a tokenizer, a prompt, and the text that Transformers puts behind it."""
    model = tiny_model(vocab=len(TOKENIZER))
    model.generation_config.pad_token_id = PAD
    ids = TOKENIZER("the cat and", return_tensors="pt")["input_ids"]
    answer = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :]
    return model, ids, TOKENIZER.decode(answer)


def stream(streamer: Any) -> None:
    model, ids, _ = talking()
    speculative(model).generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamer)


def test_a_text_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    stream(TextStreamer(TOKENIZER, skip_prompt=True))
    assert capsys.readouterr().out == talking()[2] + "\n"


def test_an_iterator_hands_over_the_text_from_another_thread() -> None:
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    worker = Thread(target=stream, args=(streamer,))
    worker.start()
    assert "".join(streamer) == talking()[2]
    worker.join()


def test_an_asynchronous_iterator_hands_over_the_text() -> None:
    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
        worker = Thread(target=stream, args=(streamer,))
        worker.start()
        pieces = [piece async for piece in streamer]
        worker.join()
        return "".join(pieces)

    assert asyncio.run(read()) == talking()[2]


MESSAGES = [{"role": "user", "content": "the hat"}]


@pytest.mark.parametrize("prompt", ["the cat and", ["the cat", "the end of"], MESSAGES], ids=["text", "batch", "chat"])
def test_a_text_generation_pipeline_says_the_same_through_the_round_loop(prompt: Any) -> None:
    model, _, _ = talking()
    write = pipeline("text-generation", model=model, tokenizer=TOKENIZER)
    settings = {"max_new_tokens": NEW, "do_sample": False}
    ours: Callable[..., Any] = mtp.speculate(speculative(model))
    assert write(prompt, custom_generate=ours, **settings) == write(prompt, **settings)
