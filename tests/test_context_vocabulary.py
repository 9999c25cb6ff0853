"""Heads that take up tokens of the text at hand: what they can guess, while training and while drafting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import VOCAB, padded, random_prompts, tiny_head, tiny_model, tiny_target

from mtp import growth
from mtp.drafters import Budget, Draw, TargetStates
from mtp.heads import HEADS, Head
from mtp.heads.context_vocabulary import NEVER, ContextTokens, ContextVocabulary, lacking
from mtp.heads.extending import ExtendingHead
from mtp.model import SpeculativeModel
from mtp.output_matrix import OutputMatrix
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from train.batches import training_batch
from train.data import Row
from train.evaluate import teacher_probs
from train.features import OnlineFeatures
from train.losses import soft_cross_entropy

TAKING_UP = sorted(family for family, head in HEADS.items() if issubclass(head, ExtendingHead))
OF_THE_TEXT = {"context_scale", "context_bias", "context_maps", "markov_context"}
OWN = 8  # tokens of the heads' draft vocabularies


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def taking_up(family: str, target: Target, **sizes: Any) -> ExtendingHead:
    head = tiny_head(family, target, draft_vocab=OWN, **sizes)
    assert isinstance(head, ExtendingHead)
    return head


def begin(head: Head, texts: list[list[int]]) -> torch.Tensor:
    """Start ``head`` on all but the last token of each text; these are pending ``[B]``."""
    counts = torch.tensor([len(text) - 1 for text in texts])
    ids = torch.tensor([text[:-1] + [0] * (int(counts.max()) - len(text) + 1) for text in texts])
    hidden, taps = head.target.encode(ids, head.taps)
    head.start(TargetStates(ids, hidden, taps, counts), 64)
    return torch.tensor([text[-1] for text in texts])


@given(st.data())
def test_the_first_place_of_every_lacking_token_whatever_the_pieces(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    texts = [data.draw(st.lists(st.integers(0, 9), min_size=6, max_size=6)) for _ in range(rows)]
    lacks = torch.tensor([data.draw(st.booleans()) for _ in range(10)])
    cuts = sorted(data.draw(st.lists(st.integers(0, 6), max_size=2)))
    tokens, found = torch.tensor(texts), ContextTokens.none(rows, torch.device("cpu"))
    for begin, end in zip([0, *cuts], [*cuts, 6], strict=True):
        piece = tokens[:, begin:end]
        found = found.joined_by(piece, torch.arange(begin, end).expand_as(piece), lacks[piece])
    expected = sorted({token for text in texts for token in text if lacks[token]})
    assert found.ids.tolist() == expected
    for row, text in enumerate(texts):
        assert found.first[row].tolist() == [text.index(token) if token in text else NEVER for token in expected]
    kept = found.before(3)
    assert kept.ids.tolist() == sorted({token for text in texts for token in text[:3] if lacks[token]})


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("family", TAKING_UP)
def test_a_row_can_be_offered_its_own_tokens_and_no_other_rows(family: str, sampled: bool, target: Target) -> None:
    texts = [[20, 21, 20, 3], [22, 5, 6, 23]]
    draw = Draw(temperature=2.0, generator=torch.Generator().manual_seed(0)) if sampled else None
    taken_up = [False, False]
    for seed in range(8):
        head = taking_up(family, target, seed=seed)
        own = set(head.draft_ids.tolist())
        tree = head.propose(begin(head, texts), Budget(40), draw)
        for row, text in enumerate(texts):
            offered = set(tree.tokens[row, 1:].tolist())
            assert offered <= own | set(text)
            taken_up[row] |= not offered <= own
            if tree.q is not None:
                inner = tree.q[row][tree.q[row].sum(-1) > 0]
                torch.testing.assert_close(inner.sum(-1), torch.ones(len(inner)))
                assert {int(at) for at in inner.sum(0).nonzero()} <= own | set(text)
    assert all(taken_up), "nothing of a text was offered"


@pytest.mark.parametrize("family", TAKING_UP)
def test_what_can_be_guessed_grows_with_the_answer_and_shrinks_with_its_batch(family: str, target: Target) -> None:
    head = taking_up(family, target)
    model = SpeculativeModel(target, head)
    prompts = random_prompts([9, 5, 7], seed=8)
    expected = target.causal_lm.generate(**padded(prompts), max_new_tokens=20, do_sample=False)
    own, seen = set(head.draft_ids.tolist()), list[tuple[set[int], set[int]]]()
    propose = head.propose

    def watching(pending: torch.Tensor, budget: Budget, draw: Draw | None = None) -> object:
        tree = propose(pending, budget, draw)
        assert head.context is not None
        tokens = head.context.tokens
        for row in range(len(pending)):
            here = {int(at) for at in tokens.ids[tokens.first[row] < NEVER]}
            seen.append((here, set(tree.tokens[row].tolist())))
        return tree

    head.propose = watching  # type: ignore[assignment,method-assign]
    found = model.generate(**padded(prompts), max_new_tokens=20, do_sample=False, nodes=12)
    assert torch.equal(found, expected)
    texts = [set(row) for row in expected.tolist()]
    for here, offered in seen:
        assert not here & own
        assert any(here <= text for text in texts)
        assert offered <= own | here | texts[0] | texts[1] | texts[2]
    assert len({len(here) for here, _ in seen}) > 1  # it grew


@pytest.mark.parametrize("family", TAKING_UP)
def test_tokens_of_the_text_are_guessed_under_autocast(family: str, target: Target) -> None:
    model = SpeculativeModel(target, taking_up(family, target))
    with torch.autocast("cpu", torch.bfloat16):
        found = model.generate(**padded(random_prompts([9, 5])), max_new_tokens=8, do_sample=False, nodes=12)
    assert found.shape == (2, 17)


def test_a_text_that_is_taken_back_is_forgotten(target: Target) -> None:
    head = taking_up("eagle3", target)
    ids = head.draft_ids
    outside = lacking(ids, VOCAB).nonzero()[:, 0].tolist()[:4]
    vocabulary = ContextVocabulary(target, ids, 1, next(head.parameters()))
    tokens = torch.tensor([outside[:3]])
    vocabulary.observe(tokens, torch.tensor([3]))
    vocabulary.read(torch.tensor([outside[3]]))
    assert vocabulary.ids.tolist() == [*ids.tolist(), *sorted(outside)]
    vocabulary.rewind(2)
    assert vocabulary.ids.tolist() == [*ids.tolist(), *sorted(outside[:2])]
    assert vocabulary.rows(torch.ones(1, 1, target.hidden_size)).shape == (1, 1, 2)


def test_a_conversation_that_was_left_for_others_has_its_own_tokens(target: Target) -> None:
    head = taking_up("eagle3", target)
    model = SpeculativeModel(target, head)
    settings = {"max_new_tokens": 12, "do_sample": False, "nodes": 12}
    first = model.generate(**padded(random_prompts([9], seed=1)), **settings, return_dict_in_generate=True)
    assert head.context is not None
    known = set(head.context.tokens.ids.tolist())
    model.generate(**padded(random_prompts([4, 6, 5], seed=2)), **settings)
    longer = padded([[*first.sequences[0].tolist(), 3, 4]])
    expected = target.causal_lm.generate(**longer, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(**longer, **settings, past=first.past), expected)
    assert known <= set(head.context.tokens.ids.tolist()) <= set(expected[0].tolist())


def test_an_output_matrix_that_cannot_be_read_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutputMatrix, "has_rows", property(lambda self: False))
    target = tiny_target()
    with pytest.raises(UnsupportedTargetError, match="context_vocabulary"):
        HEADS["eagle3"].from_target(target, torch.arange(OWN), context_vocabulary=True)
    head = HEADS["eagle3"].from_target(target, torch.arange(OWN))
    begin(head, [[20, 21, 20, 3]])
    assert isinstance(head, ExtendingHead)
    assert head.context is None


def test_away_from_the_cpu_an_answer_is_taken_up_with_the_next_prompt(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = taking_up("eagle3", target)
    monkeypatch.setattr(growth, "may_ask", lambda device: False)
    outside = lacking(head.draft_ids, VOCAB).nonzero()[:, 0]
    vocabulary = ContextVocabulary(target, head.draft_ids, 1, next(head.parameters()))
    for at in range(2):
        vocabulary.observe(outside[None, at, None], torch.tensor([1]))
        vocabulary.read(head.draft_ids[:1])
    assert vocabulary.tokens.ids.tolist() == outside[:1].tolist()
    vocabulary.rewind(2)
    assert vocabulary.tokens.ids.tolist() == outside[:2].tolist()


@pytest.mark.parametrize("family", TAKING_UP)
def test_a_head_that_was_saved_before_there_was_such_a_thing_has_none(family: str, target: Target) -> None:
    head = taking_up(family, target, context_vocabulary=False)
    record = head.config.to_dict()
    assert record.pop("context_vocabulary") is False
    assert type(head.config).from_dict(record) == head.config
    assert not OF_THE_TEXT & {name.split(".")[0] for name, _ in head.named_parameters()}
    tree = head.propose(begin(head, [[20, 21, 20, 3]]), Budget(16))
    assert set(tree.tokens[0, 1:].tolist()) <= set(head.draft_ids.tolist())


@pytest.mark.parametrize("family", TAKING_UP)
def test_a_head_of_the_whole_vocabulary_has_nothing_to_take_up(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    begin(head, [[1, 2, 3]])
    assert isinstance(head, ExtendingHead)
    assert head.context is None
    assert not OF_THE_TEXT & {name.split(".")[0] for name, _ in head.named_parameters()}


@pytest.mark.parametrize("family", ["block", "eagle3", "hydra", "hydra_plus", "medusa", "redrafter"])
def test_what_the_text_holds_is_learnt_and_kept(family: str) -> None:
    """Trained on one answer: with its draft vocabulary alone a head cannot guess what the text has said before."""
    model = tiny_model(seed=5)
    prompt = random_prompts([6], seed=5)
    answer = model.generate(**padded(prompt), max_new_tokens=24, do_sample=False)[0, 6:].tolist()
    target = Target(model)
    kept = {}
    for extends in (False, True):
        head = tiny_head(family, target, draft_vocab=4, steps=3, context_vocabulary=extends).train()
        row = Row(tuple(prompt[0]), tuple(answer))
        batch = training_batch(OnlineFeatures(target, [row], head.taps), [0])
        optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
        for _ in range(120):
            probs, place = teacher_probs(head, batch)
            steps = head.unroll(batch, 3)
            loss = sum(soft_cross_entropy(p.logits, probs[place[p.rows, p.positions]]).mean() for p in steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        output = SpeculativeModel(target, head.eval()).generate(
            **padded(prompt), max_new_tokens=24, do_sample=False, nodes=24, return_dict_in_generate=True
        )
        assert output.sequences[0, 6:].tolist() == answer
        kept[extends] = output.acceptance.mean_accepted_length
    assert kept[True] > 1.3 * kept[False]
