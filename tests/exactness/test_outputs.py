"""What ``generate`` returns beside the text, and what it takes beside the prompt, against Transformers' own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from architectures import CORE
from tiny import FOUR, VOCAB, OracleDrafter, padded, tiny_head, tiny_model
from torch import Tensor
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import mtp
from mtp.compat import cache_argument
from mtp.drafters import Drafter
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.past import Past
from mtp.target import Target

FAMILIES = sorted(HEADS)
NEW = 14
ONE = FOUR[1:2]


@cache
def lm_of(architecture: str = "llama") -> PreTrainedModel:
    return tiny_model(architecture)


def plain(prompts: list[list[int]], **settings: Any) -> Any:
    return lm_of().generate(**padded(prompts), **{"max_new_tokens": NEW, "do_sample": False, **settings})


def oracle(prompts: list[list[int]], **settings: Any) -> SpeculativeModel:
    """A drafter that guesses right often, so that settings have to hold inside accepted blocks."""
    truths = plain(prompts, **{**settings, "return_dict_in_generate": False})
    width = max(map(len, prompts))
    return SpeculativeModel(Target(lm_of()), OracleDrafter(truths[:, width:].tolist(), lengths=[3, 1, 5], clutter=4))


def drafted(model: SpeculativeModel, prompts: list[list[int]], **settings: Any) -> Any:
    return model.generate(**padded(prompts), **{"max_new_tokens": NEW, "do_sample": False, **settings})


# ---- scores and logits --------------------------------------------------------------------------------------------

SCORED = {
    "plain": {},
    "penalty": {"repetition_penalty": 1.5},
    "temperature": {"do_sample": True, "temperature": 0.7, "top_k": 1},
    "early ends": {"eos_token_id": [4, 9, 14]},
}


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "four"])
@pytest.mark.parametrize("name", sorted(SCORED))
def test_scores_and_logits_are_those_of_transformers(name: str, prompts: list[list[int]]) -> None:
    settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **SCORED[name]}
    expected = plain(prompts, **settings)
    found = drafted(oracle(prompts, **SCORED[name]), prompts, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.scores) == len(found.logits) == len(expected.scores)
    width = max(map(len, prompts))
    for row in range(len(prompts)):
        ends = [at for at, token in enumerate(found.sequences[row, width:].tolist()) if token in (4, 9, 14)]
        length = ends[0] + 1 if name == "early ends" and ends else len(found.scores)
        for step in range(length):
            torch.testing.assert_close(found.scores[step][row], expected.scores[step][row], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.logits[step][row], expected.logits[step][row], atol=1e-5, rtol=1e-5)
        assert all(not found.scores[step][row].any() for step in range(length, len(found.scores)))


def test_transition_scores_can_be_computed() -> None:
    settings = {"return_dict_in_generate": True, "output_scores": True}
    found, expected = drafted(oracle(ONE), ONE, **settings), plain(ONE, **settings)
    transition = [
        lm_of().compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (found, expected)
    ]
    torch.testing.assert_close(transition[0], transition[1], atol=1e-5, rtol=1e-5)


def test_scores_are_not_kept_unless_asked_for() -> None:
    found = drafted(oracle(ONE), ONE, return_dict_in_generate=True)
    assert found.scores is None
    assert found.logits is None


# ---- seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["walk", "rejection", "traversal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_text(family: str, rule: str) -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head(family, target))

    def text(seed: int, **how: Any) -> list[list[int]]:
        settings = {"do_sample": True, "temperature": 1.5, "rule": rule, **how}
        return drafted(model, FOUR, **settings).tolist()

    before = torch.get_rng_state()
    seeded = [text(0, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert torch.equal(torch.get_rng_state(), before), "a generator of one's own leaves the default one alone"
    torch.manual_seed(3)
    first = text(0)
    torch.manual_seed(3)
    assert text(0) == first


# ---- continuing a conversation ------------------------------------------------------------------------------------


class Reads:
    """Counts the tokens of every pass of a target."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch):
        self.lengths: list[int] = []
        forward = target.forward

        def counting(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.lengths.append(ids.shape[1])
            return forward(ids, *args, **kwargs)

        monkeypatch.setattr(target, "forward", counting)


def fresh(lm: PreTrainedModel, prompt: Tensor) -> list[int]:
    return lm.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)[0].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "none"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_conversation_is_continued_exactly_and_not_read_again(
    architecture: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = lm_of(architecture)
    target = Target(lm)
    model = SpeculativeModel(
        target, mtp.drafters.drafter_by_name("none") if family == "none" else tiny_head(family, target)
    )
    reads = Reads(target, monkeypatch)
    past, text = None, FOUR[1]
    for turn in range(3):
        prompt = torch.tensor([text])
        reads.lengths.clear()
        out = model.generate(prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, past=past)
        assert out.sequences[0].tolist() == fresh(lm, prompt), f"turn {turn}"
        if past is not None:
            assert reads.lengths[0] < 12, "only what is new, and the last round's tokens, are read"
        past = out.past
        text = [*out.sequences[0].tolist(), *FOUR[2][: 3 + turn]]
    assert len(past) >= len(text) - 8


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keep", [0, 1, 5, 20])
def test_a_text_that_goes_on_differently_is_continued_from_there(family: str, keep: int) -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head(family, target))
    out = drafted(model, ONE, return_dict_in_generate=True)
    text = out.sequences[0].tolist()
    changed = [*text[:keep], 1 + text[keep] % (VOCAB - 1), *text[keep + 1 : keep + 4]]
    prompt = torch.tensor([changed])
    again = model.generate(prompt, max_new_tokens=NEW, do_sample=False, past=out.past)
    assert again[0].tolist() == fresh(lm_of(), prompt)


def test_what_is_kept_agrees_with_the_text_and_with_a_fresh_prefill() -> None:
    """Every stop: length limit, and an end token inside an accepted block."""
    for settings in ({}, {"eos_token_id": [4, 9, 14]}, {"max_new_tokens": 1}):
        out = drafted(oracle(ONE, **settings), ONE, return_dict_in_generate=True, **settings)
        past = out.past
        assert past.ids == out.sequences[0, : len(past)].tolist()
        assert out.sequences.shape[1] - 1 <= len(past) + 1
        reference = DynamicCache()
        lm_of()(torch.tensor([past.ids]), use_cache=True, **{cache_argument(type(lm_of())): reference})
        for ours, theirs in zip(past._cache.tree_layers, reference.layers, strict=True):
            torch.testing.assert_close(ours.keys[:, :, : len(past)], theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values[:, :, : len(past)], theirs.values, atol=1e-5, rtol=1e-5)


def test_another_drafter_reads_the_text_anew() -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    out = drafted(model, ONE, return_dict_in_generate=True)
    prompt = torch.tensor([[*out.sequences[0].tolist(), 5, 6]])
    other: Drafter = tiny_head("medusa", target)
    again = model.generate(prompt, max_new_tokens=NEW, do_sample=False, drafter=other, past=out.past)
    assert again[0].tolist() == fresh(lm_of(), prompt)


def test_a_drafter_that_is_named_anew_at_every_turn_goes_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SpeculativeModel.from_target(lm_of(), drafter="none")
    first = drafted(model, ONE, return_dict_in_generate=True, drafter="none")
    prompt = torch.tensor([[*first.sequences[0].tolist(), 5, 6]])
    reads = Reads(model.target, monkeypatch)
    again = model.generate(prompt, max_new_tokens=NEW, do_sample=False, drafter="none", past=first.past)
    assert again[0].tolist() == fresh(lm_of(), prompt)
    assert reads.lengths[0] == 3


def test_an_interrupted_generation_leaves_a_past_that_is_still_right() -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    past = drafted(model, ONE, return_dict_in_generate=True).past
    prompt = torch.tensor([[*ONE[0], 7]])

    def interrupt(row: int, token: int, kept: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, max_new_tokens=NEW, do_sample=False, past=past, on_token=interrupt)
    again = model.generate(prompt, max_new_tokens=NEW, do_sample=False, past=past)
    assert again[0].tolist() == fresh(lm_of(), prompt)


def test_a_past_that_does_not_belong_here_is_refused() -> None:
    model = oracle(ONE)
    with pytest.raises(ValueError, match=r"DynamicCache.*earlier drafted generate"):
        drafted(model, ONE, past=DynamicCache())
    used = DynamicCache()
    lm_of()(torch.tensor([ONE[0][:3]]), use_cache=True, **{cache_argument(type(lm_of())): used})
    with pytest.raises(ValueError, match=r"holds 3 tokens.*past=\.\.\."):
        lm_of().generate(torch.tensor(ONE), custom_generate=mtp.speculate(model), past_key_values=used)
    with pytest.raises(ValueError, match="another target"):
        drafted(model, ONE, past=Past(Target(lm_of("gpt2"))))
    with pytest.raises(ValueError, match="batch of 4"):
        drafted(model, FOUR, past=Past(model.target))


# ---- processors and criteria that keep something ------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "four"])
def test_a_watermark_that_remembers_its_contexts_is_exact(prompts: list[list[int]]) -> None:
    settings = {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)}
    expected = plain(prompts, **settings)
    assert drafted(oracle(prompts, **settings), prompts, **settings).tolist() == expected.tolist()


class Alternating(LogitsProcessor):
    """A grammar with a state: odd and even tokens in turn, whatever the ids say."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = -torch.inf
        return scores


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "four"])
def test_a_processor_with_a_state_of_its_own_is_asked_once_a_token_in_order(prompts: list[list[int]]) -> None:
    expected = plain(prompts, logits_processor=LogitsProcessorList([Alternating()])).tolist()
    model = oracle(prompts, logits_processor=LogitsProcessorList([Alternating()]))
    mine = Alternating()
    assert drafted(model, prompts, logits_processor=LogitsProcessorList([mine])).tolist() == expected
    assert mine.calls <= NEW + 5, "the last block may have been longer than the text"


def test_a_rule_that_would_mix_up_the_tokens_of_a_state_is_refused() -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    settings = {"do_sample": True, "logits_processor": LogitsProcessorList([Alternating()])}
    for rule in ("walk", "rejection"):
        drafted(model, ONE, rule=rule, **settings)
    for rule in ("traversal", "typical"):
        with pytest.raises(ValueError, match=f"Alternating.*{rule}.*another order"):
            drafted(model, ONE, rule=rule, **settings)


def test_a_lossy_rule_says_so_and_has_to_be_asked_for_by_name() -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    settings = {"do_sample": True, "return_dict_in_generate": True}
    assert any("lossy" in note for note in drafted(model, ONE, rule="typical", **settings).acceptance.notes)
    for rule in set(mtp.available_rules()) - {"typical"}:
        assert not drafted(model, ONE, rule=rule, **settings).acceptance.notes
    with pytest.raises(ValueError, match=r"rule='typicl'.*Did you mean 'typical'"):
        drafted(model, ONE, rule="typicl", **settings)


class Uncopyable(Alternating):
    def __deepcopy__(self, memo: Any) -> Uncopyable:
        raise TypeError("holds a handle")


def test_a_processor_that_cannot_be_copied_is_refused_in_batches_only() -> None:
    expected = plain(ONE, logits_processor=LogitsProcessorList([Alternating()])).tolist()
    model = oracle(ONE, logits_processor=LogitsProcessorList([Alternating()]))
    assert drafted(model, ONE, logits_processor=LogitsProcessorList([Uncopyable()])).tolist() == expected
    with pytest.raises(ValueError, match=r"Uncopyable.*one by one"):
        drafted(model, FOUR, logits_processor=LogitsProcessorList([Uncopyable()]))


class EndsAt(StoppingCriteria):
    """Each row of the batch ends after a number of tokens of its own."""

    def __init__(self, lengths: list[int]):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.lengths <= input_ids.shape[1]


def test_a_criterion_that_tells_rows_apart_sees_each_at_its_own_place() -> None:
    # Transformers pads ended rows only where there is an end token, so there is one here (which nobody says).
    settings = {"stopping_criteria": [EndsAt([13, 20, 15, 12])], "eos_token_id": 2, "suppress_tokens": [2]}
    expected = plain(FOUR, **settings).tolist()
    assert drafted(oracle(FOUR, **settings), FOUR, **settings).tolist() == expected


# ---- several answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", CORE)
def test_several_answers_to_one_prompt(architecture: str) -> None:
    target = Target(lm_of(architecture))
    model = SpeculativeModel(target, tiny_head(FAMILIES[0], target))
    out = drafted(model, ONE, do_sample=True, num_return_sequences=3, temperature=1.5)
    assert out.shape == (3, len(ONE[0]) + NEW)
    assert len({tuple(row) for row in out.tolist()}) > 1


# ---- what is drawn from -------------------------------------------------------------------------------------------

WARPERS: dict[str, tuple[dict[str, Any], list[LogitsProcessor]]] = {
    "top_p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min_p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "typical_p": ({"typical_p": 0.6}, [TypicalLogitsWarper(0.6)]),
    "top_k, epsilon": (
        {"top_k": 9, "epsilon_cutoff": 0.05},
        [TopKLogitsWarper(9), EpsilonLogitsWarper(0.05)],
    ),
    "penalty": (
        {"repetition_penalty": 1.4, "top_p": 0.8},
        [RepetitionPenaltyLogitsProcessor(1.4), TopPLogitsWarper(0.8)],
    ),
}


@pytest.mark.parametrize("rule", ["walk", "rejection", "traversal"])
@pytest.mark.parametrize("name", sorted(WARPERS))
def test_sampled_tokens_are_drawn_from_the_targets_distribution_as_it_was_asked_for(name: str, rule: str) -> None:
    """At every token of a sampled text the scores are what the stock model and the warpers give there."""
    settings, processors = WARPERS[name]
    warm = TemperatureLogitsWarper(1.3)
    order = [p for p in processors if isinstance(p, RepetitionPenaltyLogitsProcessor)]
    order += [warm, *(p for p in processors if p not in order)]
    target = Target(lm_of())
    out = drafted(
        SpeculativeModel(target, tiny_head("eagle3", target)),
        ONE,
        **{"do_sample": True, "temperature": 1.3, "top_k": 0, "rule": rule, **settings},
        output_scores=True,
        return_dict_in_generate=True,
    )
    width = len(ONE[0])
    logits = lm_of()(out.sequences).logits[0]
    for step, scores in enumerate(out.scores):
        expected = LogitsProcessorList(order)(out.sequences[:, : width + step], logits[width + step - 1 : width + step])
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert scores[0, out.sequences[0, width + step]] > -torch.inf
