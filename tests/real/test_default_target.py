"""On the real default target: drafted greedy text equals ``transformers``' token for token, in fp32.

The heads are started by least squares on a handful of the target's own answers: weak, but enough to have both accepted
and refused guesses in every answer.  The target is found where scripts/fetch_default_target.py puts it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mtp
from mtp.attention import AttentionPass
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target
from train.batches import training_batch
from train.data import Row
from train.features import OnlineFeatures
from train.generation import left_padded

pytestmark = pytest.mark.real_model

FOLDER = Path(os.environ.get("MTP_DEFAULT_TARGET", Path.home() / ".cache" / "mtp" / "smollm2-135m-instruct"))
FAMILIES = sorted(HEADS)
QUESTIONS = [
    "What is the capital of France?",
    "Write a Python function that reverses a list in place and explain how it works.",
    "A train travels 60 km in 45 minutes. What is its average speed in km per hour? Show each step.",
    "Summarise in two sentences why the seasons change over the year on most parts of the Earth.",
    "Hi!",
    "List five fruits in alphabetical order.",
    "Translate to French: The cat sleeps on the warm roof.",
    "Write the opening paragraph of a story about a lighthouse keeper who finds a letter in a bottle.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def target() -> Target:
    if not (FOLDER / "config.json").exists():
        pytest.fail(f"No default target in {FOLDER}; run scripts/fetch_default_target.py first.")
    return Target(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]


@pytest.fixture(scope="module")
def answers(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """What ``transformers`` alone answers, each prompt by itself."""
    return [
        target.causal_lm.generate(torch.tensor([p]), do_sample=False, max_new_tokens=48)[0, len(p) :].tolist()
        for p in prompts
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, target: Target, prompts: Any, answers: Any) -> SpeculativeModel:
    """A head that was started on the answers to the last four questions."""
    rows = [Row(tuple(p), tuple(a)) for p, a in zip(prompts[4:], answers[4:], strict=True)]
    used = torch.tensor(sorted({token for row in rows for token in row.response_ids}))
    head = HEADS[request.param].from_target(target, used, steps=3, nodes=12)
    head.warm_start([training_batch(OnlineFeatures(target, rows, head.taps), range(len(rows)))])
    return SpeculativeModel(target, head.eval())


def test_greedy_text_equals_transformers_one_prompt_at_a_time(
    model: SpeculativeModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    kept = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        output = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=48, return_dict_in_generate=True
        )
        assert output.sequences[0, len(prompt) :].tolist() == answer
        kept += sum(output.kept[0])
    assert kept > 0, "no guess was ever accepted: the test would pass without drafting"


def test_greedy_text_equals_transformers_in_a_batch_of_four_of_unequal_length(
    model: SpeculativeModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    for start in (0, 4):
        ids, mask = left_padded(prompts[start : start + 4], model.device)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=48)
        for row, answer in zip(output[:, ids.shape[1] :].tolist(), answers[start : start + 4], strict=True):
            assert row[: len(answer)] == answer
            assert set(row[len(answer) :]) <= {model.target.model.generation_config.pad_token_id}


def test_a_saved_head_generates_the_same_text_after_loading(
    model: SpeculativeModel, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path, tokenizer: Any
) -> None:
    mtp.save_checkpoint(tmp_path / "head", model.drafter, tokenizer=tokenizer)
    loaded = mtp.load(tmp_path / "head", target=model.target)
    output = loaded.generate(torch.tensor([prompts[1]]), do_sample=False, max_new_tokens=48)
    assert output[0, len(prompts[1]) :].tolist() == answers[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_round_no_further_than_the_model_itself(
    dtype: torch.dtype, target: Target, prompts: Any
) -> None:
    ids = torch.tensor([prompts[1]])
    with torch.no_grad():
        exact = target.causal_lm(ids).logits
        lm = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype)
        own = lm(ids).logits.float()
    compiled = Target(lm)
    assert compiled.compile(progress=False).compiled == len(compiled.layers)
    cache = compiled.new_cache(1, 128)
    found = compiled.forward(ids, cache, AttentionPass.over_chain(ids.shape[1], cache.lengths, 0)).logits.float()
    floor = 1e-4  # in fp32 the model is its own measure
    assert float((found - exact).square().mean().sqrt()) <= 1.5 * float((own - exact).square().mean().sqrt()) + floor


def test_greedy_text_with_compiled_layers_equals_transformers(
    target: Target, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    model = SpeculativeModel.from_target(target.model, "recycling+ngram")
    assert model.compile(progress=False).compiled == len(model.target.layers)
    for batch in ([0], [1], [0, 1, 2, 3], [4, 5, 6, 7]):
        ids, mask = left_padded([prompts[at] for at in batch], model.device)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=48)
        for row, at in zip(output[:, ids.shape[1] :].tolist(), batch, strict=True):
            assert row[: len(answers[at])] == answers[at]
