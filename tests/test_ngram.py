"""Looking text up: the suffix structure against brute force, what it costs, and what is guessed from it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FOUR, VOCAB, padded, tiny_model

from mtp.drafters import Budget, MixedDrafter, NgramDrafter, OutputStore, RoundCosts, TargetStates
from mtp.drafters.lookup import LEAST_WORTH, confidence, followers, grow
from mtp.model import SpeculativeModel
from mtp.suffix import COUNTED, NOTHING, ROOT, SuffixAutomaton
from mtp.tree import TokenTree

# ---- the suffix structure -------------------------------------------------------------------------------------------

few_letters = st.lists(st.integers(0, 2), max_size=24)
texts = st.lists(few_letters, min_size=1, max_size=4)


def occurs(phrase: Sequence[int], texts: Sequence[Sequence[int]]) -> Counter[int | None]:
    """What follows a phrase wherever it stands, None at the end of a text."""
    found: Counter[int | None] = Counter()
    for text in texts:
        for at in range(len(text) - len(phrase) + 1):
            if list(text[at : at + len(phrase)]) == list(phrase):
                found[text[at + len(phrase)] if at + len(phrase) < len(text) else None] += 1
    return found


def longest_end(query: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    return max(length for length in range(len(query) + 1) if occurs(query[len(query) - length :], texts) or not length)


@given(texts, few_letters)
def test_the_longest_end_of_a_text_is_found_with_all_that_followed_it(texts: list[list[int]], query: list[int]) -> None:
    automaton = SuffixAutomaton.of(texts)
    match = automaton.find(query)
    assert match.length == longest_end(query, texts)
    contexts = list(automaton.contexts(match))
    for length in range(1, match.length + 1):
        truth = occurs(query[len(query) - length :], texts)
        followed = {token: count for token, count in truth.items() if token is not None}
        # The phrase's own state is that of the shortest context at least as long.
        state = next((context.state for context in reversed(contexts) if context.length >= length), None)
        found = {} if state is None else automaton.followers(state)
        assert found.keys() == followed.keys()


@given(texts)
def test_followers_are_counted(texts: list[list[int]]) -> None:
    automaton = SuffixAutomaton.of(texts)
    phrases = {tuple(text[a:b]) for text in texts for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    for phrase in phrases:
        match = automaton.find(phrase)
        assert match.length == len(phrase)
        assert automaton.count(match.state) == sum(occurs(phrase, texts).values())
    assert max(map(len, texts)) < COUNTED


@given(few_letters, st.integers(0, 2))
def test_a_text_is_found_in_itself_where_it_stood_before(text: list[int], pending: int) -> None:
    automaton, state = SuffixAutomaton(), ROOT
    for token in text:
        state = automaton.extend(state, token)
    match = automaton.advance(automaton.whole(state), pending)
    assert match.length == longest_end([*text, pending], [text])


@given(few_letters, st.lists(st.tuples(st.integers(0, 24), few_letters), max_size=3))
def test_a_text_that_is_taken_back_goes_on_from_there_and_its_old_ends_stay_known(
    text: list[int], turns: list[tuple[int, list[int]]]
) -> None:
    automaton, tokens, states, versions = SuffixAutomaton(), [], [ROOT], []
    for keep, new in [(0, text), *turns]:
        del tokens[keep:], states[keep + 1 :]
        for token in new:
            tokens.append(token)
            states.append(automaton.extend(states[-1], token))
        versions.append(list(tokens))
    for version in versions:
        for end in range(len(version) + 1):
            assert automaton.find(version[:end]).length == end
    assert automaton.whole(states[-1]).length == len(tokens)
    for query in ([0, 1], [1, 1, 0], [2, 0, 1, 0]):
        assert automaton.find(query).length == longest_end(query, versions)


@given(few_letters, few_letters, few_letters)
def test_a_place_found_earlier_stays_right_while_more_is_read(
    first: list[int], query: list[int], more: list[int]
) -> None:
    automaton, state = SuffixAutomaton(), ROOT
    for token in first:
        state = automaton.extend(state, token)
    match = automaton.find(query)
    for token in more:
        state = automaton.extend(state, token)
    phrase = query[len(query) - match.length :]
    for token in range(3):
        ends = [*phrase, token]
        assert automaton.advance(match, token).length == longest_end(ends, [[*first, *more]])
    for length in range(match.length + 1):
        assert automaton.shortened(match, length).length == length


def fibonacci(length: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


def de_bruijn_like(length: int) -> list[int]:
    """Runs that grow: a, ab, aab, aaab ..., where every run is a new longest match."""
    text: list[int] = []
    while len(text) < length:
        text += [0] * (len(text) // 10 + 1) + [1]
    return text[:length]


HARD = {
    "one token": lambda length: [5] * length,
    "two in turn": lambda length: [1, 2] * (length // 2),
    "a long period": lambda length: (list(range(100)) * length)[:length],
    "fibonacci": fibonacci,
    "growing runs": de_bruijn_like,
    "noise": lambda length: random.Random(0).choices(range(50), k=length),
    "noise of two": lambda length: random.Random(1).choices(range(2), k=length),
}


@pytest.mark.parametrize("kind", sorted(HARD))
def test_reading_and_looking_up_a_token_takes_the_same_few_steps_however_long_the_text_is(kind: str) -> None:
    """Counted, not timed."""
    taken = []
    for length in (8_000, 32_000):
        automaton, state = SuffixAutomaton(), ROOT
        for token in HARD[kind](length):
            automaton.advance(automaton.whole(state), token)  # what a round asks before the token is read
            state = automaton.extend(state, token)
        taken.append(automaton.steps / length)
        assert len(automaton) <= 2 * length
    assert taken[1] < 10 + COUNTED
    assert taken[1] < 1.2 * taken[0]


def test_counting_is_bounded_where_a_token_repeats() -> None:
    automaton = SuffixAutomaton.of([[5] * 1000])
    exact = automaton.find([5] * 990)
    assert automaton.count(exact.state) == 11
    assert automaton.count(automaton.find([5]).state) < 1000


# ---- confidences ----------------------------------------------------------------------------------------------------


def test_longer_phrases_and_followers_seen_more_often_are_surer() -> None:
    by_length = [confidence(length, 1, first=True) for length in (1, 2, 4, 16, 64)]
    assert by_length == sorted(by_length)
    assert 0.2 < by_length[0] < 0.4
    assert by_length[-1] > 0.95
    assert confidence(2, 3, first=True) > confidence(2, 1, first=True) > confidence(2, 1, first=False)


@given(texts, few_letters)
def test_probabilities_of_followers_are_those_of_different_tokens(texts: list[list[int]], query: list[int]) -> None:
    automaton = SuffixAutomaton.of(texts)
    found = followers([(automaton, automaton.find(query))])
    assert len({token for token, _ in found}) == len(found)
    assert all(chance > 0 for _, chance in found)
    assert sum(chance for _, chance in found) < 1


@given(texts, few_letters, st.integers(1, 12))
def test_a_tree_grows_from_the_likeliest_on_and_can_be_cut_anywhere(
    texts: list[list[int]], query: list[int], most: int
) -> None:
    automaton = SuffixAutomaton.of(texts)
    guesses = grow([(automaton, automaton.find(query))], most)
    assert len(guesses) <= most
    worths = [1.0, *(guess.worth for guess in guesses)]
    assert worths == sorted(worths, reverse=True)
    assert worths[-1] >= LEAST_WORTH
    paths = [[]]
    for node, guess in enumerate(guesses, start=1):
        assert guess.parent < node
        assert guess.worth == pytest.approx(worths[guess.parent] * guess.chance)
        paths.append([*paths[guess.parent], guess.token])
        assert guess.depth == len(paths[-1])
        # The token was read behind some end of all that comes before it.
        whole = [*query, *paths[-1]]
        assert any(occurs(whole[at:], texts) for at in range(len(whole) - 1))
    assert len(set(map(tuple, paths))) == len(paths)


def test_what_followed_more_often_and_later_comes_first() -> None:
    automaton = SuffixAutomaton.of([[1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2, 9]])
    chances = dict(followers([(automaton, automaton.find([1, 2]))]))
    assert sorted(chances, key=chances.__getitem__, reverse=True) == [7, 9, 8]


def test_the_longer_match_among_several_texts_is_asked_first() -> None:
    long, short = SuffixAutomaton.of([[4, 5, 6, 1]]), SuffixAutomaton.of([[6, 2, 6, 2]])
    places = [(short, short.find([4, 5, 6])), (long, long.find([4, 5, 6]))]
    assert [token for token, _ in followers(places)] == [1, 2]
    assert followers(places) == followers(places[::-1])


# ---- the drafter ----------------------------------------------------------------------------------------------------


def states_of(rows: list[list[int]]) -> TargetStates:
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return TargetStates(tokens, tokens[..., None].float(), None, torch.tensor([len(row) for row in rows]))


def proposed(drafter: NgramDrafter, pending: list[int], nodes: int = 16, costs: RoundCosts | None = None) -> TokenTree:
    return drafter.propose(torch.tensor(pending), Budget(nodes, costs=costs))


def paths(tree: TokenTree, row: int = 0) -> list[list[int]]:
    return [tree.path_tokens(row, node)[1:] for node in range(1, tree.num_nodes) if tree.valid[row, node]]


def started(rows: list[list[int]], **kinds: object) -> NgramDrafter:
    drafter = NgramDrafter(**kinds)
    drafter.start(states_of(rows), 64)
    return drafter


def test_where_nothing_matches_nothing_is_proposed() -> None:
    tree = proposed(started([[1, 2, 3, 4]]), [5])
    assert tree.num_nodes == 1
    assert proposed(started([[1, 2, 3, 1]]), [2], nodes=1).num_nodes == 1


def test_several_continuations_make_one_tree() -> None:
    tree = proposed(started([[1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2]]), [3], 24)
    found = paths(tree)
    assert [4] in found
    assert [5] in found
    assert [4, 9] in found
    assert [5, 9] in found
    assert tree.is_drawn is False
    assert torch.equal(tree.parents, TokenTree.from_parents(tree.tokens, tree.parents).parents)
    assert torch.equal(tree.depths, TokenTree.from_parents(tree.tokens, tree.parents).depths)


def test_rows_are_looked_up_each_in_its_own_text_and_may_find_different_amounts() -> None:
    drafter = started([[1, 2, 3, 4, 1, 2], [7], [5, 6, 5, 8, 5]])
    tree = proposed(drafter, [3, 3, 6])
    assert paths(tree, 0)[0] == [4]
    assert paths(tree, 1) == []
    assert paths(tree, 2)[0] == [5]
    drafter.select_rows(torch.tensor([2, 0]))
    drafter.observe(states_of([[6, 5], [3]]))
    tree = proposed(drafter, [8, 4])
    assert paths(tree, 0)[0] == [5]
    assert paths(tree, 1)[0] == [1]


def test_confidences_of_nodes_multiply_to_what_they_are_worth() -> None:
    tree = proposed(started([[1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2], [8]]), [3, 8], 8)
    assert tree.worth[:, 0].tolist() == [1, 1]
    for node in range(1, tree.num_nodes):
        parent = int(tree.parents[0, node])
        assert float(tree.worth[0, node]) == pytest.approx(float(tree.worth[0, parent] * tree.log_q[0, node].exp()))
    assert tree.worth[1, 1:].tolist() == [0] * (tree.num_nodes - 1)


def test_a_tree_is_as_large_as_pays() -> None:
    text = [*range(1, 30), *range(1, 12)]
    free = RoundCosts((0.0, *([1.0] * 40)), first=0.0, level=0.0, other=0.0)
    dear = RoundCosts((0.0, 1.0, *(1.5 + 0.4 * size for size in range(40))), first=0.0, level=0.0, other=0.0)
    absurd = RoundCosts((0.0, 1.0, *([50.0] * 40)), first=0.0, level=0.0, other=0.0)
    sizes = [proposed(started([text]), [12], costs=costs).num_nodes for costs in (free, dear, absurd)]
    assert sizes[0] == 16 > sizes[1] > sizes[2] == 1


def test_a_corpus_is_looked_into_too() -> None:
    assert paths(proposed(started([[1, 2]], corpus=[[9, 2, 3, 4, 5]]), [3]))[1] == [4, 5]
    assert proposed(started([[1, 2]], corpus=[]), [3]).num_nodes == 1


def test_a_corpus_in_other_tokens_than_the_targets_is_refused() -> None:
    foreign, model = NgramDrafter(corpus=[[3, 4], [5, VOCAB]]), SpeculativeModel.from_target(tiny_model(), "none")
    with pytest.raises(ValueError, match=rf"token {VOCAB}.*0 to {VOCAB - 1}.*tokenizer"):
        model.generate(torch.tensor(FOUR[1:2]), max_new_tokens=3, drafter=foreign)
    with pytest.raises(ValueError, match=rf"token {VOCAB}.*0 to {VOCAB - 1}.*tokenizer"):
        model.generate(torch.tensor(FOUR[1:2]), max_new_tokens=3, drafter=MixedDrafter([NgramDrafter(), foreign]))


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, np.array])
def test_a_corpus_comes_in_any_usual_container(kind: Callable[[list[int]], Any]) -> None:
    assert paths(proposed(started([[1, 2]], corpus=[kind([9, 2, 3, 4, 5])]), [3]))[1] == [4, 5]


@pytest.mark.parametrize("corpus", ["a text", ["a text"], [1, 2, 3], [None], [[1.5, 2.5]], [[[1, 2]]]])
def test_a_corpus_of_no_token_ids_is_refused(corpus: Any) -> None:
    with pytest.raises(ValueError, match=r"corpus holds a \w+ where a row of token ids was expected.*input_ids"):
        NgramDrafter(corpus=corpus)


@pytest.mark.parametrize("what", ["propose", "observe"])
def test_threads_read_a_shared_store_and_add_to_it_in_turn(what: str) -> None:
    """Looking through followers while another thread adds one is an error, two that add at once spoil the automaton."""
    store = OutputStore()
    drafter = started([[1, 2]], store=store)
    act = {"propose": lambda: proposed(drafter, [3]), "observe": lambda: drafter.observe(states_of([[3]]))}[what]
    thread = threading.Thread(target=act)
    with store.lock:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert not thread.is_alive()


def test_rows_learn_from_each_other_through_a_store_and_not_without_one() -> None:
    for store, expected in ((OutputStore(), [[13]]), (None, [])):
        drafter = started([[1], [2]], store=store)
        drafter.observe(states_of([[11, 12, 13], [11]]))
        assert paths(proposed(drafter, [14, 12]), row=1) == expected


def test_prompts_are_not_put_into_a_store() -> None:
    store = OutputStore()
    drafter = started([[1, 2, 3, 4]], store=store)
    drafter.observe(states_of([[5, 6]]))
    drafter.rewind(5)
    drafter.observe(states_of([[7, 8, 9]]))  # the next turn's prompt
    drafter.observe(states_of([[10, 11]]))
    known = [store.texts[0].find([token]).length for token in range(1, 12)]
    assert known == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


@given(st.integers(2, 40), st.lists(few_letters, max_size=8))
def test_a_store_is_bounded_and_remembers_at_least_half_of_that(capacity: int, answers: list[list[int]]) -> None:
    store, read = OutputStore(capacity), []
    for answer in answers:
        end = None
        for token in answer:
            end = store.extend(end, token)
            read.append(token)
            # Two automata of half the capacity, two states a token and a root each.
            assert sum(map(len, store.texts)) <= 2 * (capacity + 1) + 2
            recent = read[-(capacity // 2) :]
            assert all(any(text.find([token]).length for text in store.texts) for token in recent)


def test_a_store_forgets_the_oldest() -> None:
    store, end = OutputStore(20), None
    for token in range(100):
        end = store.extend(end, token)
    assert all(text.find([50]) == NOTHING for text in store.texts)
    assert store.texts[0].find([97, 98, 99]).length == 3


def test_a_store_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity=1"):
        OutputStore(1)


def test_an_answer_that_is_asked_for_again_is_known() -> None:
    """A past that is taken back keeps what followed; a store keeps it for other calls too."""
    model = SpeculativeModel.from_target(tiny_model(), "ngram")
    settings = {"max_new_tokens": 31, "do_sample": False, "return_dict_in_generate": True}
    prompt = torch.tensor(FOUR[1:2])
    first = model.generate(prompt, **settings)
    again = model.generate(prompt, past=first.past, **settings)
    assert again.sequences.equal(first.sequences)
    assert again.acceptance.target_passes <= 4 < first.acceptance.target_passes
    shared = NgramDrafter(store=OutputStore())
    passes = [model.generate(prompt, drafter=shared, **settings).acceptance.target_passes for _ in range(2)]
    assert passes[1] <= 4 < passes[0]


def test_a_text_that_is_taken_back_again_and_again_does_not_grow_for_ever() -> None:
    rng, drafter = random.Random(0), started([list(range(20))])
    sizes = []
    for _ in range(60):
        assert drafter.rewind(10) == 10
        drafter.observe(states_of([rng.choices(range(100, 10_000), k=200)]))
        sizes.append(len(drafter.state[0].text))
    assert sizes[-1] > 1000, "some are remembered"
    assert max(sizes) < 5000
    assert paths(proposed(drafter, [drafter.state[0].tokens[50]]))[0] == drafter.state[0].tokens[51:52]


def test_samples_of_one_prompt_help_each_other() -> None:
    model = SpeculativeModel.from_target(tiny_model(), "ngram")
    settings = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.3, "return_dict_in_generate": True}

    def tau(drafter: NgramDrafter) -> float:
        out = model.generate(
            **padded(FOUR[:1]),
            num_return_sequences=8,
            drafter=drafter,
            generator=torch.Generator().manual_seed(1),
            **settings,
        )
        return out.acceptance.mean_accepted_length

    assert tau(NgramDrafter(store=OutputStore())) > tau(NgramDrafter()) + 0.1
