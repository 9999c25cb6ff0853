"""Passes that are replayed: recorded here by tracing, which freezes what a CUDA graph would."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import padded, random_prompts, tiny_head, tiny_target
from torch.fx.experimental.proxy_tensor import make_fx

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters import Budget, Drafter, Draw, TargetStates
from mtp.graphs import Outputs, shape_of
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree

ARCHITECTURES = ["llama", "gemma2", "gemma3", "qwen3", "deepseek_v3"]


def traced(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
    """A ``Capture``: every number that Python knows is frozen, and tensors are read where they were."""
    graph = make_fx(run)()
    outputs = tuple(part.clone() for part in graph())

    def replay() -> None:
        for kept, new in zip(outputs, graph(), strict=True):
            kept.copy_(new)

    return outputs, replay


def replaying(architecture: str = "llama") -> Target:
    target = tiny_target(architecture)
    target.capture(traced)
    return target


class Widening(Drafter):
    """Trees of all sizes in turn, of random tokens."""

    def __init__(self) -> None:
        self.round = 0

    def attach(self, target: Target) -> Widening:
        self.vocab_size = target.vocab_size
        return self

    def start(self, states: TargetStates, capacity: int) -> None:
        pass

    observe = select_rows = lambda self, *args: None  # type: ignore[assignment]

    def propose(self, pending: torch.Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        self.round += 1
        count = self.round % 7
        generator = torch.Generator().manual_seed(self.round)
        tokens = torch.randint(1, self.vocab_size, (len(pending), count), generator=generator)
        parents = [torch.randint(-1, at, (len(pending), 1), generator=generator) + 1 for at in range(count)]
        roots = torch.full((len(pending), 1), -1)
        return TokenTree.from_parents(torch.cat([pending[:, None], tokens], 1), torch.cat([roots, *parents], 1))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replayed_pass_over_any_tree_is_the_ordinary_one(architecture: str) -> None:
    plain, target = tiny_target(architecture), replaying(architecture)
    head = Widening()
    head.attach(target)
    caches = [each.new_cache(2, 100) for each in (plain, target)]
    prompts = torch.tensor(random_prompts([11, 11], seed=2))
    counts = torch.tensor([11, 7])
    for each, cache in zip((plain, target), caches, strict=True):
        each.forward(prompts, cache, AttentionPass.over_chain(11, cache.lengths, 0))
        cache.commit(None, counts, 11)
    for _ in range(12):
        tree = head.propose(torch.tensor([3, 4]), Budget(9))
        taps = (1, 2)
        expected, found = (
            each.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start), taps)
            for each, cache in zip((plain, target), caches, strict=True)
        )
        for name in ("logits", "hidden", "taps"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), atol=2e-5, rtol=1e-4)
        assert [cache.num_staged for cache in caches] == [tree.num_nodes] * 2
        path = torch.zeros(2, 1, dtype=torch.long)
        for cache in caches:
            cache.commit(path, torch.tensor([1, 1]), cache.start + 1)
    assert target._captured is not None
    assert target._captured.reason is None
    assert target._captured.count == 4  # of 1, 2, 4 and 8 nodes


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_text_is_that_of_transformers_and_graphs_are_kept_for_the_next_generation(architecture: str) -> None:
    target = replaying(architecture)
    model = SpeculativeModel(target, tiny_head("eagle3", target, draft_vocab=12))
    recorded = []
    for seed in range(3):
        prompt = random_prompts([9 + seed], seed=seed)
        expected = target.causal_lm.generate(**padded(prompt), max_new_tokens=40, do_sample=False)
        found = model.generate(**padded(prompt), max_new_tokens=40, do_sample=False, nodes=8)
        assert torch.equal(found, expected)
        assert target._captured is not None
        recorded.append(target._captured.count)
    assert recorded[0] > 0
    assert recorded[2] <= recorded[0] + 3  # other sizes at most: none was recorded twice


def test_a_batch_whose_rows_end_apart_is_answered_as_by_transformers() -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompts = random_prompts([9, 4, 6], seed=4)
    counts = []
    for end in (5, 11, 17):
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        expected = target.causal_lm.generate(**padded(prompts), **settings)
        assert torch.equal(model.generate(**padded(prompts), **settings, nodes=8), expected)
        assert target._captured is not None
        counts.append(target._captured.count)
        assert target._captured._spare is None or len(target._captured._spare[1].lengths) == 3
    assert counts[-1] <= 4 * len(counts)  # once a size and batch; not again for every row that ends


def test_a_conversation_keeps_its_cache_and_nobody_else_gets_it() -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    settings = {"max_new_tokens": 12, "do_sample": False, "nodes": 8}
    first = padded(random_prompts([9], seed=1))
    kept = model.generate(**first, **settings, return_dict_in_generate=True)
    other = padded(random_prompts([8], seed=2))
    assert torch.equal(model.generate(**other, **settings), target.causal_lm.generate(**other, max_new_tokens=12))
    longer = padded([[*kept.sequences[0].tolist(), 3, 4]])
    expected = target.causal_lm.generate(**longer, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**longer, **settings, past=kept.past), expected)


def test_a_model_that_reads_a_number_in_its_pass_is_not_replayed() -> None:
    target = replaying("gpt2")
    prompt = padded(random_prompts([9], seed=1))
    found = SpeculativeModel(target, tiny_head("eagle3", target)).generate(**prompt, max_new_tokens=12, nodes=8)
    assert torch.equal(found, target.causal_lm.generate(**prompt, max_new_tokens=12, do_sample=False))
    assert "replayed" in target.replays


@pytest.mark.parametrize("fault", ["raises", "wrong", "idle"])
def test_what_cannot_be_recorded_runs_as_before_with_one_line(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(run: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], object]]:
        if fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return tuple(part + (fault == "wrong") for part in run()), lambda: None

    target = tiny_target()
    target.capture(broken)
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompt = padded(random_prompts([9], seed=1))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = model.generate(**prompt, max_new_tokens=12, do_sample=False, nodes=8)
    assert torch.equal(found, target.causal_lm.generate(**prompt, max_new_tokens=12, do_sample=False))
    assert len([each for each in caplog.records if "replayed" in each.message]) == 1
    assert "\n" not in caplog.text.strip()


@pytest.mark.parametrize("change", ["weight", "data", "hook"])
def test_what_is_changed_between_generations_is_noticed(change: str) -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompt = padded(random_prompts([9], seed=1))
    settings = {"max_new_tokens": 20, "do_sample": False}
    model.generate(**prompt, **settings, nodes=8)
    layer = target.layers[1].mlp.down_proj
    if change == "weight":
        layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
    elif change == "data":
        layer.weight.data = torch.randn_like(layer.weight)
    else:
        layer.register_forward_hook(lambda module, args, output: 3 * output + 1)
    expected = target.causal_lm.generate(**prompt, **settings)
    assert torch.equal(model.generate(**prompt, **settings, nodes=8), expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_generation_in_another_mode_has_a_cache_of_its_own(mode: Callable[[], Any]) -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompt = padded(random_prompts([9], seed=1))
    settings = {"max_new_tokens": 20, "do_sample": False}
    with mode():
        model.generate(**prompt, **settings, nodes=8)
    expected = target.causal_lm.generate(**prompt, **settings)
    assert torch.equal(model.generate(**prompt, **settings, nodes=8), expected)


def test_a_number_that_python_knows_is_found_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a model that scales its queries by the length of the text, which it asks the cache for."""
    target = replaying()
    update = TreeCache.update

    def scaled(self: TreeCache, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(self, key * (1 + 0.1 * self.get_seq_length()), *args, **kwargs)

    monkeypatch.setattr(TreeCache, "update", scaled)
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    model.generate(**padded(random_prompts([9], seed=1)), max_new_tokens=12, do_sample=False, nodes=8)
    assert "differs from an ordinary one" in target.replays


def test_answers_with_their_past_leave_their_buffers_to_the_next() -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompt = padded(random_prompts([9], seed=1))
    recorded = []
    for _ in range(5):
        output = model.generate(**prompt, max_new_tokens=12, do_sample=False, nodes=8, return_dict_in_generate=True)
        assert target._captured is not None
        recorded.append(target._captured.count)
    assert len(output.sequences) == 1
    assert recorded[-1] == recorded[1]  # two caches in turn: the last answer still holds one


def test_what_was_left_in_a_slot_does_not_reach_the_next_text() -> None:
    target = replaying()
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    prompt = padded(random_prompts([9], seed=1))
    expected = model.generate(**prompt, max_new_tokens=12, do_sample=False, nodes=8)
    assert target._captured is not None
    assert target._captured._spare is not None
    for layer in target._captured._spare[1].tree_layers:
        assert layer.keys is not None
        layer.keys[:, :, 60:70] = torch.nan
    assert torch.equal(model.generate(**prompt, max_new_tokens=12, do_sample=False, nodes=8), expected)
    assert target.is_replayed


def test_shapes_are_few() -> None:
    assert {shape_of(start, nodes, 1 << 20) for start in range(1000) for nodes in range(1, 65)} == {
        (1 << size, 1 << length)
        for size in range(7)
        for length in range(8, 12)
        if (1 << size) + 999 >= 1 << (length - 1)
    }
