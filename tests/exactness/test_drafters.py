"""Every drafter that needs no training: the target's own text, greedy and sampled, whatever it guesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from enumeration import ROUNDED, WRONG, Branches
from test_generate import answers, law, model_of, ours, p_value, reference, sampled
from tiny import FOUR, padded, random_prompts, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from mtp.cost import CostTable
from mtp.decode import Decoder, DecodeSettings, StopRule
from mtp.drafters import DRAFTERS, Drafter, NgramDrafter, OutputStore, PredictionDrafter, drafter_by_name
from mtp.model import SpeculativeModel
from mtp.planner import FixedPlanner
from mtp.sampling import TargetSampler
from mtp.target import Target

NEW = 40
PHRASE = [3, 7, 5, 2, 9, 11, 4]
ONE = [[*PHRASE, *PHRASE, *PHRASE[:3]]]  # there is something to look up from the beginning
THREE = [ONE[0], FOUR[1], [6]]  # ragged

# Every registered drafter by its name; beyond these, drafters that are made from something.
OBJECTS: dict[str, Callable[[], Drafter]] = {
    "ngram with a small store": lambda: NgramDrafter(store=OutputStore(24)),
    "ngram with a corpus": lambda: NgramDrafter(corpus=random_prompts([60, 30], seed=8)),
    "prediction": lambda: PredictionDrafter(random_prompts([30, 12, 1], seed=9)),
}
KINDS = [*sorted(DRAFTERS), *OBJECTS]


def drafter_of(kind: str) -> Drafter:
    return OBJECTS[kind]() if kind in OBJECTS else drafter_by_name(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_greedy_output_equals_transformers(architecture: str, kind: str) -> None:
    model = SpeculativeModel.from_target(model_of(architecture), drafter_of(kind))
    assert ours(model, ONE, max_new_tokens=NEW) == reference(architecture, ONE, max_new_tokens=NEW)
    for side in ("left", "right"):
        assert ours(model, THREE, side, max_new_tokens=NEW) == reference(architecture, THREE, max_new_tokens=NEW), side


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 40])
def test_tree_size_does_not_change_the_text(kind: str, nodes: int) -> None:
    model = SpeculativeModel.from_target(model_of("llama"), drafter_of(kind))
    assert ours(model, THREE, nodes=nodes) == reference("llama", THREE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_targets_under_a_planner_that_learns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = CostTable((64,), (1, 16, 64), ((1e3, 1e3, 1e3),), first=1.0, level=1.0)
    monkeypatch.setattr("mtp.cost.measure", lambda *_: free)
    model = SpeculativeModel.from_target(model_of("llama"), drafter_of(kind))
    for _ in range(2):
        assert ours(model, THREE, nodes="auto") == reference("llama", THREE)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_end_early_leave_the_others_alone(kind: str) -> None:
    ends = [row[at] for row, at in zip(reference("llama", THREE), (9, 2, 5), strict=True)]
    expected = reference("llama", THREE, eos_token_id=ends, max_new_tokens=NEW)
    assert len({len([token for token in row if token != 0]) for row in expected}) > 1
    model = SpeculativeModel.from_target(model_of("llama"), drafter_of(kind))
    assert ours(model, THREE, eos_token_id=ends, max_new_tokens=NEW) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}], ids=str)
def test_processors_mean_what_they_mean_in_transformers(kind: str, settings: dict[str, Any]) -> None:
    model = SpeculativeModel.from_target(model_of("llama"), drafter_of(kind))
    assert ours(model, THREE, **settings) == reference("llama", THREE, **settings)


# ---- conversations --------------------------------------------------------------------------------------------------


def turn(model: PreTrainedModel | SpeculativeModel, text: list[int], **past: Any) -> Any:
    """One answer; every token counts, the padding token too."""
    ids = torch.tensor([text])
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **past)


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_is_continued_exactly(kind: str) -> None:
    lm = model_of("llama")
    model = SpeculativeModel.from_target(lm, drafter_of(kind))
    past, text = None, ONE[0]
    for number in range(3):
        out = turn(model, text, past=past)
        assert out.sequences.equal(turn(lm, text).sequences), f"turn {number}"
        past, text = out.past, [*out.sequences[0].tolist(), *PHRASE[: 2 + number]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0, 1, 5, 20])
def test_a_text_that_goes_on_differently_is_continued_from_there(kind: str, keep: int) -> None:
    lm = model_of("llama")
    model = SpeculativeModel.from_target(lm, drafter_of(kind))
    out = turn(model, ONE[0])
    text = out.sequences[0].tolist()
    changed = [*text[:keep], 1 + text[keep] % 23, *text[keep + 1 : keep + 4]]
    assert turn(model, changed, past=out.past).sequences.equal(turn(lm, changed).sequences)


# ---- sampling -------------------------------------------------------------------------------------------------------


# Guesses that may come true in the few tokens of these tests.
LIKELY: dict[str, Callable[[], Drafter]] = {
    "ngram with a small store": lambda: NgramDrafter(store=stored([3, 1, 2, 2, 1, 3])),
    "ngram with a corpus": lambda: NgramDrafter(corpus=[[1, 3, 2, 2, 1]]),
    "prediction": lambda: PredictionDrafter([[2, 3, 1, 2]]),
}


def stored(answer: list[int]) -> OutputStore:
    store, end = OutputStore(24), None
    for token in answer:
        end = store.extend(end, token)
    return store


def likely(kind: str) -> Drafter:
    return LIKELY[kind]() if kind in LIKELY else drafter_by_name(kind)


@pytest.mark.parametrize(
    ("kind", "rule"), [*((kind, "walk") for kind in KINDS), ("ngram", "rejection"), ("ngram", "traversal")]
)
def test_sampled_text_has_the_targets_distribution(kind: str, rule: str) -> None:
    assert p_value(sampled(likely(kind), rule, temperature=1.2, samples=960), law(1.2)) > 1e-3


class Enumerated(TargetSampler):
    """Every choice is made by a ``Branches``, the first token's too."""

    def choose(self, scores: Tensor) -> Tensor:
        return torch.tensor([self.randomness.draw(row.softmax(-1)) for row in scores])


LENGTH, LETTERS, PROMPT = 3, 4, [1, 2, 3, 1, 2, 3, 1]


def enumerated_law(target: Target, make: Callable[[], Drafter]) -> tuple[dict[tuple[int, ...], float], int]:
    """The probability of every text of ``LENGTH`` tokens, and how many guesses were kept over all of them."""
    branches, kept = Branches(), []

    def write() -> tuple[int, ...]:
        sampler = Enumerated(LogitsProcessorList(), do_sample=True, randomness=branches)
        stop = StopRule(StoppingCriteriaList([MaxLengthCriteria(len(PROMPT) + LENGTH)]), target.device)
        decoder = Decoder(target, make().attach(target), sampler, stop, DecodeSettings(FixedPlanner(5)))
        row = decoder.run([PROMPT], [PROMPT])[0]
        kept.append(sum(row.kept))
        return tuple(row.ids[len(PROMPT) :])

    found: dict[tuple[int, ...], float] = {}
    for weight, text in branches.outcomes(write):
        found[text] = found.get(text, 0.0) + weight
    return found, sum(kept)


def true_law(lm: PreTrainedModel) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for text, weight in found.items():
            with torch.no_grad():
                probs = lm(torch.tensor([[*PROMPT, *text]])).logits[0, -1].double().softmax(-1)
            longer |= {(*text, token): weight * share for token, share in enumerate(probs.tolist())}
        found = longer
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_has_the_targets_probability_whatever_was_guessed_on_the_way(kind: str) -> None:
    """Whole generations by enumeration: what is guessed in a round depends on what was drawn in those before."""
    lm = tiny_model("llama", vocab=LETTERS, layers=1)
    with torch.no_grad():
        lm.lm_head.weight.mul_(0.3)
    truth = true_law(lm)
    found, kept = enumerated_law(Target(lm), lambda: likely(kind))
    assert found.keys() == truth.keys()
    assert max(abs(found[text] - truth[text]) for text in truth) < ROUNDED
    assert max(truth.values()) - min(truth.values()) > WRONG, "not all texts are equally likely"
    assert kept > 0 or kind == "none"


def test_a_rule_for_draws_says_that_the_walk_decided_instead() -> None:
    model = SpeculativeModel.from_target(model_of("llama"), "ngram")
    batch = padded(ONE)
    settings = {"max_new_tokens": NEW, "do_sample": True, "return_dict_in_generate": True}
    out = model.generate(**batch, rule="rejection", **settings)
    assert out.acceptance.notes == ["the drafter draws no guesses at random: the walk decided, not rule='rejection'"]
    assert model.generate(**batch, **settings).acceptance.notes == []
    assert len(answers(out.sequences, batch["input_ids"].shape[1])[0]) == NEW
