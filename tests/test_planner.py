"""The planner against simulated costs and a simulated drafter, whose acceptance drifts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp import verify
from mtp.cost import Costs, CostTable
from mtp.drafters import Budget, RoundCosts
from mtp.growth import BestFirstGrowth
from mtp.planner import FIRST_ROUNDS, CostPlanner, FixedPlanner, RoundReport
from mtp.static_tree import best_static_tree, static_tree
from mtp.tree import TokenTree

CPU = CostTable((64,), (1, 2, 4, 8, 16, 32), ((1.0, 1.15, 1.25, 1.4, 1.7, 2.4),), first=0.12, level=0.05)
GPU = CostTable((64,), (1, 2, 4, 8, 16, 32), ((1.0, 1.0, 1.0, 1.01, 1.02, 1.1),), first=0.05, level=0.05)
DEAR = CostTable((64,), (1, 2, 4, 8, 16, 32), ((1.0, 1.9, 3.8, 7.6, 15.0, 30.0),), first=0.5, level=0.5)


class KnownCosts(Costs):
    """A table that nobody had to measure."""

    def __init__(self, table: CostTable):
        self.known = table

    def prepare(self, batch: int) -> None:
        pass

    def table(self, batch: int) -> CostTable:
        return self.known


def report(drafted: bool, committed: float, promised: float | None, seconds: float, guesses: int = 1) -> RoundReport:
    """Of a round in which nobody looks at what was guessed and decided."""
    tree = TokenTree.chain(torch.tensor([0]), torch.zeros(1, guesses, dtype=torch.long))
    return RoundReport(drafted, committed, promised, seconds, tree, verdict=None, outcome=None)


@dataclass
class Outcome:
    tokens: int
    seconds: float
    drafted: int
    sizes: list[int]

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.tokens / self.seconds


def simulate(
    table: CostTable,
    honesty: Callable[[int], float],
    tokens: int = 4000,
    seed: int = 0,
    noise: float = 0.05,
    planner: CostPlanner | None = None,
    context: int = 64,
) -> Outcome:
    """Rounds of a drafter that promises the same every time; ``honesty(token)`` of its promises are kept."""
    rng = random.Random(seed)
    planner = planner or CostPlanner(KnownCosts(table), nodes=32)
    planner.prepare(1)
    # Conditional acceptance by depth 0.6, shared by the ranks: worths of a plausible tree.
    worths = torch.tensor([[0.6**depth * 0.7 * 0.3**rank for depth in range(1, 6) for rank in range(4)]])
    out = Outcome(0, 0.0, 0, [])
    while out.tokens < tokens:
        budget = planner.budget(context, 1)
        wobble = 1 + rng.uniform(-noise, noise)
        plain = table.of_round(64, 32)
        if budget is None:
            seconds, committed, promised = plain.plain * wobble, 1, None
        else:
            size, _ = budget.costs.best(worths, 3)
            kept_worths = worths[0].topk(size - 1).values.tolist() if size > 1 else []
            promised = sum(kept_worths)
            expected = honesty(out.tokens) * promised
            committed = 1 + int(expected) + (rng.random() < expected % 1)
            seconds = (plain.verify[size] + plain.first + 2 * plain.level + plain.other) * wobble
            out.drafted += 1
            out.sizes.append(size)
        guesses = 0 if budget is None else size - 1
        planner.learn(report(budget is not None, committed, promised, seconds, guesses))
        out.tokens += committed
        out.seconds += seconds / plain.plain
    return out


@pytest.mark.parametrize("table", [CPU, GPU, DEAR], ids=["cpu", "gpu", "dear"])
@pytest.mark.parametrize("honesty", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_a_drafter_that_is_hardly_ever_right_costs_at_most_three_percent(
    table: CostTable, honesty: float, seed: int
) -> None:
    assert simulate(table, lambda _: honesty, tokens=600, seed=seed).speed > 0.97


@pytest.mark.parametrize("table", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_drafter_that_keeps_its_promises_is_used_in_nearly_every_round(table: CostTable) -> None:
    out = simulate(table, lambda _: 1.0)
    assert out.speed > 1.25
    assert out.drafted > 0.95 * (out.drafted + FIRST_ROUNDS)


def test_cheap_passes_make_large_trees_and_dear_ones_small() -> None:
    small, large = (simulate(table, lambda _: 1.0).sizes for table in (CPU, GPU))
    assert sum(small) / len(small) < sum(large) / len(large)
    assert max(simulate(DEAR, lambda _: 1.0).sizes, default=1) <= 2


def test_drafting_stops_when_text_drifts_away_and_starts_again_when_it_comes_back() -> None:
    def drifting(token: int) -> float:
        return 1.0 if token < 1000 or token >= 3000 else 0.0

    out = simulate(CPU, drifting, tokens=6000)
    ideal = simulate(CPU, lambda _: 1.0, tokens=4000).seconds + 2000
    assert out.seconds < 1.05 * ideal
    assert out.drafted < simulate(CPU, lambda _: 1.0, tokens=6000).drafted


def texts(kinds: list[float], context: int = 64, seed: int = 0) -> list[Outcome]:
    """Texts of 96 tokens one after the other, each as honest as it is, behind prompts of ``context`` tokens."""
    planner = CostPlanner(KnownCosts(CPU), nodes=32)
    return [
        simulate(CPU, lambda _, kind=kind: kind, 96, 100 * seed + at, planner=planner, context=context)  # type: ignore[misc]
        for at, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_texts_on_which_drafting_fails_spoil_none_behind_them(seed: int) -> None:
    after = texts([0.0] * 3 + [1.0] * 4, seed=seed)[3:]
    ideal = texts([1.0] * 4, seed=seed)
    lost = sum(out.seconds for out in after) - sum(out.seconds for out in ideal)
    assert lost < 16  # rounds of some 250, the rest of the first of them among these
    assert all(out.drafted > 30 for out in after[1:])


@pytest.mark.parametrize("seed", range(5))
def test_short_texts_on_which_drafting_fails_cost_at_most_three_percent(seed: int) -> None:
    out = texts([0.05] * 12, seed=seed)
    assert sum(each.tokens for each in out) / sum(each.seconds for each in out) > 0.97


def test_behind_long_prompts_a_rest_goes_on() -> None:
    """A trial would have the drafter read the prompt."""
    assert sum(out.drafted for out in texts([0.0] * 12, context=2000)) < sum(out.drafted for out in texts([0.0] * 12))
    assert texts([0.0] * 12, context=2000)[-1].drafted <= 2


def test_a_table_that_promises_too_much_is_found_out_by_the_clock() -> None:
    """Verification is three times as dear as measured: drafting loses, and stops although promises are kept."""
    planner, seconds, tokens = CostPlanner(KnownCosts(GPU), nodes=32), 0.0, 0
    for _ in range(600):
        budget = planner.budget(64, 1)
        taken, committed = (1.0, 1) if budget is None else (3.0, 2)
        planner.learn(report(budget is not None, committed, None if budget is None else 1.0, taken))
        seconds, tokens = seconds + taken, tokens + committed
    assert tokens / seconds > 0.97


@pytest.mark.parametrize("spike", [3.0, 10.0, 100.0])
@pytest.mark.parametrize("first", range(6))
def test_a_round_that_the_machine_disturbed_stops_no_drafting(spike: float, first: int) -> None:
    planner = CostPlanner(KnownCosts(CPU), nodes=32)
    drafted = []
    for at in range(200):
        budget = planner.budget(64, 1)
        taken = (spike if at % 20 == first else 1.0) * (1.0 if budget is None else 1.3)
        planner.learn(report(budget is not None, 1 if budget is None else 2, None if budget is None else 1.0, taken))
        drafted.append(budget is not None)
    assert all(drafted[FIRST_ROUNDS:])


def test_plain_rounds_that_the_machine_disturbed_make_no_drafting_look_good() -> None:
    """A plain round that took a hundred times as long is not what drafting has to beat."""
    planner = CostPlanner(KnownCosts(CPU), nodes=32)
    seconds, tokens = 0.0, 0
    for at in range(600):
        budget = planner.budget(64, 1)
        taken = 1.0 if budget is None else 1.3
        planner.learn(report(budget is not None, 1, None if budget is None else 0.3, taken * (100 if at == 1 else 1)))
        seconds, tokens = seconds + taken, tokens + 1
    assert tokens / seconds > 0.97


def test_trust_follows_what_was_kept() -> None:
    planner = CostPlanner(KnownCosts(GPU), nodes=32)
    for _ in range(60):
        planner.budget(64, 1)
        planner.learn(report(True, committed=1.5, promised=1.0, seconds=1.0))
    assert planner.trust == pytest.approx(0.5, abs=0.02)


LOOKUP = CostTable((64,), (1, 2, 4, 8, 16, 32), CPU.verify, first=0.004, level=0.0)
CHAIN = torch.tensor([[0.9**depth for depth in range(1, 17)]])


def look_up(
    found: Callable[[int], bool],
    kept: Callable[[int, int], int],
    rounds: int,
    slower: float = 1.0,
    noise: float = 0.0,
    seed: int = 0,
) -> tuple[CostPlanner, list[int]]:
    """Rounds of a drafter that costs next to nothing and finds a chain to copy in some rounds, and else nothing.

    Args:
        found: whether it finds something in a round.
        kept: how many guesses of a chain of so many are kept in a round.
        slower: the machine, than when the table was measured.
        noise: of the rounds' times, as a share of them.

    Returns:
        the planner, and the sizes of the trees; 0 where it was not asked.
    """
    planner, sizes = CostPlanner(KnownCosts(LOOKUP), nodes=32), []
    rng = random.Random(seed)
    for at in range(rounds):
        budget, costs = planner.budget(64, 1), LOOKUP.of_round(64, 32)
        size = 1 if budget is None or not found(at) else budget.costs.best(CHAIN, 1)[0]
        seconds = slower * (costs.verify[size] + costs.other) + (0.0 if budget is None else costs.first)
        seconds *= 1 + rng.uniform(-noise, noise)
        promised = None if size == 1 else float(CHAIN[0, : size - 1].sum())
        planner.learn(report(budget is not None, 1 + kept(at, size - 1), promised, seconds, size - 1))
        sizes.append(0 if budget is None else size)
    return planner, sizes


@pytest.mark.parametrize("slower", [1.0, 1.2])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_costs_nothing_never_rests_while_it_finds_nothing(
    slower: float, noise: float, seed: int
) -> None:
    _, sizes = look_up(lambda at: at >= 400, lambda at, guesses: round(0.8 * guesses), 440, slower, noise, seed)
    assert 0 not in sizes[FIRST_ROUNDS:]
    assert min(sizes[400:]) > 4, "the first thing found is used at once"


def test_faith_returns_in_rounds_without_guesses() -> None:
    """Where hardly anything is trusted nothing is guessed, and from nothing guessed nothing would ever be learnt."""
    planner = CostPlanner(KnownCosts(LOOKUP), nodes=32)
    for _ in range(20):
        planner.budget(64, 1)
        planner.learn(report(True, committed=1.0, promised=0.5, seconds=1.0))
    assert planner.trust < 0.3
    for _ in range(40):
        planner.budget(64, 1)
        planner.learn(report(True, committed=1.0, promised=None, seconds=1.0, guesses=0))
    assert planner.trust > 0.9


def test_a_fixed_planner_asks_for_the_same_every_time() -> None:
    planner = FixedPlanner(7)
    assert planner.budget(10, 1) == planner.budget(1000, 4) == Budget(7)


# ---- trees and what they cost -------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 3))
def test_best_size_is_the_best_by_trying_all(seed: int, candidates: int, levels: int) -> None:
    rng = random.Random(seed)
    verify = list(itertools.accumulate([0.0, 1.0, *(rng.uniform(0, 0.5) for _ in range(12))]))
    costs = RoundCosts(tuple(verify), first=rng.random(), level=rng.random(), other=0.1, trust=rng.uniform(0.2, 1.2))
    worths = torch.rand(2, candidates, generator=torch.Generator().manual_seed(seed))

    def rate(nodes: int) -> float:
        kept = float(worths.sort(dim=1, descending=True).values[:, : nodes - 1].sum(1).mean())
        return (1 + costs.trust * kept) / (costs.first + (levels - 1) * costs.level + 0.1 + verify[nodes])

    nodes, best = costs.best(worths, levels)
    assert best == pytest.approx(max(rate(size) for size in range(1, min(candidates + 1, 13) + 1)), rel=1e-5)
    assert rate(nodes) == pytest.approx(best, rel=1e-5)


def grown(costs: RoundCosts, levels: int | None = None) -> tuple[int, int]:
    """Passes taken and nodes kept for a drafter that is sure of one path."""
    growth = BestFirstGrowth(torch.tensor([0]), Budget(32, levels, costs), width=3)
    sure = torch.tensor([0.9, 0.06, 0.04]).log()
    growth.add(sure[None, None], torch.arange(3))
    taken = 1
    while growth.pays_to_go_on() and taken < 10:
        growth.frontier()
        growth.add(sure.expand(1, 3, 3), torch.arange(3))
        taken += 1
    return taken, growth.tree().num_nodes


def test_growth_goes_on_while_it_pays() -> None:
    verify = (0.0, *(1 + 0.02 * size for size in range(40)))
    cheap = grown(RoundCosts(verify, first=0.1, level=0.01, other=0.0))
    dear = grown(RoundCosts(verify, first=0.1, level=0.3, other=0.0))
    never = grown(RoundCosts(verify, first=0.1, level=5.0, other=0.0))
    assert cheap[0] > dear[0] > never[0] == 1
    assert grown(RoundCosts(verify, first=0.1, level=0.01, other=0.0), levels=2)[0] == 2


def test_growth_makes_no_tree_where_none_pays() -> None:
    verify = (0.0, 1.0, *(10.0 * size for size in range(2, 40)))
    assert grown(RoundCosts(verify, first=0.0, level=0.0, other=0.0))[1] == 1


def test_static_trees_are_cut_where_they_stop_paying() -> None:
    accuracy = ((0.6, 0.2, 0.1), (0.4, 0.1, 0.05))
    free = RoundCosts((0.0, *([1.0] * 40)), first=0.1, level=0.0, other=0.0)
    assert best_static_tree(accuracy, 12, free) == static_tree(accuracy, 12)
    steep = RoundCosts((0.0, *(1 + 0.3 * size for size in range(40))), first=0.1, level=0.0, other=0.0)
    assert best_static_tree(accuracy, 12, steep) == static_tree(accuracy, 2)


# ---- ahead --------------------------------------------------------------------------------------------------------


def seen(worths: list[float], depths: list[int], trees: int = 1) -> verify.Outcome:
    """What the host knows of a tree, and of others like it."""
    return verify.Outcome(
        [[0]] * trees, [[1]] * trees, [2] * trees, [len(worths) - 1] * trees, [worths] * trees, [depths] * trees
    )


def settled(table: CostTable, likely: float, rounds: int = 12) -> tuple[Budget, int]:
    """The budget after some rounds of one drafter sized ahead, and the size the drafter would choose by itself."""
    planner = CostPlanner(KnownCosts(table), nodes=32, ahead=True)
    candidates = sorted(
        ((likely**depth * 0.5**rank, depth) for depth in range(1, 9) for rank in range(4)), reverse=True
    )
    planner.resting = 0
    for _ in range(rounds):
        budget = planner.budget(64, 1)
        assert budget.costs is None
        kept = [(1.0, 0), *(one for one in candidates if one[1] <= budget.levels)][: budget.nodes]
        worths, depths = map(list, zip(*kept, strict=True))
        promised = sum(worths) - 1
        round_ = report(True, 1 + promised, promised, 0.1, len(kept) - 1)
        planner.learn(replace(round_, outcome=seen(worths, depths)))
    costs = table.of_round(64, 32)
    levels = max(depth for _, depth in kept)
    return budget, costs.best(torch.tensor([[worth for worth, _ in candidates]]), levels)[0]


@pytest.mark.parametrize("table", [CPU, GPU, DEAR], ids=["cpu", "gpu", "dear"])
@pytest.mark.parametrize("likely", [0.3, 0.6, 0.9])
def test_trees_sized_ahead_come_to_the_size_that_asking_gives(table: CostTable, likely: float) -> None:
    budget, asked = settled(table, likely)
    assert budget.nodes & (budget.nodes - 1) == 0
    assert asked / 2 < budget.nodes <= max(2 * asked, 2)


def test_surer_drafters_are_given_deeper_trees_ahead() -> None:
    levels = [settled(GPU, likely)[0].levels for likely in (0.2, 0.6, 0.95)]
    assert levels == sorted(levels)
    assert levels[0] < levels[-1]


def test_rows_are_sized_ahead_together() -> None:
    planner = CostPlanner(KnownCosts(GPU), nodes=32, ahead=True)
    planner.resting = 0
    planner.budget(64, 3)
    planner.learn(replace(report(True, 1.5, 0.9, 1.0), outcome=seen([1.0, 0.6, 0.3], [0, 1, 2], trees=3)))
    assert planner.budget(64, 3) == Budget(8, 3)  # of three nodes all were worth it: twice as many, and one level more
