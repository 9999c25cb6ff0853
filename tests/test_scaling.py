"""What scripts/scaling.py counts is what real modules hold and compute, and its tables are those of docs/scaling.md."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from mtp.heads import HEADS, unrolling
from mtp.target import Target
from tests.memory import CountedBytes
from tests.tiny import random_prompts
from train import losses
from train.batches import trained_positions, training_batch
from train.config import OptimConfig
from train.data import Row
from train.evaluate import teacher_probs
from train.feature_cache import CachedFeatures
from train.features import OnlineFeatures
from train.losses import soft_cross_entropy
from train.objective import objective

ROOT = Path(__file__).parents[1]
PROMPT, ANSWER, STEPS, VOCABULARY = 24, 40, 3, 48


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("scaling", ROOT / "scripts" / "scaling.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["scaling"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scaling = load_script()


@pytest.fixture(scope="module")
def target() -> Target:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "vocab_size": 96}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return Target(LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="eager")).eval())


@pytest.fixture(scope="module")
def size(target: Target) -> Any:
    parameters = sum(weight.numel() for weight in target.causal_lm.parameters())
    matrices = sum(w.numel() for name, w in target.causal_lm.model.layers.named_parameters() if w.dim() > 1)
    return scaling.TargetSize("tiny", 64, parameters, matrices, 4, 4 * 64, 4, 16, 160, 4)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(tuple(a), tuple(b)) for a, b in (random_prompts([PROMPT, ANSWER], seed=at) for at in range(3))]


def test_operations_of_the_target_are_counted_as_torch_counts_them(target: Target, size: Any) -> None:
    length = 64
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        target.causal_lm.model(torch.zeros(2, length, dtype=torch.long))
    # Eager attention computes the masked half, too.
    assert counter.get_total_flops() == pytest.approx(2 * length * scaling.target_operations(size, length), rel=0.01)


def test_parameters_and_operations_of_the_head_are_counted_as_torch_counts_them(
    target: Target, size: Any, rows: list[Row]
) -> None:
    head = HEADS["eagle3"].from_target(target, torch.arange(VOCABULARY), steps=STEPS, context_vocabulary=False)
    counted = scaling.head_of(size, VOCABULARY, STEPS)
    assert counted.parameters == head.num_trainable_parameters()
    batch = training_batch(OnlineFeatures(target, rows, head.taps), range(len(rows)))
    with FlopCounterMode(display=False) as counter:
        probs, place = teacher_probs(head, batch)
        losses = [
            soft_cross_entropy(each.logits, probs[place[each.rows, each.positions]]).sum()
            for each in head.unroll(batch, STEPS)
        ]
        torch.stack(losses).sum().backward()
    positions = len(rows) * (PROMPT + ANSWER)
    expected = positions * scaling.head_operations(counted, ANSWER / (PROMPT + ANSWER), PROMPT + ANSWER)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("hidden", "inner", "vocabulary"),
    [(64, 160, 2048), (64, 1024, 512), (192, 256, 512)],
    ids=["vocab", "mlp", "hidden"],
)
def test_memory_of_a_batch_is_counted_as_its_tensors_are(
    hidden: int, inner: int, vocabulary: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unrolling, "QUERIES", 32)
    monkeypatch.setattr(losses, "BLOCK_ON_CPU", 2**12)
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 4, "vocab_size": vocabulary}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).eval()
    target = Target(model.requires_grad_(False))
    head = HEADS["eagle3"].from_target(target, torch.arange(vocabulary), steps=STEPS, context_vocabulary=False).train()
    head.activation_checkpointing = checkpointing
    rows = [Row(tuple(a), tuple(b)) for a, b in (random_prompts([60, 180], seed=at) for at in range(4))]
    batch = training_batch(OnlineFeatures(target, rows, head.taps), range(len(rows)))
    positions, weights = 4 * 240, 4 * head.num_trainable_parameters()
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with CountedBytes() as count:
        with torch.autocast("cpu", torch.bfloat16):
            predictions = head(batch, STEPS)
        loss, _ = objective(head, batch, predictions, OptimConfig(), trained_positions(rows, STEPS))
        del predictions
        loss.backward()
    counted = scaling.batch_bytes(
        scaling.HeadSize(hidden, hidden, inner, vocabulary, STEPS), positions, 0.75, checkpointing
    )
    # Products narrow the weights, which is half of them, and the gradient of one is there beside what it is added to.
    assert count.peak + positions * 16 * hidden == pytest.approx(counted + weights / 2, rel=0.15)


@pytest.mark.parametrize(("storage", "each"), [("bfloat16", 2), ("int8", 1)])
def test_bytes_of_the_cache_are_those_on_disk(
    storage: Any, each: int, target: Target, rows: list[Row], tmp_path: Path
) -> None:
    cache = CachedFeatures(target, rows, (1, 2, 3), tmp_path, storage=storage)
    positions = sum(map(len, rows))
    scales = 0 if storage == "bfloat16" else 4 * 4 * positions
    assert cache.num_bytes == positions * scaling.feature_bytes(64, each) + scales


@pytest.mark.parametrize("gpus", scaling.GPUS)
@pytest.mark.parametrize("target", scaling.TARGETS, ids=lambda each: each.name)
def test_plans_fit_and_more_accelerators_pay(target: Any, gpus: int) -> None:
    found = scaling.plan(target, gpus)
    assert found.memory <= scaling.H200.memory
    assert scaling.plan(target, 8 * gpus).tokens >= 7 * found.tokens
    roomier = replace(scaling.H200, memory=10 * scaling.H200.memory)
    assert scaling.plan(target, gpus, roomier).placement == "whole on each"


def test_what_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit on 8 accelerators of 1 GB"):
        scaling.plan(scaling.TARGETS[0], 8, replace(scaling.H200, memory=1e9))


def test_the_document_holds_the_tables_of_the_script() -> None:
    document = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    tables = scaling.tables().split("\n\n")
    assert len(tables) == 2
    assert all(table in document for table in tables)
