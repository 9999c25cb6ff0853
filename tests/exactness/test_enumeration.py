"""Proofs by exact enumeration: every branch of the randomness, of drafter and verifier, is followed and weighed.

The statement: whatever the drafter proposes, the first three tokens (the committed path, the token after it, and from
there on the target itself) are distributed as the target's own.  No sampling is involved, so errors are rounding.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from tiny import random_tree, tiny_head, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from mtp.attention import AttentionPass
from mtp.drafters import Budget, Draw, TargetStates
from mtp.growth import BestFirstGrowth, drawn_widths
from mtp.sampling import TargetSampler
from mtp.static_tree import static_tree
from mtp.tree import TokenTree
from mtp.verify import Randomness, reject_row, verdict_of, walk, walk_row

V = 4
LENGTH = 3
EXACT = 1e-9
ROUNDED = 1e-6  # where float32 softmaxes of the sampler are part of what is checked

Tokens = tuple[int, ...]
Rule = Callable[[TokenTree, "Table", Randomness], tuple[list[int], int]]


class Branches(Randomness):
    """Follows every outcome of a random procedure, depth first, by running it again and again.

    The procedure's choices are replayed from a script whose last entry moves on to the next possible outcome after
    each run; ``weight`` is the probability of the run at hand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.script: list[tuple[list[tuple[int, float]], int]] = []
        self.at = 0
        self.weight = 1.0

    def pick(self, probabilities: Tensor) -> int:
        if self.at == len(self.script):
            total = float(probabilities.double().sum())
            options = [(index, p / total) for index, p in enumerate(probabilities.double().tolist()) if p > 0]
            self.script.append((options, 0))
        options, chosen = self.script[self.at]
        self.at += 1
        index, probability = options[chosen]
        self.weight *= probability
        return index

    def accept(self, probability: Tensor) -> bool:
        yes = float(probability)
        if not yes > 0:  # zero, or 0 / 0, which `uniform < probability` refuses too
            return False
        return bool(self.pick(torch.tensor([max(1 - yes, 0.0), min(yes, 1.0)], dtype=torch.float64)))

    def draw(self, weights: Tensor) -> int:
        return self.pick(weights)

    def outcomes(self, procedure: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        """Probability and result of every possible run of ``procedure``."""
        while True:
            self.at, self.weight = 0, 1.0
            result = procedure()
            yield self.weight, result
            while self.script and self.script[-1][1] + 1 == len(self.script[-1][0]):
                self.script.pop()
            if not self.script:
                return
            options, chosen = self.script[-1]
            self.script[-1] = (options, chosen + 1)


@dataclass(frozen=True)
class EveryDraw(Draw):
    """Children drawn without replacement, one after the other, by a ``Branches``."""

    branches: Branches | None = None

    def children(self, log_probs: Tensor, count: int) -> Tensor:
        assert self.branches is not None
        picked = []
        for weights in log_probs.exp().double().flatten(0, -2):
            left = weights.clone()
            for _ in range(count):
                picked.append(self.branches.pick(left))
                left[picked[-1]] = 0.0
        return torch.tensor(picked).view(*log_probs.shape[:-1], count)


class Table:
    """A random distribution over V tokens after every short sequence; ``zeros`` of the tokens are ruled out."""

    def __init__(self, seed: int, vocab: int = V, zeros: int = 0, sharpness: float = 1.0):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab, self.zeros, self.sharpness = vocab, zeros, sharpness
        self.rows: dict[Tokens, Tensor] = {}

    def __call__(self, context: Tokens) -> Tensor:
        if context not in self.rows:
            logits = torch.randn(self.vocab, generator=self.generator, dtype=torch.float64) * self.sharpness
            if self.zeros:
                logits[torch.randperm(self.vocab, generator=self.generator)[: self.zeros]] = float("-inf")
            self.rows[context] = logits.softmax(-1)
        return self.rows[context]

    def sequences(self, start: Tokens = (), length: int = LENGTH) -> dict[Tokens, float]:
        """Probability of every continuation of ``start`` up to ``length`` tokens."""
        found = {start: 1.0}
        while len(next(iter(found))) < length:
            found = {
                (*context, token): weight * float(self(context)[token])
                for context, weight in found.items()
                for token in range(self.vocab)
            }
        return found


def near(table: Table, seed: int, share: float) -> Table:
    """A drafter's table: a mixture of the target's and of one of its own."""
    other = Table(seed, table.vocab)

    class Mixture(Table):
        def __call__(self, context: Tokens) -> Tensor:
            return share * table(context) + (1 - share) * other(context)

    return Mixture(seed, table.vocab)


def context_of(tree: TokenTree, node: int) -> Tokens:
    """The drafted tokens on the path to a node of row 0."""
    tokens: list[int] = []
    while node > 0:
        tokens.append(int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    return tuple(tokens[::-1])


def committed(tree: TokenTree, path: list[int], token: int) -> Tokens:
    return (*(int(tree.tokens[0, node]) for node in path[1:]), token)


def law_of(propose: Callable[[Branches], TokenTree], rule: Rule, p: Table, length: int = LENGTH) -> dict[Tokens, float]:
    """The distribution of the first ``length`` tokens under a drafter and an acceptance rule."""
    sums: dict[Tokens, float] = {}
    drawing = Branches()
    for chance, tree in drawing.outcomes(lambda: propose(drawing)):
        verifying = Branches()
        for weight, (path, token) in verifying.outcomes(lambda: rule(tree, p, verifying)):  # noqa: B023
            tokens = committed(tree, path, token)[:length]
            sums[tokens] = sums.get(tokens, 0.0) + chance * weight
    return continued(sums, p, length)


def continued(sums: dict[Tokens, float], p: Table, length: int = LENGTH) -> dict[Tokens, float]:
    """The law of ``length`` tokens when the target alone goes on behind what was committed."""
    law = dict.fromkeys(p.sequences(length=length), 0.0)
    for tokens, weight in sums.items():
        for sequence, rest in p.sequences(tokens, length).items():
            law[sequence] += weight * rest
    return law


def error_of(propose: Callable[[Branches], TokenTree], rule: Rule, p: Table, length: int = LENGTH) -> float:
    """The largest difference between the law of the first tokens and the target's own."""
    law, truth = law_of(propose, rule, p, length), p.sequences(length=length)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-6)
    return max(abs(law[sequence] - truth[sequence]) for sequence in truth)


# ---- proposals ----------------------------------------------------------------------------------------------------


def top_k_tree(q: Table, width: int = 2, depth: int = 2) -> TokenTree:
    """The drafter's likeliest children at every node, level by level."""
    tokens, parents, level = [0], [-1], [(0, ())]
    for _ in range(depth):
        below = []
        for node, context in level:
            for token in q(context).topk(width).indices.tolist():
                below.append((len(tokens), (*context, token)))
                tokens.append(token)
                parents.append(node)
        level = below
    return TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([parents]))


def grow_drawn(q: Table, branching: int, expanded: list[int], prune: int = 0) -> Callable[[Branches], TokenTree]:
    """EAGLE-3's drawn growth (`_grow_drawn`) over a table: only the best of the drawn children are expanded."""

    def propose(branches: Branches) -> TokenTree:
        growth = BestFirstGrowth(torch.zeros(1, dtype=torch.long), Budget(64), width=branching)
        draw = EveryDraw(branches=branches)
        tokens_of: list[Tokens] = [()]
        for depth, width in enumerate(expanded):
            if depth > 0:
                tokens, parents, _ = growth.frontier(width)
                tokens_of = [
                    (*tokens_of[parent], token)
                    for token, parent in zip(tokens[0].tolist(), parents[0].tolist(), strict=True)
                ]
            growth.add(torch.stack([q(context).log() for context in tokens_of])[None], torch.arange(q.vocab), draw)
        return growth.drawn_tree(q.vocab)

    return propose


def drawn_shared(q: Table, shape: Any, vocab: int = V) -> Callable[[Branches], TokenTree]:
    """Medusa's drawn tree: all nodes of a depth share that depth's draws, in their order."""
    depth = max(shape.depths)
    count = max(shape.ranks) + 1
    dists = torch.stack([q((at,)) for at in range(depth)])

    def propose(branches: Branches) -> TokenTree:
        picked = EveryDraw(branches=branches).children(dists.log(), count)
        tokens = [0] + [int(picked[d - 1, r]) for d, r in zip(shape.depths[1:], shape.ranks[1:], strict=True)]
        dense = torch.cat([dists, torch.zeros(1, vocab, dtype=torch.float64)])
        return TokenTree.from_parents(
            torch.tensor([tokens]), torch.tensor([shape.parents]), q=dense[torch.tensor(shape.depths)][None]
        )

    return propose


# ---- rules --------------------------------------------------------------------------------------------------------


def rejection(tree: TokenTree, p: Table, randomness: Randomness) -> tuple[list[int], int]:
    assert tree.q is not None
    q = tree.q[0]
    return reject_row(
        tree.children(0),
        tree.tokens[0].tolist(),
        lambda node: p(context_of(tree, node)),
        lambda node: q[node],
        randomness,
    )


def lazy_walk(tree: TokenTree, p: Table, randomness: Randomness) -> tuple[list[int], int]:
    return walk_row(tree.children(0), tree.tokens[0].tolist(), lambda node: randomness.draw(p(context_of(tree, node))))


def rejection_without_renormalising(tree: TokenTree, p: Table, randomness: Randomness) -> tuple[list[int], int]:
    """Wrong: after a refusal, q neither loses the refused token nor is normalised again."""
    assert tree.q is not None
    children, path = tree.children(0), [0]
    while True:
        node = path[-1]
        target, q = p(context_of(tree, node)), tree.q[0][node].double()
        for child in children[node]:
            x = int(tree.tokens[0, child])
            if randomness.accept((target[x] / q[x]).clamp_max(1.0)):
                path.append(child)
                break
            rest = (target - q).clamp_min(0.0)
            target = rest / rest.sum() if rest.sum() > 0 else target
        else:
            return path, randomness.draw(target)


# ---- the walk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0, 2])
def test_walk_over_every_choice_of_the_target_gives_the_targets_law(zeros: int) -> None:
    p, q = Table(1, zeros=zeros), Table(2)
    tree = top_k_tree(q)
    choices = torch.tensor(list(itertools.product(range(V), repeat=tree.num_nodes)))
    at_node = torch.stack([p(context_of(tree, node)) for node in range(tree.num_nodes)])
    weights = at_node[torch.arange(tree.num_nodes), choices].prod(1)
    expand = lambda tensor: tensor.expand(len(choices), -1)  # noqa: E731
    verdict = walk(TokenTree(*map(expand, (tree.tokens, tree.parents, tree.depths, tree.valid))), choices)
    sums: dict[Tokens, float] = {}
    for path, count, token, weight in zip(
        verdict.path.tolist(), verdict.counts.tolist(), verdict.next_token.tolist(), weights.tolist(), strict=True
    ):
        tokens = committed(tree, path[:count], token)
        sums[tokens] = sums.get(tokens, 0.0) + weight
    law = continued(sums, p)
    truth = p.sequences()
    assert max(abs(law[sequence] - truth[sequence]) for sequence in truth) < EXACT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("zeros", [0, 2])
def test_lazy_walk_gives_the_targets_law(seed: int, zeros: int) -> None:
    p, q = Table(seed, zeros=zeros), Table(seed + 100)
    tree = top_k_tree(q)
    assert error_of(lambda _: tree, lazy_walk, p) < EXACT


def test_walk_is_exact_on_trees_of_any_shape() -> None:
    for seed in range(8):
        tree = random_tree(random.Random(seed), nodes=7, vocab=V)
        assert error_of(lambda _, tree=tree: tree, lazy_walk, Table(seed), length=4) < EXACT


def test_pruning_top_k_children_by_value_keeps_the_walk_exact() -> None:
    p, q = Table(3), Table(4)
    growth = BestFirstGrowth(torch.zeros(1, dtype=torch.long), Budget(4), width=3)
    growth.add(q(()).log()[None, None], torch.arange(V))
    tokens, _, _ = growth.frontier()
    growth.add(torch.stack([q((token,)).log() for token in tokens[0].tolist()])[None], torch.arange(V))
    assert error_of(lambda _: growth.tree(), lazy_walk, p) < EXACT


def test_greedy_walk_commits_the_targets_own_greedy_tokens() -> None:
    for seed in range(60):
        p = Table(seed)
        tree = random_tree(random.Random(seed), nodes=8, vocab=V, ragged=True)
        choices = torch.tensor([[int(p(context_of(tree, node)).argmax()) for node in range(tree.num_nodes)]])
        verdict = walk(tree, choices)
        tokens = committed(tree, verdict.path[0, : verdict.counts[0]].tolist(), int(verdict.next_token[0]))
        greedy: Tokens = ()
        while len(greedy) < len(tokens):
            greedy = (*greedy, int(p(greedy).argmax()))
        assert tokens == greedy
        # As far as the tree knows: the greedy text leaves it exactly at the committed path's end.
        deepest = int(verdict.path[0, verdict.counts[0] - 1])
        assert all(int(tree.tokens[0, child]) != tokens[-1] for child in tree.children(0)[deepest])


# ---- rejection without replacement --------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "zeros"), [(0.0, 0), (0.5, 2), (0.9, 0)])
def test_rejection_on_drawn_trees_gives_the_targets_law(share: float, zeros: int) -> None:
    p = Table(5, zeros=zeros)
    q = near(p, 6, share)
    assert error_of(grow_drawn(q, branching=2, expanded=[1, 2]), rejection, p) < EXACT


def test_rejection_is_exact_when_drafter_and_target_agree() -> None:
    p = Table(7)
    assert error_of(grow_drawn(p, branching=2, expanded=[1, 1]), rejection, p) < EXACT


def test_rejection_is_exact_when_every_token_is_drawn() -> None:
    p, q = Table(8, vocab=3), Table(9, vocab=3)
    assert error_of(grow_drawn(q, branching=3, expanded=[1, 2]), rejection, p) < EXACT


def test_expanding_only_the_best_drawn_children_keeps_the_law() -> None:
    p, q = Table(10), Table(11)
    assert error_of(grow_drawn(q, branching=2, expanded=[1, 1]), rejection, p) < EXACT
    p, q = Table(12, vocab=3), Table(13, vocab=3)
    assert error_of(grow_drawn(q, branching=2, expanded=[1, 2, 1]), rejection, p, length=4) < EXACT


@pytest.mark.parametrize("nodes", [2, 4, 7])
def test_the_shapes_that_drawn_widths_gives_keep_the_law(nodes: int) -> None:
    branching, expanded = drawn_widths(nodes, depth=2)
    p, q = Table(14), Table(15)
    assert error_of(grow_drawn(q, branching, expanded), rejection, p) < EXACT


@pytest.mark.parametrize("nodes", [3, 5, 7])
def test_drawn_trees_whose_depths_share_their_draws_give_the_targets_law(nodes: int) -> None:
    accuracies = ((0.5, 0.3, 0.1), (0.8, 0.3, 0.2))
    p, q = Table(16), Table(17)
    shape = static_tree(accuracies, nodes)
    assert max(shape.depths) == 2
    assert error_of(drawn_shared(q, shape), rejection, p) < EXACT


def test_drafts_over_a_part_of_the_vocabulary_keep_the_law() -> None:
    p, full = Table(18), Table(19)

    class Partial(Table):
        def __call__(self, context: Tokens) -> Tensor:
            kept = full(context).clone()
            kept[1] = 0.0
            return kept / kept.sum()

    assert error_of(grow_drawn(Partial(0), branching=2, expanded=[1, 2]), rejection, p) < EXACT


# ---- the library's own proposals and its sampler, end to end ------------------------------------------------------


def head_proposals(family: str, nodes: int, draft_vocab: int, steps: int = 2) -> Callable[[Branches], TokenTree]:
    """Every tree that a real (random, tiny) head may draw for one prompt."""
    target = tiny_target("llama", vocab=V + 1, layers=2)
    head = tiny_head(
        family, target, draft_vocab=draft_vocab, steps=steps, **({"depth": 2} if family != "medusa" else {})
    )
    ids = torch.tensor([[3, 1, 2]])
    cache = target.new_cache(1, 16)
    output = target.forward(ids, cache, AttentionPass.over_chain(3, cache.lengths, 0), head.taps)

    def propose(branches: Branches) -> TokenTree:
        head.start(TargetStates(ids, output.hidden, output.taps, torch.tensor([3])), 16)
        return head.propose(torch.tensor([2]), Budget(nodes), EveryDraw(temperature=1.3, branches=branches))

    return propose


@pytest.mark.parametrize(("family", "nodes", "draft_vocab"), [("medusa", 5, 4), ("eagle3", 7, 3), ("eagle3", 4, 4)])
def test_trees_drawn_by_real_heads_give_the_targets_law(family: str, nodes: int, draft_vocab: int) -> None:
    p = Table(20, vocab=V + 1)
    assert error_of(head_proposals(family, nodes, draft_vocab), rejection, p) < EXACT


def through_sampler(temperature: float, top_k: int) -> Rule:
    """The rule as `TargetSampler.verify` applies it, with processors, on the raw logits ``log p``."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])

    def rule(tree: TokenTree, p: Table, randomness: Randomness) -> tuple[list[int], int]:
        sampler = TargetSampler(processors, do_sample=True, randomness=randomness)
        logits = torch.stack([p(context_of(tree, node)).log() for node in range(tree.num_nodes)])[None]
        verdict = sampler.verify(sampler.at_nodes(tree, logits, [[1, 2]], [0]))
        return verdict.path[0, : verdict.counts[0]].tolist(), int(verdict.next_token[0])

    return rule


def test_sampler_applies_rejection_to_the_processed_distribution() -> None:
    raw, q = Table(21), Table(22)

    class Processed(Table):
        def __call__(self, context: Tokens) -> Tensor:
            logits = raw(context).log() / 0.7
            return logits.masked_fill(logits < logits.topk(2).values[-1], float("-inf")).softmax(-1)

    processed = Processed(0)
    law = law_of(
        grow_drawn(q, branching=2, expanded=[1, 2]),
        lambda tree, _, randomness: through_sampler(0.7, 2)(tree, raw, randomness),
        processed,
    )
    truth = processed.sequences()
    assert max(abs(law[sequence] - truth[sequence]) for sequence in truth) < ROUNDED


# ---- the check itself can fail ------------------------------------------------------------------------------------


def test_a_rule_that_does_not_renormalise_q_is_detected() -> None:
    p, q = Table(5), Table(6)
    assert error_of(grow_drawn(q, branching=2, expanded=[1, 2]), rejection_without_renormalising, p) > 1e-3


def test_pruning_drawn_children_by_value_is_detected() -> None:
    p, q = Table(5), Table(6)

    def propose(branches: Branches) -> TokenTree:
        drawn = EveryDraw(branches=branches).children(q(()).log()[None], 3)[0].tolist()
        kept = sorted(drawn, key=lambda token: -float(q(())[token]))[:2]
        tokens = [0, *(token for token in drawn if token in kept)]
        dense = torch.stack([q(()), *[torch.zeros(V, dtype=torch.float64)] * 2])
        return TokenTree.from_parents(torch.tensor([tokens]), torch.tensor([[-1, 0, 0]]), q=dense[None])

    assert error_of(propose, rejection, p) > 1e-3


def test_verifying_the_likeliest_children_as_if_they_were_drawn_is_detected() -> None:
    p, q = Table(5), Table(6)
    tree = top_k_tree(q, depth=1)
    tree = TokenTree(tree.tokens, tree.parents, tree.depths, tree.valid, q=q(()).expand(1, 3, V))
    assert error_of(lambda _: tree, rejection, p) > 1e-3


def test_walking_a_drawn_tree_whose_draws_depend_on_the_choice_is_detected() -> None:
    """The control for the walk: a drafter that has seen the target's token before it was asked."""
    p = Table(5)

    def rule(tree: TokenTree, table: Table, randomness: Randomness) -> tuple[list[int], int]:
        path, token = lazy_walk(tree, table, randomness)
        return (path, token) if len(path) > 1 else (path, int(tree.tokens[0, 1]))

    tree = top_k_tree(Table(6))
    assert error_of(lambda _: tree, rule, p) > 1e-3


# ---- the Gumbel trick that the enumeration replaces ---------------------------------------------------------------


def test_drawn_children_are_ordered_draws_without_replacement() -> None:
    q = Table(23)(())
    samples = 20_000
    drawn = Draw(generator=torch.Generator().manual_seed(1)).children(q.log().float().expand(samples, V), 2)
    pairs = [(a, b) for a in range(V) for b in range(V) if a != b]
    expected = [float(q[a] * q[b] / (1 - q[a])) * samples for a, b in pairs]
    observed = [int(((drawn[:, 0] == a) & (drawn[:, 1] == b)).sum()) for a, b in pairs]
    assert sum(observed) == samples
    total = sum(expected)
    assert chisquare(observed, [value * samples / total for value in expected]).pvalue > 1e-3


def test_verdict_of_rows_pads_shorter_paths() -> None:
    verdict = verdict_of([([0, 2, 3], 7), ([0], 5)], torch.device("cpu"))
    assert verdict.path.tolist() == [[0, 2, 3], [0, 0, 0]]
    assert verdict.counts.tolist() == [3, 1]
    assert verdict.next_token.tolist() == [7, 5]
