"""The public `generate` against Transformers' own: token for token when greedy, in distribution when sampling."""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, CORE, LOCAL, PAD, POSITIONS
from scipy.stats import chisquare
from talking import letters
from tiny import (
    FOUR,
    VOCAB,
    ClutteringDrafter,
    OracleDrafter,
    padded,
    random_prompts,
    tiny_head,
    tiny_model,
)
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.streamers import BaseStreamer

import mtp
from mtp.drafters import Budget, Drafter, Draw, MixedDrafter, NgramDrafter
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree

FAMILIES = sorted(HEADS)
NEW = 20
ONE = random_prompts([5], seed=3)


@cache
def model_of(architecture: str) -> PreTrainedModel:
    return tiny_model(architecture)


@cache
def speculative(architecture: str, family: str) -> SpeculativeModel:
    target = Target(model_of(architecture))
    return SpeculativeModel(target, tiny_head(family, target))


def answers(sequences: Tensor, width: int) -> list[list[int]]:
    """Generated tokens of each row, padding after them included."""
    return sequences[:, width:].tolist()


@cache
def _reference(architecture: str, prompts: tuple[tuple[int, ...], ...], settings: str) -> list[list[int]]:
    batch = padded(prompts)
    kwargs = {"max_new_tokens": NEW, **eval(settings)}
    return answers(model_of(architecture).generate(**batch, do_sample=False, **kwargs), batch["input_ids"].shape[1])


def reference(architecture: str, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """What Transformers generates greedily behind left-padded prompts."""
    return _reference(architecture, tuple(map(tuple, prompts)), repr(settings))


def ours(model: SpeculativeModel, prompts: list[list[int]], side: str = "left", **settings: Any) -> list[list[int]]:
    batch = padded(prompts, side)
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **settings}
    return answers(model.generate(**batch, **kwargs), batch["input_ids"].shape[1])


def truths(architecture: str, prompts: list[list[int]]) -> list[list[int]]:
    return reference(architecture, prompts, max_new_tokens=NEW + 8)


# ---- greedy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("architecture", CORE)
def test_greedy_output_equals_transformers(architecture: str, family: str) -> None:
    model = speculative(architecture, family)
    assert ours(model, ONE) == reference(architecture, ONE)
    for side in ("left", "right"):
        assert ours(model, FOUR, side) == reference(architecture, FOUR), side


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_output_equals_transformers_when_many_guesses_are_right(architecture: str) -> None:
    """Ragged acceptance, paths scattered over the staged slots, wrong branches beside them."""
    drafter = OracleDrafter(truths(architecture, FOUR), lengths=[3, 0, 5, 1], clutter=6)
    model = SpeculativeModel(Target(model_of(architecture)), drafter)
    batch = padded(FOUR)
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert answers(out.sequences, batch["input_ids"].shape[1]) == reference(architecture, FOUR)
    assert out.acceptance.mean_accepted_length > 2


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_greedy_output_equals_transformers_when_guesses_are_noise(architecture: str) -> None:
    model = SpeculativeModel(Target(model_of(architecture)), ClutteringDrafter(nodes=12))
    assert ours(model, FOUR) == reference(architecture, FOUR)


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": [3, 9]},
    "several end tokens": {"eos_token_id": [4, 9, 14]},
    "max_length": {"max_length": 17, "max_new_tokens": None},
    "bad words": {"bad_words_ids": [[9], [4, 11]]},
    "sequence bias": {"sequence_bias": [[[9, 11], -4.0], [[3], 2.0]]},
    "forced end": {"forced_eos_token_id": 7},
    "suppressed tokens": {"suppress_tokens": [9, 3]},
    "exponential decay": {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_greedy_settings_mean_what_they_mean_in_transformers(name: str, family: str) -> None:
    model, settings = speculative("llama", family), SETTINGS[name]
    assert ours(model, ONE, **settings) == reference("llama", ONE, **settings)
    assert ours(model, FOUR, **settings) == reference("llama", FOUR, **settings)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_settings_hold_inside_accepted_blocks(name: str) -> None:
    settings = SETTINGS[name]
    expected = reference("llama", FOUR, **settings)
    model = SpeculativeModel(Target(model_of("llama")), OracleDrafter(expected, lengths=[4, 2], clutter=4))
    assert ours(model, FOUR, **settings) == expected


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "several end tokens"])
def test_right_padding_changes_nothing_under_token_processors(name: str) -> None:
    model, settings = speculative("llama", FAMILIES[0]), SETTINGS[name]
    assert ours(model, FOUR, "right", **settings) == reference("llama", FOUR, **settings)


def test_prefix_constraint_is_asked_with_each_rows_own_place() -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [token for token in range(VOCAB) if token % 4 == row]

    batch = padded(FOUR)
    width = batch["input_ids"].shape[1]
    settings = {"max_new_tokens": 12, "do_sample": False, "prefix_allowed_tokens_fn": allowed, "eos_token_id": [5, 8]}
    expected = answers(model_of("llama").generate(**batch, **settings), width)
    for family in FAMILIES:
        assert answers(speculative("llama", family).generate(**batch, **settings), width) == expected
    assert {token % 4 for token in expected[3]} == {3} or PAD in expected[3]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [1, 2, 5, 40])
def test_tree_size_does_not_change_the_text(family: str, nodes: int) -> None:
    assert ours(speculative("llama", family), FOUR, nodes=nodes) == reference("llama", FOUR)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_vocabulary_that_is_a_part_does_not_change_the_text(family: str) -> None:
    target = Target(model_of("llama"))
    model = SpeculativeModel(target, tiny_head(family, target, draft_vocab=12))
    assert ours(model, FOUR) == reference("llama", FOUR)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_draft_vocabulary_does_not_break_large_trees(family: str) -> None:
    target = Target(model_of("llama"))
    model = SpeculativeModel(target, tiny_head(family, target, draft_vocab=3))
    assert ours(model, ONE, nodes=30) == reference("llama", ONE)


def test_plain_drafter_is_plain_decoding() -> None:
    model = SpeculativeModel.from_target(model_of("llama"), "none")
    batch = padded(FOUR)
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert answers(out.sequences, batch["input_ids"].shape[1]) == reference("llama", FOUR)
    assert out.acceptance.mean_accepted_length == 1.0
    assert out.acceptance.drafted_tokens == 0


def test_custom_generate_on_the_users_model_is_the_same_loop() -> None:
    model = speculative("llama", FAMILIES[0])
    batch = padded(FOUR)
    out = model_of("llama").generate(
        **batch, max_new_tokens=NEW, do_sample=False, custom_generate=mtp.speculate(model, nodes=6)
    )
    assert answers(out, batch["input_ids"].shape[1]) == reference("llama", FOUR)


def test_a_generation_config_and_a_bare_prompt_are_understood() -> None:
    model = speculative("llama", FAMILIES[0])
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=PAD)
    out = model.generate(torch.tensor(ONE), generation_config=config)
    assert answers(out, 5) == reference("llama", ONE)


@pytest.mark.parametrize("weights", ["of the target", "as trained"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_targets_decode(family: str, dtype: torch.dtype, weights: str) -> None:
    target = Target(tiny_model("llama").to(dtype))
    head = tiny_head(family, target)
    model = SpeculativeModel(target, head.cast(dtype) if weights == "of the target" else head)
    assert [len(row) for row in ours(model, FOUR)] == [NEW] * 4


# ---- the end of a text --------------------------------------------------------------------------------------------


def oracle(prompts: list[list[int]] = ONE, length: int = 6) -> SpeculativeModel:
    return SpeculativeModel(Target(model_of("llama")), OracleDrafter(truths("llama", prompts), lengths=[length]))


def test_output_stops_at_end_token_inside_accepted_block() -> None:
    text = truths("llama", ONE)[0]
    for at in range(1, 8):
        expected = text[: text.index(text[at]) + 1]
        assert ours(oracle(), ONE, eos_token_id=text[at])[0] == expected


def test_rows_that_end_inside_a_block_are_padded_like_transformers_pads_them() -> None:
    ends = [row[at] for at, row in enumerate(truths("llama", FOUR), start=2)]
    expected = reference("llama", FOUR, eos_token_id=ends)
    assert ours(oracle(FOUR), FOUR, eos_token_id=ends) == expected
    assert len({tuple(row).index(PAD) if PAD in row else NEW for row in expected}) > 1


def test_rows_are_padded_with_the_end_token_where_there_is_no_padding_token() -> None:
    """As Transformers does for the many models that name none (GPT-2, Llama 2 ...)."""
    model = tiny_model("llama")
    model.generation_config.pad_token_id = model.config.pad_token_id = None
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [4, 9, 14]}
    expected = model.generate(**padded(FOUR), **settings)
    assert len({row.index(4) if 4 in row else NEW for row in answers(expected, 11)}) > 1
    assert SpeculativeModel.from_target(model, "none").generate(**padded(FOUR), **settings).equal(expected)


def test_a_first_token_that_ends_the_text_is_all_there_is() -> None:
    first = [row[0] for row in truths("llama", FOUR)]
    for eos in (first[:1], first):
        assert ours(oracle(FOUR), FOUR, eos_token_id=eos) == reference("llama", FOUR, eos_token_id=eos)


@pytest.mark.parametrize("count", range(1, 10))
def test_max_new_tokens_is_never_overrun_inside_a_block(count: int) -> None:
    assert ours(oracle(), ONE, max_new_tokens=count)[0] == truths("llama", ONE)[0][:count]


def test_a_stop_string_inside_an_accepted_block_ends_the_text_at_once() -> None:
    text = truths("llama", ONE)[0]
    tokenizer = letters()
    word = tokenizer.decode(text[3:5])
    expected = reference_with_stop(ONE, word, tokenizer)
    got = ours(oracle(), ONE, stop_strings=[word], tokenizer=tokenizer)
    assert got == expected
    assert len(got[0]) < NEW
    assert tokenizer.decode(got[0]).endswith(word)


def reference_with_stop(prompts: list[list[int]], word: str, tokenizer: Any) -> list[list[int]]:
    batch = padded(prompts)
    out = model_of("llama").generate(
        **batch, max_new_tokens=NEW, do_sample=False, stop_strings=[word], tokenizer=tokenizer
    )
    return answers(out, batch["input_ids"].shape[1])


def test_stop_strings_end_each_row_of_a_batch_on_its_own() -> None:
    tokenizer = letters()
    word = tokenizer.decode(truths("llama", FOUR)[0][4:6])
    batch = padded(FOUR)
    # Transformers pads ended rows only where there is an end token, so there is one here (which nobody says).
    settings = {"max_new_tokens": NEW, "do_sample": False, "stop_strings": [word], "tokenizer": tokenizer}
    settings |= {"eos_token_id": 2, "suppress_tokens": [2]}
    width = batch["input_ids"].shape[1]
    expected = answers(model_of("llama").generate(**batch, **settings), width)
    assert answers(oracle(FOUR).generate(**batch, **settings), width) == expected


def test_the_callers_own_stopping_criterion_is_asked_after_every_token() -> None:
    class AfterSeven(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 5 + 7)

    assert ours(oracle(), ONE, stopping_criteria=[AfterSeven()])[0] == truths("llama", ONE)[0][:7]


def test_kept_marks_exactly_the_guessed_tokens() -> None:
    batch = padded(ONE)
    out = oracle(length=3).generate(**batch, max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert out.kept == [[False] + [True, True, True, False] * 2 + [True]]
    stats = out.acceptance
    assert (stats.committed_tokens, stats.target_passes) == (9, 3)
    assert dict(stats.histogram) == {3: 2, 1: 1}


# ---- positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_prompt_longer_than_the_targets_positions_is_refused(architecture: str) -> None:
    model = SpeculativeModel.from_target(model_of(architecture), "none")
    with pytest.raises(ValueError, match=rf"{POSITIONS + 1} tokens.*{POSITIONS} positions"):
        model.generate(torch.tensor(random_prompts([POSITIONS + 1])), max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_output_up_to_the_last_position_equals_transformers(architecture: str) -> None:
    prompts = random_prompts([POSITIONS - 10, POSITIONS - 13], seed=5)
    expected = reference(architecture, prompts, max_new_tokens=10)
    for family in FAMILIES:
        assert ours(speculative(architecture, family), prompts, max_new_tokens=10) == expected
    drafter = OracleDrafter(expected, lengths=[5])
    model = SpeculativeModel(Target(model_of(architecture)), drafter)
    assert ours(model, prompts, max_new_tokens=10) == expected


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_trees_reach_down_to_the_last_position(architecture: str) -> None:
    prompts = random_prompts([POSITIONS - 10], seed=5)
    expected = reference(architecture, prompts, max_new_tokens=10)
    model = SpeculativeModel(Target(model_of(architecture)), OracleDrafter(expected, lengths=[5]))
    out = model.generate(**padded(prompts), max_new_tokens=10, do_sample=False, return_dict_in_generate=True)
    assert answers(out.sequences, POSITIONS - 10) == expected
    assert out.acceptance.target_passes == 2, "the first token, then 6, then the 3 that are left"


def test_output_past_the_last_position_equals_transformers_where_positions_are_rotary() -> None:
    prompts = random_prompts([POSITIONS - 6], seed=6)
    for family in FAMILIES:
        assert ours(speculative("llama", family), prompts) == reference("llama", prompts)


@pytest.mark.parametrize("architecture", LOCAL)
def test_long_texts_outgrow_the_first_buffers_and_several_windows(architecture: str) -> None:
    """Far more tokens than windows, chunks and head caches were first made for."""
    expected = reference(architecture, FOUR, max_new_tokens=48)
    drafter = OracleDrafter(expected, lengths=[4, 1, 6], clutter=5)
    model = SpeculativeModel(Target(model_of(architecture)), drafter)
    assert ours(model, FOUR, max_new_tokens=48) == expected


# ---- sampling -----------------------------------------------------------------------------------------------------

SHORT, TOP = 3, 3


@cache
def sampling_model() -> PreTrainedModel:
    model = tiny_model("llama", seed=5, vocab=12, layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.35)
    return model


@cache
def law(temperature: float) -> dict[tuple[int, ...], float]:
    """Probability of every answer of three tokens, from the plain model."""
    prompt, found = [3, 7, 5, 2], {(): 1.0}
    for _ in range(SHORT):
        longer = {}
        for tokens, weight in found.items():
            with torch.no_grad():
                logits = sampling_model()(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double() / temperature
            best = logits.topk(TOP)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*tokens, token)] = weight * share
        found = longer
    return found


def sampled(drafter: Drafter, rule: str, temperature: float, samples: int = 3200, rows: int = 160) -> Counter:
    model = SpeculativeModel(Target(sampling_model()), drafter)
    counts: Counter = Counter()
    for _ in range(samples // rows):
        out = model.generate(
            torch.tensor([[3, 7, 5, 2]]),
            do_sample=True,
            top_k=TOP,
            temperature=temperature,
            max_new_tokens=SHORT,
            num_return_sequences=rows,
            rule=rule,
            nodes=6,
        )
        counts.update(tuple(row) for row in out[:, 4:].tolist())
    return counts


def p_value(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    assert set(counts) <= set(expected)
    samples = sum(counts.values())
    kept = [tokens for tokens, share in expected.items() if share * samples >= 5]
    observed = [counts[tokens] for tokens in kept] + [samples - sum(counts[tokens] for tokens in kept)]
    wanted = [expected[tokens] * samples for tokens in kept]
    wanted.append(samples - sum(wanted))
    if wanted[-1] < 1e-6:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [value * samples / sum(wanted) for value in wanted]
    return float(chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("rule", ["walk", "rejection", "traversal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_text_has_the_targets_distribution(family: str, rule: str) -> None:
    head = tiny_head(family, Target(sampling_model()), seed=2)
    assert p_value(sampled(head, rule, temperature=1.2), law(1.2)) > 1e-3


def test_the_sampling_check_can_fail() -> None:
    head = tiny_head(FAMILIES[0], Target(sampling_model()), seed=2)
    assert p_value(sampled(head, "walk", temperature=1.2), law(1.5)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 16])
def test_drawn_trees_of_any_size_decode(family: str, nodes: int) -> None:
    out = speculative("llama", family).generate(
        **padded(FOUR), do_sample=True, rule="rejection", nodes=nodes, max_new_tokens=8, temperature=0.8
    )
    assert out.shape == (4, 19)


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_trees_respect_token_processors(family: str) -> None:
    out = speculative("llama", family).generate(
        **padded(FOUR), do_sample=True, rule="rejection", no_repeat_ngram_size=1, max_new_tokens=8
    )
    for row, prompt in zip(out[:, 11:].tolist(), FOUR, strict=True):
        assert len(set(row)) == len(row)
        assert not set(row) & set(prompt)


# ---- streaming ----------------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        assert not self.ended
        self.calls.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_gets_the_prompt_then_every_token_alone_and_in_order() -> None:
    streamer = Recorder()
    out = oracle().generate(torch.tensor(ONE), max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert streamer.calls == [ONE[0]] + [[token] for token in out[0, 5:].tolist()]
    assert streamer.ended == 1


def test_streamer_stops_at_the_end_token() -> None:
    streamer, text = Recorder(), truths("llama", ONE)[0]
    out = oracle().generate(
        torch.tensor(ONE), max_new_tokens=NEW, do_sample=False, streamer=streamer, eos_token_id=text[3]
    )
    assert list(itertools.chain(*streamer.calls)) == out[0].tolist()


def test_streaming_a_batch_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="batch of 4"):
        oracle(FOUR).generate(**padded(FOUR), max_new_tokens=3, do_sample=False, streamer=Recorder())


# ---- the user's model ---------------------------------------------------------------------------------------------


class Failing(OracleDrafter):
    """Fails in the middle of a generation."""

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        if self.rounds == 2:
            raise RuntimeError("the drafter failed")
        return super().propose(pending, budget, draw)


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that a pass of ours touches."""
    return {
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "overrides": [name for name, m in model.named_modules() if "forward" in m.__dict__],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
        "grad": [p.requires_grad for p in model.parameters()],
        "weights": [float(p.detach().sum()) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "generation_config": model.generation_config.to_dict(),
    }


@pytest.mark.parametrize("architecture", CORE)
def test_the_users_model_is_left_as_it_was(architecture: str) -> None:
    model = tiny_model(architecture)
    before = traces(model)
    target = Target(model)
    for family in FAMILIES:
        SpeculativeModel(target, tiny_head(family, target)).generate(torch.tensor(ONE), max_new_tokens=6)
    assert traces(model) == before
    batch = padded(ONE)
    assert answers(model.generate(**batch, max_new_tokens=NEW, do_sample=False), 5) == reference(architecture, ONE)


def test_a_model_in_training_mode_is_left_in_training_mode() -> None:
    model = tiny_model("llama").train()
    SpeculativeModel.from_target(model, "none").generate(torch.tensor(ONE), max_new_tokens=3, do_sample=False)
    assert model.training


@pytest.mark.parametrize("where", ["drafter", "target", "criterion"])
def test_the_users_model_is_left_as_it_was_after_an_exception(where: str) -> None:
    model = tiny_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    drafter: Drafter = OracleDrafter(truths("llama", ONE), lengths=[2])
    if where == "drafter":
        drafter = Failing(truths("llama", ONE), lengths=[2])
    if where == "criterion":

        class Broken(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
                raise RuntimeError("the criterion failed")

        settings["stopping_criteria"] = [Broken()]
    if where == "target":
        passes = []

        def fail(module: Any, args: Any) -> None:
            passes.append(1)
            if len(passes) == 3:
                raise RuntimeError("the target failed")

        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    speculative_model = SpeculativeModel(Target(model), drafter)
    before = traces(model)
    with pytest.raises(RuntimeError, match=f"the {where} failed"):
        speculative_model.generate(torch.tensor(ONE), **settings)
    assert traces(model) == before
    if where != "target":
        assert ours(oracle(), ONE) == reference("llama", ONE)
    # The same objects work again.
    drafter = OracleDrafter(truths("llama", ONE), lengths=[2])
    assert ours(speculative_model, ONE, drafter=drafter) == reference("llama", ONE)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_adapter_counts_as_part_of_the_target_however_it_is_applied(compiled: bool, graphs: list[str]) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    model = SpeculativeModel.from_target(adapted, "none")
    if compiled:
        assert model.compile(progress=False).compiled == len(model.target.layers)
    settings = {"max_new_tokens": NEW, "do_sample": False}

    def assert_same(state: str) -> None:
        ids = torch.tensor(ONE)
        assert model.generate(ids, **settings).equal(adapted.generate(input_ids=ids, **settings)), state

    assert_same("on top")
    with adapted.disable_adapter():
        assert_same("disabled")
    adapted.merge_adapter()
    assert_same("merged")
    adapted.unmerge_adapter()
    assert_same("unmerged")


@pytest.mark.parametrize("shared", [None, "eagle3", "ngram+eagle3", "asked for"])
def test_two_threads_on_one_target_get_their_own_text_and_leave_the_model_alone(shared: str | None) -> None:
    """Each with a drafter of its own, or with one between them, which keeps the state of one generation."""
    model = tiny_model("llama")
    before, target = traces(model), Target(model)
    head = tiny_head("eagle3", target)
    between = {"eagle3": head, "ngram+eagle3": MixedDrafter([NgramDrafter(), head])}.get(shared or "")
    asked = {"drafter": head} if shared == "asked for" else {}
    prompts = [random_prompts([5], seed) for seed in range(2)]
    expected = [model.generate(torch.tensor(prompt), max_new_tokens=40, do_sample=False) for prompt in prompts]

    def work(index: int) -> list[bool]:
        mine = SpeculativeModel(target, between or ClutteringDrafter(nodes=9, seed=index))
        ids, settings = torch.tensor(prompts[index]), {"max_new_tokens": 40, "do_sample": False, **asked}
        return [mine.generate(ids, **settings).equal(expected[index]) for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    assert all(map(all, results))
    assert traces(model) == before


# ---- what is refused ----------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 2.0},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": object()},
    "custom_generate": {"custom_generate": "somebody/else"},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 32)},
    "negative_prompt_ids": {"negative_prompt_ids": torch.tensor(ONE)},
    "position_ids": {"position_ids": torch.arange(3, 8)[None]},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "quantized"},
    "nodes": {"nodes": 0},
    "drafter": {"drafter": "no such drafter"},
}


def test_prompt_lookup_is_pointed_to_its_drafter() -> None:
    with pytest.raises(ValueError, match=r'prompt_lookup_num_tokens=3 .*drafter="ngram"'):
        oracle().generate(torch.tensor(ONE), max_new_tokens=4, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_settings_that_cannot_be_drafted_for_are_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        oracle().generate(torch.tensor(ONE), max_new_tokens=4, do_sample=False, **REFUSED[name])
