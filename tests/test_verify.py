"""Acceptance rules: the batched walk, the lazy one and the plain definition agree."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_tree
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from mtp.processors import RowProcessors
from mtp.sampling import TargetSampler
from mtp.tree import TokenTree
from mtp.verify import Randomness, reject_row, walk, walk_row


@given(st.integers(0, 100_000), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_walk_and_lazy_walk_agree(seed: int, nodes: int, batch: int, ragged: bool) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, batch, nodes, vocab=4, ragged=ragged)
    choices = torch.tensor([[rng.randrange(4) for _ in range(nodes)] for _ in range(batch)])
    verdict = walk(tree, choices)
    for row in range(batch):
        path, token = walk_row(
            tree.children(row),
            tree.tokens[row].tolist(),
            lambda node: int(choices[row, node]),  # noqa: B023
        )
        assert verdict.path[row, : verdict.counts[row]].tolist() == path
        assert int(verdict.next_token[row]) == token


@given(st.integers(0, 100_000), st.integers(1, 12))
def test_walk_gives_valid_indices_as_padding(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 3, nodes, vocab=3 if nodes < 8 else 4, ragged=True)
    verdict = walk(tree, torch.randint(0, 3, (3, nodes), generator=torch.Generator().manual_seed(seed)))
    assert verdict.path.shape[1] == int(verdict.counts.max())
    assert ((verdict.path >= 0) & (verdict.path < nodes)).all()
    assert (verdict.path[:, 0] == 0).all()


def test_padding_is_never_accepted() -> None:
    tree = TokenTree.chain(torch.tensor([1]), torch.tensor([[2, 3]]), torch.tensor([1]))
    verdict = walk(tree, torch.tensor([[2, 3, 4]]))
    assert verdict.counts.tolist() == [2]
    assert verdict.next_token.tolist() == [3]


def test_a_whole_accepted_chain_gives_a_bonus_token() -> None:
    verdict = walk(TokenTree.chain(torch.tensor([1]), torch.tensor([[2, 3]])), torch.tensor([[2, 3, 9]]))
    assert verdict.path.tolist() == [[0, 1, 2]]
    assert verdict.next_token.tolist() == [9]


class Never(Randomness):
    """Refuses whatever can be refused and remembers what is left to draw from."""

    def accept(self, probability: torch.Tensor) -> bool:
        return float(probability) >= 1

    def draw(self, weights: torch.Tensor) -> int:
        self.left = weights
        return int(weights.argmax())


def test_a_draw_that_the_target_rules_out_is_refused_and_never_drawn() -> None:
    p, q = torch.tensor([0.0, 0.4, 0.6]), torch.tensor([0.8, 0.1, 0.1])
    randomness = Never()
    path, _ = reject_row([[1], []], [0, 0], lambda _: p, lambda _: q, randomness)
    assert path == [0]
    assert float(randomness.left[0]) == 0
    torch.testing.assert_close(randomness.left.sum(), torch.tensor(1.0, dtype=torch.float64))


def test_children_of_no_probability_leave_the_target_as_it_is() -> None:
    """More children than tokens the drafter gives any probability: nothing may become NaN."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 0.0, 0.0])
    randomness = Never()
    path, token = reject_row([[1, 2, 3], [], [], []], [0, 0, 1, 2], lambda _: p, lambda _: q, randomness)
    assert path == [0]
    assert not randomness.left.isnan().any()
    assert token in (1, 2)


def test_identical_distributions_accept_the_first_child() -> None:
    p = torch.tensor([0.2, 0.5, 0.3])
    path, _ = reject_row([[1, 2], [], []], [0, 2, 1], lambda _: p, lambda _: p, Never())
    assert path == [0, 1]


# ---- which processors look at the tokens --------------------------------------------------------------------------


def test_subclasses_of_plain_warpers_count_as_looking_at_tokens() -> None:
    class Mine(TopKLogitsWarper):
        pass

    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), Mine(3), RepetitionPenaltyLogitsProcessor(1.2)])
    found = RowProcessors(processors, batch_size=2)
    assert found.token_processors == ["Mine", "RepetitionPenaltyLogitsProcessor"]
    assert found.in_order == ["Mine"]


@given(st.integers(0, 10_000))
def test_each_node_is_penalised_for_its_own_path_only(seed: int) -> None:
    """Greedy with a repetition penalty: every node's choice is the one that its own text gives alone."""
    rng = random.Random(seed)
    tree = random_tree(rng, 1, 8, vocab=6)
    logits = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(seed))
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    sampler = TargetSampler(processors, do_sample=False)
    verdict = sampler.verify(sampler.at_nodes(tree, logits, [[5, 4]], [0]))
    node, text = 0, [5, 4, int(tree.tokens[0, 0])]
    expected = [0]
    while True:
        scores = processors(torch.tensor([text]), logits[0, node : node + 1].clone())
        token = int(scores.argmax())
        child = next((c for c in tree.children(0)[node] if int(tree.tokens[0, c]) == token), None)
        if child is None:
            break
        expected.append(child)
        node, text = child, [*text, token]
    assert verdict.path[0, : verdict.counts[0]].tolist() == expected
    assert int(verdict.next_token[0]) == token


def test_logits_handed_to_verify_are_not_changed() -> None:
    tree = random_tree(random.Random(0), 2, 5, vocab=6)
    logits = torch.randn(2, 5, 6)
    before = logits.clone()
    for processors in ([TopKLogitsWarper(2)], [RepetitionPenaltyLogitsProcessor(3.0), TemperatureLogitsWarper(0.3)]):
        sampler = TargetSampler(LogitsProcessorList(processors), True, 2)
        sampler.verify(sampler.at_nodes(tree, logits, [[1], [2]], [0, 1]))
        assert torch.equal(logits, before)
