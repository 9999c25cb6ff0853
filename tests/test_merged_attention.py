"""Attention to an open prefix: the masked result without the mask, and the masked path wherever that cannot be."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st
from test_attention import assert_tree_logits_are_path_logits, path_logits
from test_cache import prefill
from tiny import random_prompts, random_tree, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from mtp import merged_attention
from mtp.attention import AttentionPass, attend, mask_bias
from mtp.merged_attention import attend_merged
from mtp.target import Target
from mtp.tree import TokenTree


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Prefixes are opened on the CPU too, from one token on; the list counts the calls that merged."""
    calls: list[int] = []

    def counting(*args: Any) -> torch.Tensor:
        calls.append(1)
        return attend_merged(*args)

    monkeypatch.setattr(merged_attention, "SHORTEST_PREFIX", {"cpu": 1})
    monkeypatch.setattr(merged_attention, "attend_merged", counting)
    return calls


class ShapesSeen(TorchDispatchMode):
    """Remembers the shapes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.shapes.add(tuple(tensor.shape))
        return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@given(
    seed=st.integers(0, 10_000),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    prefix=st.sampled_from([0, 1, 3, 64, 500, 1500]),
    nodes=st.integers(1, 20),
    scaling=st.sampled_from([0.1, 0.3, 3.0]),
)
@torch.no_grad()
def test_merged_attention_is_masked_attention(
    dtype: torch.dtype, tolerance: float, seed: int, heads: tuple[int, int], prefix: int, nodes: int, scaling: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = heads
    tree = random_tree(random.Random(seed), 1, nodes)
    query = torch.randn(1, queries, nodes, 16, generator=generator).to(dtype)
    key, value = (torch.randn(1, keys, prefix + nodes, 16, generator=generator).to(dtype) for _ in range(2))
    attention = AttentionPass.over_tree(tree, torch.tensor([prefix]), prefix)
    found = attend_merged(query, key, value, attention.own_bias(queries // keys, query.device), scaling)
    bias = mask_bias(attention.mask(None, query.device), queries // keys, torch.float32)
    expected = attend(query.float(), key.float(), value.float(), bias, scaling)
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype
    assert found.is_contiguous()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, 5, 30])
def test_tree_logits_are_those_of_each_path(architecture: str, length: int, merging: list[int]) -> None:
    """Every architecture: layers with windows, caps and sinks keep their masks beside layers that need none."""
    tree = random_tree(random.Random(length), 1, 9)
    assert_tree_logits_are_path_logits(tiny_target(architecture), random_prompts([length], length), tree)


def test_it_is_the_merged_path_that_was_taken(merging: list[int]) -> None:
    target = tiny_target("llama")
    assert_tree_logits_are_path_logits(target, random_prompts([6], 1), random_tree(random.Random(1), 1, 5))
    assert len(merging) == target.num_layers


def test_rows_of_different_lengths_keep_their_mask(merging: list[int]) -> None:
    tree = random_tree(random.Random(2), 2, 5)
    assert_tree_logits_are_path_logits(tiny_target("llama"), random_prompts([3, 9], 2), tree)
    assert not merging


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_nothing_as_large_as_nodes_by_prefix_is_made(architecture: str, merging: list[int]) -> None:
    nodes, prefix = 7, 61
    target, tree = tiny_target(architecture), random_tree(random.Random(3), 1, nodes)
    shapes = {}
    for shortest in (1, 10_000):
        merged_attention.SHORTEST_PREFIX["cpu"] = shortest
        cache = prefill(target, random_prompts([prefix], 3), capacity=128)
        with ShapesSeen() as seen:
            target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start))
        shapes[shortest] = {shape for shape in seen.shapes if shape[-1:] == (prefix + nodes,)}
    assert shapes[1] == set()
    assert (1, nodes, prefix + nodes) in shapes[10_000]  # the check does see masks where there are some


def test_a_kernel_that_is_wrong_is_never_used(
    merging: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a device of which nobody has tried it, a kernel may mean something else by its second result."""
    honest = merged_attention._attend_unmasked

    def in_bits(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sum = honest(*args)
        return out, log_sum / 0.6931  # logarithms to the base 2

    for kernel in (in_bits, _refusing):
        merged_attention._is_right.cache_clear()
        monkeypatch.setattr(merged_attention, "_attend_unmasked", kernel)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            tree = random_tree(random.Random(4), 1, 6)
            assert_tree_logits_are_path_logits(tiny_target("llama"), random_prompts([9], 4), tree)
        assert not merging
        assert [record.message.startswith("attention to the prefix stays masked") for record in caplog.records] == [
            True
        ]
    merged_attention._is_right.cache_clear()


def _refusing(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    raise RuntimeError("no kernel image is available for execution on the device")


@torch.no_grad()
def test_a_long_chain_behind_a_prefix_is_masked(merging: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read behind a long text may be long itself: a block of all pairs in float32 would not be small."""
    monkeypatch.setattr(merged_attention, "MOST_TOKENS", 4)
    target, prompt = tiny_target("llama"), random_prompts([13], 1)[0]
    for count in (4, 5):
        cache = prefill(target, [prompt])
        tree = TokenTree.chain(torch.tensor([1]), torch.arange(2, count + 1)[None])
        logits = _forward(target, cache, tree)
        torch.testing.assert_close(logits[0], path_logits(target, prompt, tree, 0), rtol=1e-5, atol=6e-5)
        assert bool(merging) == (count == 4)
        merging.clear()


def _forward(target: Target, cache: Any, tree: TokenTree) -> torch.Tensor:
    return target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start)).logits
