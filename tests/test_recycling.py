"""Token recycling: what is written into the table, and which tree is read out of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FOUR, VOCAB, padded, tiny_head, tiny_model
from torch import Tensor

from mtp.drafters import Budget, Drafter, MixedDrafter, RecyclingDrafter, RoundCosts, TargetStates, drafter_by_name
from mtp.drafters.reliability import MOST
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree
from mtp.verify import Verdict, walk

NEW = 24
SURE = 8.0  # a logit that leaves little to the others


def states_of(rows: list[list[int]]) -> TargetStates:
    batch = padded(rows, side="right")
    hidden = torch.zeros(*batch["input_ids"].shape, 1)
    return TargetStates(batch["input_ids"], hidden, None, batch["attention_mask"].sum(1))


def tree_of(tokens: list[list[int]], parents: list[int]) -> TokenTree:
    return TokenTree.from_parents(torch.tensor(tokens), torch.tensor([parents] * len(tokens)))


def see(drafter: Drafter, tree: TokenTree, logits: Tensor) -> Verdict:
    """A round whose target says ``logits [B, N, V]``, greedily."""
    verdict = walk(tree, logits.argmax(-1))
    verdict = verdict.narrowed(int(verdict.counts.max()))
    drafter.observe_tree(tree, logits, verdict)
    return verdict


def chains(drafter: Drafter, pending: list[int], nodes: int = 64) -> list[set[tuple[int, ...]]]:
    """The paths of each row's proposal."""
    tree = drafter.propose(torch.tensor(pending), Budget(nodes))
    return [
        {tuple(tree.path_tokens(row, node)[1:]) for node in range(1, tree.num_nodes) if tree.valid[row, node]}
        for row in range(tree.batch_size)
    ]


def test_the_likeliest_tokens_at_every_node_become_successors_at_refused_ones_too() -> None:
    drafter = RecyclingDrafter(successors=2, depth=1)
    drafter.start(states_of([[1]]), 10)
    tree = tree_of([[1, 2, 3]], [-1, 0, 0])
    logits = torch.zeros(1, 3, VOCAB)
    logits[0, 0, [2, 7]] = torch.tensor([SURE, 5.0])  # so node 1 is kept
    logits[0, 1, [8, 9]] = SURE
    logits[0, 2, [10, 11]] = SURE
    assert see(drafter, tree, logits).path.tolist() == [[0, 1]]
    assert chains(drafter, [1, 2, 3]) == [{(2,), (7,)}, {(8,), (9,)}, {(10,), (11,)}]
    proposal = drafter.propose(torch.tensor([1]), Budget(3))
    assert proposal.log_q is not None
    torch.testing.assert_close(
        proposal.log_q[0, 1:], logits[0, 0].log_softmax(-1)[[2, 7]], atol=1e-3, rtol=0
    )  # half precision


def test_a_token_at_several_nodes_is_remembered_from_the_kept_path() -> None:
    """The context there is the text's own."""
    drafter = RecyclingDrafter(successors=1, depth=1)
    drafter.start(states_of([[1]]), 10)
    tree = tree_of([[1, 5, 4, 5]], [-1, 0, 0, 2])
    logits = torch.zeros(1, 4, VOCAB)
    logits[0, [0, 1, 2, 3], [5, 6, 7, 8]] = SURE
    assert see(drafter, tree, logits).path.tolist() == [[0, 1]]
    assert chains(drafter, [5]) == [{(6,)}]


def test_padding_teaches_nothing() -> None:
    drafter = RecyclingDrafter(successors=1, depth=1)
    drafter.start(states_of([[1]]), 10)
    tree = TokenTree.chain(torch.tensor([1]), torch.tensor([[2, 3]]), lengths=torch.tensor([1]))
    see(drafter, tree, torch.nn.functional.one_hot(torch.tensor([[2, 4, 6]]), VOCAB) * SURE)
    assert chains(drafter, [1, 2, 3]) == [{(2,)}, {(4,)}, set()]


def test_neighbours_in_the_prompt_are_successors_before_anything_was_verified() -> None:
    drafter = RecyclingDrafter(depth=3)
    drafter.start(states_of([[4, 5, 6, 4, 7], [8, 9]]), 10)
    assert chains(drafter, [4, 8]) == [{(7,)}, {(9,)}]
    assert chains(drafter, [5, 9]) == [{(6,), (6, 4), (6, 4, 7)}, set()], "of two followers the later one"


def test_a_continued_text_is_read_like_a_prompt_and_rounds_are_not() -> None:
    drafter = RecyclingDrafter(depth=1)
    drafter.start(states_of([[1, 2]]), 10)
    drafter.observe(states_of([[3, 4]]))
    assert chains(drafter, [3]) == [set()]
    assert drafter.rewind(2) == 2
    drafter.observe(states_of([[3, 4]]))
    assert chains(drafter, [3]) == [{(4,)}]


def test_what_the_target_said_outweighs_what_the_prompt_shows_and_a_full_row_gives_up_its_least_likely() -> None:
    drafter = RecyclingDrafter(successors=2, depth=1)
    drafter.start(states_of([[1]]), 10)
    logits = torch.full((1, 1, VOCAB), -SURE)
    logits[0, 0, [2, 3]] = torch.tensor([4.0, 0.0])
    see(drafter, tree_of([[1]], [-1]), logits)
    drafter.start(states_of([[1, 9]]), 10)
    assert chains(drafter, [1]) == [{(2,), (9,)}]
    drafter.start(states_of([[1, 2]]), 10)
    assert chains(drafter, [1]) == [{(2,), (9,)}], "a successor that is known keeps what the target gave it"
    assert chains(drafter, [1], nodes=2) == [{(2,)}]


# ---- the tree -----------------------------------------------------------------------------------------------------


def taught(logits: Tensor, **sizes: int) -> RecyclingDrafter:
    """A drafter that was told what follows each of ``V`` tokens: ``logits [V, V]``."""
    drafter = RecyclingDrafter(**sizes)
    vocab = logits.shape[0]
    drafter.start(states_of([[0]]), 10)
    star = tree_of([list(range(vocab))], [-1] + [0] * (vocab - 1))
    drafter.observe_tree(star, logits[None], Verdict(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([1])))
    return drafter


@given(seed=st.integers(0, 99), nodes=st.integers(1, 12), pending=st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_the_tree_holds_the_likeliest_paths_through_the_table(seed: int, nodes: int, pending: list[int]) -> None:
    vocab, successors, depth = 5, 3, 3
    logits = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    drafter = taught(logits, successors=successors, depth=depth, width=successors**depth)
    known = logits.softmax(-1).half().float().clamp_max(MOST)
    for row, root in enumerate(pending):
        worth: dict[tuple[int, ...], float] = {(): 1.0}
        level = [()]
        for _ in range(depth):
            below = []
            for path in level:
                last = path[-1] if path else root
                for token in known[last].topk(successors).indices.tolist():
                    worth[(*path, token)] = worth[path] * float(known[last, token])
                    below.append((*path, token))
            level = below
        best = sorted(worth, key=worth.__getitem__, reverse=True)[:nodes]
        tree = drafter.propose(torch.tensor(pending), Budget(nodes))
        paths = [tuple(tree.path_tokens(row, node)[1:]) for node in range(tree.num_nodes)]
        assert set(paths) == set(best)
        assert tree.worth is not None
        torch.testing.assert_close(tree.worth[row], torch.tensor([worth[path] for path in paths]), rtol=1e-3, atol=1e-4)


def test_rows_that_know_less_are_padded() -> None:
    drafter = RecyclingDrafter(depth=2)
    drafter.start(states_of([[1, 2, 3]]), 10)
    tree = drafter.propose(torch.tensor([1, 9, 2]), Budget(8))
    assert tree.valid.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert TokenTree.root_only(torch.tensor([9])).tokens.equal(drafter.propose(torch.tensor([9]), Budget(8)).tokens)


COSTS = {"first": 0.001, "level": 0.001, "other": 0.0}


def test_with_costs_trees_are_as_large_as_pays() -> None:
    drafter = taught(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)))
    pending = torch.tensor([3])
    free = RoundCosts(verify=(0.0, *[1.0] * 33), **COSTS)
    dear = RoundCosts(verify=(0.0, *map(float, range(1, 34))), **COSTS)
    assert drafter.propose(pending, Budget(32, costs=free)).num_nodes == 32
    assert drafter.propose(pending, Budget(32, costs=dear)).num_nodes == 1


def test_confidences_are_corrected_by_what_becomes_of_the_guesses() -> None:
    logits = torch.full((4, 4), -9.0)
    logits[0, 1] = SURE
    drafter = taught(logits, depth=1)
    promise = drafter.propose(torch.tensor([0]), Budget(2)).worth
    assert promise is not None
    assert float(promise[0, 1]) == pytest.approx(MOST)
    for _ in range(30):  # the target says something else, and the table is told the same again
        tree = drafter.propose(torch.tensor([0]), Budget(2))
        verdict = Verdict(torch.tensor([[0]]), torch.tensor([1]), torch.tensor([2]))
        drafter.observe_tree(tree, logits[tree.tokens], verdict)
    promise = drafter.propose(torch.tensor([0]), Budget(2)).worth
    assert promise is not None
    assert float(promise[0, 1]) < 0.1


# ---- generations --------------------------------------------------------------------------------------------------


def generated(model: SpeculativeModel, **settings: Any) -> Any:
    return model.generate(**padded(FOUR), max_new_tokens=NEW, return_dict_in_generate=True, **settings)


def test_the_table_stays_warm_until_it_is_told_to_forget() -> None:
    model = SpeculativeModel.from_target(tiny_model(), "recycling")
    assert isinstance(model.drafter, RecyclingDrafter)
    first, second = (generated(model, do_sample=False) for _ in range(2))
    assert second.sequences.equal(first.sequences)
    assert second.acceptance.target_passes < first.acceptance.target_passes
    model.drafter.forget()
    assert generated(model, do_sample=False).acceptance.histogram == first.acceptance.histogram


@pytest.mark.parametrize("name", ["recycling", "head+recycling"])
def test_a_named_drafter_is_kept_with_what_it_has_learnt(name: str) -> None:
    target = Target(tiny_model())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    generated(model, do_sample=False, drafter=name)
    drafter = model.drafter_for(name)
    assert isinstance(drafter, RecyclingDrafter | MixedDrafter)
    learnt = float(drafter.reliability.promised.sum())
    assert learnt > 0
    generated(model, do_sample=False, drafter=name)
    assert model.drafter_for(name) is drafter
    assert float(drafter.reliability.promised.sum()) > learnt


@pytest.mark.parametrize("rule", ["walk", "rejection"])
@pytest.mark.parametrize("name", ["recycling", "head+recycling"])
def test_a_sampled_batch_comes_again_from_its_seed_and_a_drafter_that_has_forgotten(name: str, rule: str) -> None:
    target = Target(tiny_model())
    model = SpeculativeModel(target, tiny_head("eagle3", target))
    texts = []
    for _ in range(2):
        model.drafter_for(name).forget()
        torch.manual_seed(7)
        texts.append(generated(model, do_sample=True, rule=rule, drafter=name).sequences)
    assert texts[0].equal(texts[1])


def test_the_table_is_bounded_by_the_vocabulary() -> None:
    model = SpeculativeModel.from_target(tiny_model(), "recycling")
    drafter = model.drafter
    assert isinstance(drafter, RecyclingDrafter)
    generated(model, do_sample=False)
    table = {name: tensor.shape for name, tensor in vars(drafter).items() if isinstance(tensor, Tensor)}
    assert set(table.values()) == {(VOCAB + 1, drafter.successors)}
    generated(model, do_sample=True)
    assert {name: tensor.shape for name, tensor in vars(drafter).items() if isinstance(tensor, Tensor)} == table


def test_a_vocabulary_smaller_than_the_table_is_wide_is_no_trouble() -> None:
    drafter = taught(torch.randn(3, 3), successors=8, depth=2)
    assert len(chains(drafter, [0])[0]) == 3 + 9


@pytest.mark.parametrize("size", ["successors", "depth", "width"])
def test_sizes_that_make_no_tree_are_refused(size: str) -> None:
    with pytest.raises(ValueError, match=rf"at least one successor.*{size}=0"):
        RecyclingDrafter(**{size: 0})


def test_recycling_is_a_drafter_by_name() -> None:
    assert isinstance(drafter_by_name("recycling"), RecyclingDrafter)
