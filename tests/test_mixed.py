"""Drafters in one tree: what is merged, what it is worth, who is asked; and that the text stays the target's."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FOUR, VOCAB, OracleDrafter, padded, random_tree, tiny_head, tiny_model, tiny_target
from torch import Tensor
from transformers import PreTrainedModel

from mtp.drafters import Budget, Drafter, Draw, MixedDrafter, RecyclingDrafter, RoundCosts, TargetStates
from mtp.drafters.merging import UNSAID, merge
from mtp.drafters.reliability import MOST, Reliability, held_against
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.past import Past
from mtp.target import Target
from mtp.tree import TokenTree
from mtp.verify import Verdict

NEW = 20
Path = tuple[int, ...]


@cache
def lm_of(architecture: str = "llama") -> PreTrainedModel:
    return tiny_model(architecture)


class Script(Drafter):
    """Proposes what it is told to, and writes down what it is told."""

    def __init__(self, tree: TokenTree | None = None, taps: tuple[int, ...] = (), remembers: int = 99):
        self.tree, self.taps, self.remembers = tree, taps, remembers
        self.seen: list[TargetStates] = []
        self.draws: list[Draw | None] = []
        self.budgets: list[Budget] = []

    def start(self, states: TargetStates, capacity: int) -> None:
        self.seen.append(states)

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        self.draws.append(draw)
        self.budgets.append(budget)
        return self.tree or TokenTree.root_only(pending)

    def observe(self, states: TargetStates) -> None:
        self.seen.append(states)

    def select_rows(self, rows: Tensor) -> None:
        pass

    def rewind(self, length: int) -> int:
        return min(length, self.remembers)


class LookUp(Script):
    runs_network = False


def confident(tree: TokenTree, rng: random.Random) -> TokenTree:
    """The tree with confidences."""
    log_q = torch.tensor([[rng.uniform(0.05, 0.95) for _ in row] for row in tree.tokens.tolist()]).log()
    log_q[:, 0] = 0.0
    return TokenTree(tree.tokens, tree.parents, tree.depths, tree.valid, log_q=log_q)


def promises(tree: TokenTree, row: int) -> dict[Path, float]:
    """What a tree promises of each of its paths, given the path above."""
    alive = {0}
    found: dict[Path, float] = {}
    for node in range(1, tree.num_nodes):
        if tree.valid[row, node] and int(tree.parents[row, node]) in alive:
            alive.add(node)
            promise = UNSAID if tree.log_q is None else float(tree.log_q[row, node].exp())
            found[tuple(tree.path_tokens(row, node)[1:])] = promise
    return found


# ---- merging ------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 999), parts=st.integers(1, 3), unsaid=st.booleans())
def test_merged_trees_hold_every_path_once_with_what_all_say_of_it(seed: int, parts: int, unsaid: bool) -> None:
    rng = random.Random(seed)
    batch = rng.randrange(1, 4)
    trees = [random_tree(rng, batch, rng.randrange(1, 10), vocab=3, ragged=True) for _ in range(parts)]
    for tree in trees:
        tree.tokens[:, 0] = 1
    trees = [tree if unsaid else confident(tree, rng) for tree in trees]
    merged = merge(trees, Reliability(2**parts))
    tree = merged.tree
    for row in range(batch):
        said = [promises(tree, row) for tree in trees]
        expected: dict[Path, tuple[float, int]] = {}
        for path in {path for part in said for path in part}:
            wrong = 1.0
            for part in said:
                wrong *= 1 - min(part.get(path, 0.0), MOST)
            expected[path] = (1 - wrong, sum(1 << at for at, part in enumerate(said) if path in part))
        nodes = [node for node in range(1, tree.num_nodes) if tree.valid[row, node]]
        paths = [tuple(tree.path_tokens(row, node)[1:]) for node in nodes]
        assert sorted(paths) == sorted(expected)
        for node, path in zip(nodes, paths, strict=True):
            promised, group = expected[path]
            assert int(merged.group[row, node]) == group
            assert float(merged.promised[row, node]) == pytest.approx(promised, abs=1e-4)
            worth = 1.0
            for end in range(1, len(path) + 1):
                worth *= min(expected[path[:end]][0], MOST)
            assert float(tree.worth[row, node]) == pytest.approx(worth, abs=1e-4)


@given(seed=st.integers(0, 999), nodes=st.integers(1, 12))
def test_the_worthiest_nodes_are_a_tree(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    trees = [confident(random_tree(rng, 2, rng.randrange(1, 10), vocab=3, ragged=True), rng) for _ in range(2)]
    for tree in trees:
        tree.tokens[:, 0] = 1
    everything = merge(trees, Reliability(4)).tree
    assert everything.worth is not None
    kept = everything.worthiest(nodes)
    assert kept.num_nodes == min(nodes, int(everything.valid.sum(1).max()))
    TokenTree.from_parents(kept.tokens, kept.parents)  # raises where a node comes before its parent
    for row in range(2):
        count = min(nodes, int(everything.valid[row].sum()))
        best = everything.worth[row].topk(count).values
        assert int(kept.valid[row].sum()) == count
        torch.testing.assert_close(kept.worth[row, kept.valid[row]].sort(descending=True).values, best)
        alive = kept.valid[row, kept.parents[row].clamp_min(0)]
        assert bool(alive[kept.valid[row]].all())
        paths = [tuple(kept.path_tokens(row, node)) for node in range(kept.num_nodes) if kept.valid[row, node]]
        assert len(set(paths)) == len(paths)


@given(seed=st.integers(0, 999))
def test_a_text_is_held_against_every_guess(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 2, 12, vocab=2, ragged=True)
    text = torch.tensor([[rng.randrange(2) for _ in range(4)] for _ in range(2)])
    counts = torch.tensor([rng.randrange(1, 5) for _ in range(2)])
    tried, right = held_against(tree, text, counts)
    for row in range(2):
        said = text[row, : counts[row]].tolist()
        for node in range(tree.num_nodes):
            path = tree.path_tokens(row, node)[1:]
            testable = node > 0 and bool(tree.valid[row, node]) and len(path) <= len(said)
            assert bool(tried[row, node]) == (testable and path[:-1] == said[: len(path) - 1])
            assert bool(right[row, node]) == (testable and path == said[: len(path)])


# ---- parts --------------------------------------------------------------------------------------------------------


def test_every_part_is_handed_the_layers_that_it_reads() -> None:
    target = tiny_target()
    parts = [Script(taps=(3, 1)), Script(), Script(taps=(0, 1))]
    mix = MixedDrafter(parts)
    assert mix.taps == (0, 1, 3)
    ids = torch.tensor([[5, 6, 7]])
    hidden, taps = target.encode(ids, mix.taps)
    mix.start(TargetStates(ids, hidden, taps, torch.tensor([3])), 10)
    for part in parts:
        alone = target.encode(ids, part.taps)[1]
        found = part.seen[0].taps
        assert (alone is None) == (found is None)
        if alone is not None and found is not None:
            assert torch.equal(found, alone)


def test_parts_that_remember_differently_are_each_told_what_they_do_not_know() -> None:
    parts = [Script(remembers=99), Script(remembers=4), Script(remembers=6)]
    mix = MixedDrafter(parts)
    assert mix.rewind(7) == 4
    tokens = torch.arange(4, 10)[None]
    mix.observe(TargetStates(tokens, torch.zeros(1, 6, 2), None, torch.tensor([6])))
    assert [part.seen[0].tokens[0].tolist() for part in parts] == [[7, 8, 9], [4, 5, 6, 7, 8, 9], [6, 7, 8, 9]]
    assert [int(part.seen[0].counts) for part in parts] == [3, 6, 4]
    mix.observe(TargetStates(tokens[:, :1], torch.zeros(1, 1, 2), None, torch.tensor([1])))
    assert all(int(part.seen[1].counts) == 1 for part in parts)


def test_a_mix_is_of_two_or_more_different_drafters() -> None:
    part, other = Script(), Script()
    for parts in ([], [part], [part, part], [MixedDrafter([part, other]), part]):
        with pytest.raises(ValueError, match="two or more drafters, each of them once; found"):
            MixedDrafter(parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("recycling+nonsense", "No drafter 'nonsense'; there are .*recycling"),
        ("recycling+recycling", "each drafter once"),
        ("none+recycling", "'none', which guesses nothing"),
        ("head+recycling", "No drafter 'head'.*this one has none"),
        ("recycling+", "No drafter ''"),
    ],
)
def test_names_that_make_no_mix_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeModel.from_target(lm_of(), "none").generate(torch.tensor([[1]]), drafter=name)


def test_the_head_of_a_mix_is_the_models_own() -> None:
    target = Target(lm_of())
    head = tiny_head("eagle3", target)
    mix = SpeculativeModel(target, head).drafter_for("head+recycling")
    assert isinstance(mix, MixedDrafter)
    assert mix.parts[0] is head
    assert isinstance(mix.parts[1], RecyclingDrafter)
    assert mix.taps == tuple(sorted(set(head.taps)))


# ---- who is asked, and who is believed ----------------------------------------------------------------------------


def star(tokens: list[int], confidence: float) -> TokenTree:
    nodes, parents = torch.tensor([[0, *tokens]]), torch.tensor([[-1] + [0] * len(tokens)])
    return TokenTree.from_parents(nodes, parents, log_q=torch.full(nodes.shape, confidence).log())


def rounds(mix: MixedDrafter, answer: int, count: int, nodes: int = 2) -> list[list[int]]:
    """The tokens that each round's tree guesses, while the target always says ``answer``."""
    guessed = []
    for _ in range(count):
        tree = mix.propose(torch.tensor([0]), Budget(nodes))
        guessed.append(tree.tokens[0, 1:].tolist())
        logits = torch.nn.functional.one_hot(torch.full_like(tree.tokens, answer), VOCAB).float()
        path = [0, *[at for at, token in enumerate(guessed[-1], start=1) if token == answer]]
        verdict = Verdict(torch.tensor([path]), torch.tensor([len(path)]), torch.tensor([answer]))
        mix.observe_tree(tree, logits, verdict)
    return guessed


def test_a_part_that_promises_too_much_loses_its_place_and_wins_it_back() -> None:
    boastful, modest = LookUp(star([5], 0.9)), LookUp(star([6], 0.4))
    mix = MixedDrafter([boastful, modest])
    guessed = rounds(mix, answer=6, count=30)
    assert guessed[0] == [5]
    assert guessed[3:] == [[6]] * 27, "three rounds are enough to see who is right"
    guessed = rounds(mix, answer=5, count=60)
    assert guessed[-10:] == [[5]] * 10, "guesses that are not verified are watched too"


def test_guesses_that_several_parts_agree_on_are_believed_by_their_own_record() -> None:
    """Both name 5, which is always right; what only one names never is."""
    mix = MixedDrafter([LookUp(star([5, 6], 0.4)), LookUp(star([5, 7], 0.4))])
    rounds(mix, answer=5, count=40, nodes=4)
    tree = mix.propose(torch.tensor([0]), Budget(4))
    assert tree.worth is not None
    worth = dict(zip(tree.tokens[0].tolist(), tree.worth[0].tolist(), strict=True))
    assert worth[5] > 0.95
    assert worth[6] < 0.05
    assert worth[7] < 0.05


VERIFY = (0.0, 1.0, 1.1, 1.2, 1.3, 1.4)


def path(tokens: list[int], confidence: float) -> TokenTree:
    """One guess behind the other."""
    nodes = torch.tensor([[0, *tokens]])
    parents = torch.arange(-1, len(tokens))[None]
    return TokenTree.from_parents(nodes, parents, log_q=torch.full(nodes.shape, confidence).log())


def asked(look_up: float, network: float, first: float, count: int = 40, level: float = 0.0, depth: int = 1) -> int:
    """In how many of ``count`` rounds a network is asked, at these confidences and costs of its passes.

    Args:
        depth: of what the look-up guesses.
    """
    part = Script(star([6], network))
    mix = MixedDrafter([LookUp(path([5] * depth, look_up)), part])
    budget = Budget(4, costs=RoundCosts(VERIFY, first=first, level=level, other=0.0))
    for _ in range(count):
        mix.propose(torch.tensor([0]), budget)
    return len(part.draws)


def test_a_network_is_asked_only_where_it_pays() -> None:
    assert asked(look_up=0.05, network=0.9, first=0.1) == 40
    assert asked(look_up=0.9, network=0.05, first=0.5) < 4
    assert asked(look_up=0.05, network=0.9, first=2.0) < 4
    assert asked(look_up=0.9, network=0.05, first=0.5, count=400) > 4, "it is tried again after a while"


def test_how_deep_a_look_up_guesses_says_nothing_of_a_networks_passes() -> None:
    assert asked(look_up=0.05, network=0.9, first=0.1, level=0.5, depth=8) == 40


def test_without_costs_every_part_is_asked() -> None:
    parts = [LookUp(star([5], 0.9)), Script(star([6], 0.1))]
    mix = MixedDrafter(parts)
    mix.propose(torch.tensor([0]), Budget(4))
    assert [len(part.draws) for part in parts] == [1, 1]


def test_costs_are_kept_apart_by_what_the_parts_are() -> None:
    target = Target(lm_of())
    mixes = [MixedDrafter([tiny_head(family, target), RecyclingDrafter()]) for family in sorted(HEADS)]
    assert len({repr(mix.config) for mix in mixes}) == len(mixes)


def test_the_best_part_alone_is_not_better() -> None:
    """Noise that is as sure of itself as the part that knows the answer, and a budget for one of them."""
    prompts = FOUR
    width = max(map(len, prompts))
    truth = lm_of().generate(**padded(prompts), max_new_tokens=90, do_sample=False)[:, width:].tolist()

    class Noise(LookUp):
        def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
            tokens = torch.cat([pending[:, None], torch.arange(1, budget.nodes).expand(len(pending), -1)], dim=1)
            parents = torch.tensor([[-1] + [0] * (budget.nodes - 1)] * len(pending))
            return TokenTree.from_parents(tokens, parents, log_q=torch.full(tokens.shape, -0.5))

    def tau(drafter: Drafter) -> float:
        model = SpeculativeModel(Target(lm_of()), drafter)
        settings = {"max_new_tokens": 80, "do_sample": False, "nodes": 5, "return_dict_in_generate": True}
        out = model.generate(**padded(prompts), **settings)
        assert out.sequences[:, width:].tolist() == [row[:80] for row in truth]
        return out.acceptance.mean_accepted_length

    alone = tau(OracleDrafter(truth, lengths=[4]))
    assert tau(MixedDrafter([Noise(), OracleDrafter(truth, lengths=[4])])) > 0.9 * alone


# ---- the text stays the target's ----------------------------------------------------------------------------------


def model_with_a_head(family: str, architecture: str = "llama") -> SpeculativeModel:
    target = Target(lm_of(architecture))
    return SpeculativeModel(target, tiny_head(family, target))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("family", sorted(HEADS))
@pytest.mark.parametrize("settings", [{}, {"eos_token_id": [4, 9, 14]}, {"repetition_penalty": 1.7}])
def test_greedy_text_of_a_mix_is_that_of_transformers(architecture: str, family: str, settings: dict[str, Any]) -> None:
    batch = padded(FOUR)
    expected = lm_of(architecture).generate(**batch, max_new_tokens=NEW, do_sample=False, **settings)
    model = model_with_a_head(family, architecture)
    for nodes in (3, 16):
        got = model.generate(
            **batch, max_new_tokens=NEW, do_sample=False, drafter="head+recycling", nodes=nodes, **settings
        )
        assert got.equal(expected)


@pytest.mark.parametrize("name", ["recycling", "head+recycling"])
def test_greedy_text_is_that_of_transformers_when_costs_are_measured(name: str) -> None:
    model = model_with_a_head("eagle3")
    batch = padded(FOUR)
    expected = lm_of().generate(**batch, max_new_tokens=NEW, do_sample=False)
    for _ in range(2):
        assert model.generate(**batch, max_new_tokens=NEW, do_sample=False, drafter=name, nodes="auto").equal(expected)


@pytest.mark.parametrize(("rule", "drawn"), [("walk", False), ("rejection", True), ("traversal", True)])
def test_the_first_network_draws_for_rules_that_need_it_and_no_other_part(rule: str, drawn: bool) -> None:
    """Of two distributions at a node the second would not be what its children were drawn from."""
    parts = [LookUp(), Script(), Script()]
    model = SpeculativeModel(Target(lm_of()), MixedDrafter(parts))
    model.generate(**padded(FOUR), max_new_tokens=4, do_sample=True, rule=rule, nodes=8)
    assert [{draw is not None for draw in part.draws} for part in parts] == [{False}, {drawn}, {False}]


@pytest.mark.parametrize(("parts", "rule"), [("recycling+ngram", "walk"), ("recycling+head", "traversal")])
def test_a_mix_is_decided_about_as_its_network_alone_would_be(parts: str, rule: str) -> None:
    model = model_with_a_head("eagle3")
    assert model.drafter_for(parts).best_rule(1.0) == rule
    assert model.drafter_for(parts).best_rule(0.5) == "walk"


def test_the_surer_the_others_are_the_fewer_nodes_are_drawn() -> None:
    drawn = []
    for confidence in (0.001, 0.3, 0.95):
        network = Script()
        mix = MixedDrafter([LookUp(path([5] * 20, confidence)), network])
        mix.propose(torch.tensor([0]), Budget(16), Draw())
        drawn.append(network.budgets[0].nodes)
    assert drawn[0] == 16, "guesses that are worth nothing cost the network nothing"
    assert drawn == sorted(drawn, reverse=True)
    assert drawn[-1] < 5


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_a_ragged_batch_of_a_mix_that_draws_is_decoded_to_its_end(rule: str) -> None:
    model = model_with_a_head("eagle3")
    settings = {"max_new_tokens": NEW, "do_sample": True, "rule": rule, "nodes": 9, "eos_token_id": [4, 9]}
    torch.manual_seed(3)
    out = model.generate(**padded(FOUR), drafter="recycling+head", return_dict_in_generate=True, **settings)
    assert out.sequences.shape[0] == len(FOUR)
    assert not any("the walk decided" in note for note in out.acceptance.notes)


def test_sampled_text_of_a_mix_is_that_of_its_seed_at_batch_one_whatever_the_trees_are() -> None:
    model = model_with_a_head("eagle3")
    texts = []
    for drafter in ("none", "head+recycling", "head+recycling"):
        torch.manual_seed(11)
        prompt = torch.tensor(FOUR[:1])
        settings = {"max_new_tokens": NEW, "do_sample": True, "rule": "walk"}
        texts.append(model.generate(prompt, drafter=drafter, **settings).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_a_conversation_goes_on_with_every_part_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An EAGLE-3 head remembers one token less than the table of successors, which remembers all."""
    model = model_with_a_head("eagle3")
    read: list[int] = []
    forward = model.target.forward

    def counting(ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(ids.shape[1])
        return forward(ids, *args, **kwargs)

    monkeypatch.setattr(model.target, "forward", counting)
    past, text = None, FOUR[1]
    for turn in range(3):
        prompt = torch.tensor([text])
        read.clear()
        out = model.generate(
            prompt,
            max_new_tokens=NEW,
            do_sample=False,
            drafter="head+recycling",
            past=past,
            return_dict_in_generate=True,
        )
        assert out.sequences.equal(lm_of().generate(prompt, max_new_tokens=NEW, do_sample=False)), f"turn {turn}"
        assert past is None or read[0] < 12, "only what is new, and the last round's tokens, are read"
        past = out.past
        text = [*out.sequences[0].tolist(), *FOUR[2][: 3 + turn]]


def test_a_past_of_other_parts_is_read_anew() -> None:
    target = Target(lm_of())
    model = SpeculativeModel(target, MixedDrafter([tiny_head("eagle3", target), RecyclingDrafter()]))
    out = model.generate(torch.tensor(FOUR[:1]), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    past: Past = out.past
    prompt = torch.tensor([[*out.sequences[0].tolist(), 5, 6]])
    other = MixedDrafter([tiny_head("medusa", target), RecyclingDrafter()])
    again = model.generate(prompt, max_new_tokens=NEW, do_sample=False, drafter=other, past=past)
    assert again.equal(lm_of().generate(prompt, max_new_tokens=NEW, do_sample=False))
