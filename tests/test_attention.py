"""Tree attention: every node's logits are those of its own path, on every architecture."""

from __future__ import annotations

import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES, LOCAL, WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import prefill
from tiny import path_to, random_prompts, random_tree, tiny_target
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from mtp.attention import AttentionPass, attend, mask_bias, tree_attention
from mtp.target import Target
from mtp.tree import TokenTree

target_of = cache(tiny_target)


@torch.no_grad()
def path_logits(target: Target, prompt: list[int], tree: TokenTree, row: int) -> Tensor:
    """``[N, V]`` from Transformers alone: one plain pass over the prompt and each node's path."""
    parents, tokens = tree.parents[row].tolist(), tree.tokens[row].tolist()
    texts = [prompt + [tokens[at] for at in path_to(parents, node)] for node in range(tree.num_nodes)]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    logits = target.causal_lm(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


def assert_tree_logits_are_path_logits(target: Target, prompts: list[list[int]], tree: TokenTree) -> None:
    cache_ = prefill(target, prompts)
    attention = AttentionPass.over_tree(tree, cache_.lengths, cache_.start)
    logits = target.forward(tree.tokens, cache_, attention).logits
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(logits[row], path_logits(target, prompt, tree, row), rtol=1e-5, atol=6e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@settings(max_examples=6)
@given(seed=st.integers(0, 10_000))
def test_tree_logits_are_those_of_each_path(architecture: str, seed: int) -> None:
    """Prompts from shorter than the sliding window to far longer; trees that cross its boundary."""
    rng = random.Random(seed)
    prompts = random_prompts([rng.randrange(1, 3 * WINDOW), rng.randrange(WINDOW - 4, WINDOW + 2)], seed)
    assert_tree_logits_are_path_logits(target_of(architecture), prompts, random_tree(rng, 2, rng.randrange(1, 12)))


@pytest.mark.parametrize("architecture", LOCAL)
@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_long_branches_cross_the_window_or_chunk(architecture: str, length: int) -> None:
    """A branch longer than the window beside a bush: nodes lose their own tree's first nodes out of sight."""
    depth = WINDOW + 3
    parents = [-1, *range(depth), 0, depth // 2, depth // 2]
    tokens = [(7 * at + 3) % 20 + 1 for at in range(len(parents))]
    tree = TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))
    assert_tree_logits_are_path_logits(target_of(architecture), random_prompts([length], length), tree)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_prefill_logits_are_transformers_own(architecture: str, length: int) -> None:
    target, prompt = target_of(architecture), random_prompts([length], length)
    cache_ = target.new_cache(1, 64)
    ids = torch.tensor(prompt)
    output = target.forward(ids, cache_, AttentionPass.over_chain(length, cache_.lengths, 0))
    with torch.no_grad():
        expected = target.causal_lm(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prefill_in_two_parts_is_a_prefill(architecture: str) -> None:
    target, prompts = target_of(architecture), random_prompts([13], 1)
    cache_ = prefill(target, [prompts[0][:5]])
    rest = torch.tensor([prompts[0][5:]])
    output = target.forward(rest, cache_, AttentionPass.over_chain(8, cache_.lengths, cache_.start))
    with torch.no_grad():
        expected = target.causal_lm(input_ids=torch.tensor(prompts), use_cache=False).logits[:, 5:]
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=3e-5)


def test_rows_do_not_see_each_others_garbage() -> None:
    """Slots between a short row's end and the staged nodes hold other tokens' keys: their values must not matter."""
    target = target_of("llama")
    tree = random_tree(random.Random(2), batch=2, nodes=6)
    prompts = random_prompts([2, 11], 2)
    caches = [prefill(target, prompts) for _ in range(2)]
    for layer in caches[1].layers:
        layer.keys[0, :, 2:] = 1e4
        layer.values[0, :, 2:] = -1e4
    logits = [
        target.forward(tree.tokens, one, AttentionPass.over_tree(tree, one.lengths, one.start)).logits for one in caches
    ]
    assert torch.equal(logits[0], logits[1])


@given(
    st.integers(0, 10_000),
    st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    st.sampled_from([None, 5.0]),
    st.booleans(),
)
def test_attend_equals_attention_with_repeated_heads(
    seed: int, heads: tuple[int, int], softcap: float | None, has_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, keys = heads
    query = torch.randn(2, queries, 5, 8, generator=generator)
    key, value = (torch.randn(2, keys, 9, width, generator=generator) for width in (8, 6))
    sinks = torch.randn(queries, generator=generator) if has_sinks else None
    mask = torch.rand(2, 5, 9, generator=generator) < 0.5
    mask[..., 0] = True
    bias = mask_bias(mask, queries // keys, query.dtype)
    out = attend(query, key, value, bias, scaling=0.3, softcap=softcap, sinks=sinks)
    scores = query @ key.repeat_interleave(queries // keys, 1).transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shares = scores.masked_fill(~mask[:, None], float("-inf")).exp()
    total = shares.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    expected = (shares / total @ value.repeat_interleave(queries // keys, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_attend_without_a_mask_is_causal(softcap: float | None, sinks: Tensor | None) -> None:
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    causal = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    bias = mask_bias(causal, 2, query.dtype)
    torch.testing.assert_close(
        attend(query, key, value, None, 0.3, softcap, sinks), attend(query, key, value, bias, 0.3, softcap, sinks)
    )


def test_layers_that_share_a_mask_share_its_bias_and_others_do_not() -> None:
    tree = TokenTree.from_parents(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]))
    attention = AttentionPass.over_tree(tree, torch.tensor([2]), start=3)
    masks = [torch.rand(1, 1, 3, 6) < 0.5 for _ in range(10)]
    cpu = torch.device("cpu")
    assert attention.bias(masks[0], 2, torch.float32, cpu) is attention.bias(masks[0], 2, torch.float32, cpu)
    for mask in masks:  # as from a model that makes a mask for every layer
        for dtype in (torch.float32, torch.bfloat16):
            torch.testing.assert_close(attention.bias(mask, 2, dtype, cpu), mask_bias(mask[:, 0], 2, dtype))


@pytest.mark.parametrize("name", ["position_bias", "head_mask"])
def test_attention_terms_that_would_be_ignored_are_refused(name: str) -> None:
    query = torch.zeros(1, 1, 1, 4)
    with pytest.raises(ValueError, match=name):
        tree_attention(SimpleNamespace(), query, query, query, None, **{name: torch.zeros(1)})


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 3, 6)])
def test_a_mask_that_does_not_know_the_tree_is_refused(mask: Tensor | None) -> None:
    """A model that builds its masks by itself would show siblings to each other."""
    tree = TokenTree.from_parents(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]))
    query, key = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 6, 4)
    attention = AttentionPass.over_tree(tree, torch.tensor([2]), start=3)
    with attention.active(), pytest.raises(ValueError, match="AttentionMaskInterface"):
        tree_attention(SimpleNamespace(), query, key, key, mask)


def test_nodes_see_the_prefix_their_ancestors_and_themselves() -> None:
    tree = TokenTree.from_parents(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 0]]))
    mask = AttentionPass.over_tree(tree, torch.tensor([2]), start=3).mask(None, torch.device("cpu"))
    assert mask[0].int().tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0], [1, 1, 0, 1, 0, 1]]


def test_patterns_are_evaluated_at_logical_positions() -> None:
    """Row 1 has one token less than row 0: its nodes have the same slots, and positions one lower."""
    tokens, parents = torch.tensor([[1, 2, 3]] * 2), torch.tensor([[-1, 0, 0]] * 2)
    attention = AttentionPass.over_tree(TokenTree.from_parents(tokens, parents), torch.tensor([3, 2]), start=3)
    window = attention.mask(sliding_window_causal_mask_function(2), torch.device("cpu"))
    assert window[0].int().tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1]]
    assert window[1].int().tolist() == [[0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1]]
    chunks = chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    chunk = attention.mask(chunks, torch.device("cpu"))
    assert chunk[0].int().tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 1]]
    assert chunk[1].int().tolist() == [[1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def test_sdpa_is_what_softcap_none_reduces_to() -> None:
    query = torch.randn(1, 2, 3, 4)
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    expected = F.scaled_dot_product_attention(query, query, query, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(attend(query, query, query, mask_bias(mask, 1, query.dtype), 0.5), expected)
