"""The tree cache: after any commits it holds what a fresh prefill of the committed tokens would."""

from __future__ import annotations

import random
from functools import lru_cache

import pytest
import torch
from architectures import ARCHITECTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ClutteringDrafter, path_to, random_prompts, random_tree, tiny_head, tiny_target

from mtp.attention import AttentionPass
from mtp.cache import GROWTH, TreeCache
from mtp.drafters import TargetStates
from mtp.model import SpeculativeModel
from mtp.target import Target

target_of = lru_cache(tiny_target)


def prefill(target: Target, rows: list[list[int]], capacity: int = 64) -> TreeCache:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    cache = target.new_cache(len(rows), capacity)
    target.forward(ids, cache, AttentionPass.over_chain(longest, cache.lengths, 0))
    cache.commit(torch.arange(longest).expand(len(rows), -1), torch.tensor([len(row) for row in rows]), longest)
    return cache


def grow_by_random_paths(
    target: Target, cache: TreeCache, rows: list[list[int]], rng: random.Random, rounds: int, nodes: int
) -> list[list[int]]:
    """Verify random trees and commit a random path of each row; returns the rows' tokens afterwards."""
    rows = [list(row) for row in rows]
    for _ in range(rounds):
        tree = random_tree(rng, batch=len(rows), nodes=nodes)
        target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start))
        paths = [path_to(tree.parents[row].tolist(), rng.randrange(nodes)) for row in range(len(rows))]
        width = max(map(len, paths))
        # Entries past a row's count may be any valid index.
        filled = [path + [rng.randrange(nodes) for _ in range(width - len(path))] for path in paths]
        for row, path in enumerate(paths):
            rows[row] += tree.tokens[row, path].tolist()
        cache.commit(torch.tensor(filled), torch.tensor(list(map(len, paths))), max(map(len, rows)))
    return rows


def assert_same_content(cache: TreeCache, fresh: TreeCache, rows: list[list[int]]) -> None:
    assert cache.lengths.tolist() == [len(row) for row in rows]
    assert cache.start == cache.end == max(map(len, rows))
    for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
        if ours.keys is None:  # a layer that reads another one's keys and values
            assert theirs.keys is None
            continue
        for row, tokens in enumerate(rows):
            for name in ("keys", "values"):
                mine = getattr(ours, name)[row, :, : len(tokens)]
                torch.testing.assert_close(mine, getattr(theirs, name)[row, :, : len(tokens)], rtol=1e-4, atol=1e-5)


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 9))
def test_committed_paths_leave_the_cache_of_a_fresh_prefill(seed: int, batch: int, nodes: int) -> None:
    rng = random.Random(seed)
    target = target_of("llama")
    rows = random_prompts([rng.randrange(1, 14) for _ in range(batch)], seed)
    cache = prefill(target, rows)
    rows = grow_by_random_paths(target, cache, rows, rng, rounds=4, nodes=nodes)
    assert_same_content(cache, prefill(target, rows), rows)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_committed_paths_leave_the_cache_of_a_fresh_prefill_past_the_window(architecture: str) -> None:
    target = target_of(architecture)
    rows = random_prompts([3, 12, 7], 5)
    cache = prefill(target, rows)
    rows = grow_by_random_paths(target, cache, rows, random.Random(6), rounds=5, nodes=8)
    assert_same_content(cache, prefill(target, rows), rows)


def test_buffers_that_are_too_small_grow_and_keep_their_content() -> None:
    target = target_of("llama")
    rows = random_prompts([3, 5], 7)
    cache = prefill(target, rows, capacity=5)
    rows = grow_by_random_paths(target, cache, rows, random.Random(8), rounds=6, nodes=8)
    assert cache.capacity >= 5 + GROWTH
    assert_same_content(cache, prefill(target, rows), rows)


def test_selected_rows_keep_their_content_and_go_on() -> None:
    target, rng = target_of("llama"), random.Random(9)
    rows = random_prompts([9, 2, 6], 9)
    cache = prefill(target, rows)
    rows = grow_by_random_paths(target, cache, rows, rng, rounds=2, nodes=6)
    rows = [rows[2], rows[1]]
    cache.select_rows(torch.tensor([2, 1]), max(map(len, rows)))
    assert_same_content(cache, prefill(target, rows), rows)
    rows = grow_by_random_paths(target, cache, rows, rng, rounds=2, nodes=6)
    assert_same_content(cache, prefill(target, rows), rows)


def test_discarded_nodes_leave_no_trace() -> None:
    target, rng = target_of("llama"), random.Random(10)
    rows = random_prompts([4, 6], 10)
    cache = prefill(target, rows)
    for _ in range(2):
        tree = random_tree(rng, batch=2, nodes=7)
        target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start))
        assert cache.num_staged == 7
        cache.discard()
        assert cache.num_staged == 0
    rows = grow_by_random_paths(target, cache, rows, rng, rounds=1, nodes=5)
    assert_same_content(cache, prefill(target, rows), rows)


def test_committing_nothing_of_a_row_leaves_it_alone() -> None:
    target = target_of("llama")
    rows = random_prompts([4, 6], 11)
    cache = prefill(target, rows)
    tree = random_tree(random.Random(11), batch=2, nodes=3)
    target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start))
    cache.commit(torch.tensor([[0], [0]]), torch.tensor([0, 1]), 7)
    rows[1] += [int(tree.tokens[1, 0])]
    assert_same_content(cache, prefill(target, rows), rows)


def test_an_empty_row_behind_nothing_committed_can_be_read_from() -> None:
    """A cache without any committed token: the drafter's own, before its first entries."""
    cache = TreeCache(1, 1, capacity=4)
    cache.stage(2)
    keys = torch.rand(1, 2, 2, 4)
    seen, _ = cache.update(keys, keys, 0)
    assert torch.equal(seen, keys)
    cache.commit(torch.tensor([[1]]), torch.tensor([1]), 1)
    cache.stage(1)
    seen, _ = cache.update(keys[:, :, :1] * 0, keys[:, :, :1] * 0, 0)
    assert torch.equal(seen[:, :, 0], keys[:, :, 1])


class WatchingDrafter(ClutteringDrafter):
    """Random trees; notes where the target's buffers lie after every round."""

    def share(self, cache: TreeCache) -> None:
        self.cache = cache
        self.places: set[tuple[int, ...]] = set()

    def observe(self, states: TargetStates) -> None:
        super().observe(states)
        self.places.add(tuple(layer.keys.data_ptr() for layer in self.cache.layers if layer.keys is not None))


@pytest.mark.parametrize("batch", [1, 2])
def test_buffers_stay_where_they_are_to_the_last_position(batch: int) -> None:
    """As long a text as the target takes, under trees larger than what is kept free for any tree."""
    target = tiny_target("llama")
    drafter = WatchingDrafter(nodes=160)
    prompts = torch.tensor(random_prompts([5] * batch, 12))
    length = target.config.max_position_embeddings - 5
    out = SpeculativeModel(target, drafter).generate(prompts, do_sample=False, max_new_tokens=length, nodes=160)
    assert out.shape[1] == target.config.max_position_embeddings
    assert len(drafter.places) <= batch  # a row that ends before the other takes its share of the memory with it


def test_a_heads_buffers_stay_where_they_are() -> None:
    target = tiny_target("llama")
    head = tiny_head("eagle3", target)
    places = set()

    def watch(row: int, token: int, kept: bool) -> None:
        places.add(
            tuple(buffer.data_ptr() for layer in head.state.cache.tree_layers if (buffer := layer.keys) is not None)
        )

    settings = {"do_sample": False, "max_new_tokens": 80, "on_token": watch}
    SpeculativeModel(target, head).generate(torch.tensor(random_prompts([5], 13)), **settings)
    assert len(places - {()}) == 1


def test_room_is_made_for_the_longest_answer_but_for_no_position_that_does_not_exist() -> None:
    target, drafter = tiny_target("llama"), WatchingDrafter(nodes=4)
    limit = target.config.max_position_embeddings
    for asked, expected in ((20, 5 + 20), (100_000, limit)):
        settings = {"do_sample": False, "max_new_tokens": asked, "nodes": 160, "eos_token_id": list(range(24))}
        SpeculativeModel(target, drafter).generate(torch.tensor(random_prompts([5], 14)), **settings)
        assert drafter.cache.capacity == expected + 160
