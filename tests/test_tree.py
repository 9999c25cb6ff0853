"""Token trees: what is derived from parents agrees with the plain definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import path_to, random_tree

from mtp.tree import TokenTree, ancestor_mask


@pytest.mark.parametrize("nodes", [1, 2, 3, 64, 129])
def test_ancestor_mask_of_a_chain_is_causal(nodes: int) -> None:
    parents = torch.arange(nodes)[None] - 1
    assert torch.equal(ancestor_mask(parents)[0], torch.ones(nodes, nodes).tril().bool())


@given(st.integers(0, 10_000), st.integers(1, 20))
def test_depths_count_the_drafted_tokens_on_the_path(seed: int, nodes: int) -> None:
    tree = random_tree(random.Random(seed), batch=2, nodes=nodes)
    for row in range(2):
        parents = tree.parents[row].tolist()
        assert tree.depths[row].tolist() == [len(path_to(parents, node)) - 1 for node in range(nodes)]


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_children_are_the_valid_nodes_with_that_parent_in_index_order(seed: int, nodes: int) -> None:
    tree = random_tree(random.Random(seed), nodes=nodes, ragged=True)
    parents, valid = tree.parents[0].tolist(), tree.valid[0].tolist()
    for node, offspring in enumerate(tree.children(0)):
        assert offspring == [child for child in range(1, nodes) if parents[child] == node and valid[child]]


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 5))
def test_a_tree_that_is_cut_at_a_depth_keeps_all_paths_down_to_it(seed: int, nodes: int, depth: int) -> None:
    whole = random_tree(random.Random(seed), batch=3, nodes=nodes, ragged=True)
    values = torch.rand(3, nodes)
    whole = replace(whole, log_q=values, worth=values + 1, q=values[..., None].expand(-1, -1, 2))
    cut = whole.no_deeper_than(depth)

    def paths(tree: TokenTree, row: int) -> list[tuple[list[int], float]]:
        assert tree.log_q is not None
        real = [node for node in range(tree.num_nodes) if tree.valid[row, node] and tree.depths[row, node] <= depth]
        return [(tree.path_tokens(row, node), float(tree.log_q[row, node])) for node in real]

    assert int(cut.depths.max()) <= depth
    for row in range(3):
        assert paths(cut, row) == paths(whole, row)
    assert cut.num_nodes == max(int((whole.depths[row] <= depth).sum()) for row in range(3))
    assert torch.equal(cut.worth, cut.log_q + 1)
    assert torch.equal(cut.q, cut.log_q[..., None].expand(-1, -1, 2))
    TokenTree.from_parents(cut.tokens, cut.parents)  # refuses a node that comes before its parent


def test_root_only_tree_has_one_node_a_row() -> None:
    tree = TokenTree.root_only(torch.tensor([4, 5]))
    assert (tree.batch_size, tree.num_nodes, tree.is_drawn) == (2, 1, False)
    assert tree.parents.tolist() == [[-1], [-1]]
    assert tree.valid.all()


def test_chain_marks_tokens_past_a_rows_length_as_padding() -> None:
    tree = TokenTree.chain(torch.tensor([1, 2]), torch.tensor([[3, 4], [5, 6]]), torch.tensor([2, 1]))
    assert tree.parents.tolist() == [[-1, 0, 1]] * 2
    assert tree.depths.tolist() == [[0, 1, 2]] * 2
    assert tree.valid.tolist() == [[True, True, True], [True, True, False]]


@pytest.mark.parametrize("parents", [[0, 0], [-1, -1], [-1, 1], [-1, 2, 0]])
def test_parents_that_make_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parents"):
        TokenTree.from_parents(torch.zeros(1, len(parents), dtype=torch.long), torch.tensor([parents]))


def test_select_rows_keeps_everything_about_those_rows() -> None:
    tree = random_tree(random.Random(1), batch=3, nodes=5, ragged=True)
    full = TokenTree(tree.tokens, tree.parents, tree.depths, tree.valid, torch.rand(3, 5), torch.rand(3, 5, 7))
    kept = full.select_rows(torch.tensor([2, 0]))
    for name in ("tokens", "parents", "depths", "valid", "log_q", "q"):
        assert torch.equal(getattr(kept, name), getattr(full, name)[[2, 0]])
    assert tree.select_rows(torch.tensor([1])).q is None
