"""EAGLE-1/2: its labels, its features and the target's output matrix; and steps that follow a head's own tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mtp.drafters import Budget
from mtp.heads import HEADS, TrainingBatch
from mtp.heads.eagle import EagleHead
from mtp.heads.unrolling import misses_own_token
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from tests.tiny import VOCAB, random_prompts, tiny_head, tiny_model, tiny_target
from train.batches import training_batch
from train.data import Row
from train.evaluate import labels_of, teacher_probs
from train.features import OnlineFeatures
from train.losses import mixture, smooth_l1

FOLLOWING = [family for family, head in sorted(HEADS.items()) if head.follows_own_tokens]
PROMPT, ANSWER = (3, 9, 4, 11), (13, 14, 7, 15, 2)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def batch_for(target: Target, taps: tuple[int, ...] = ()) -> TrainingBatch:
    return training_batch(OnlineFeatures(target, [Row(PROMPT, ANSWER)], taps), [0])


def eagle(target: Target, draft_vocab: int | None = None, **sizes: object) -> EagleHead:
    head = tiny_head("eagle", target, draft_vocab=draft_vocab, **sizes)
    assert isinstance(head, EagleHead)
    return head


def test_labels_are_the_targets_next_state_its_distribution_there_and_the_token_after(target: Target) -> None:
    head = eagle(target, draft_vocab=12)
    batch = batch_for(target)
    ids = list(PROMPT + ANSWER)
    with torch.no_grad():
        output = target.causal_lm(torch.tensor([ids]), output_hidden_states=True)
    final = output.hidden_states[-1][0]
    for step, prediction in enumerate(head.unroll(batch, 2)):
        labels = labels_of(head, batch, prediction, teacher_probs(head, batch))
        # Token j of the answer (4 to 8) is guessed from base j - 2 - step, as what follows position j - 1.
        assert prediction.positions.tolist() == [3, 4, 5, 6, 7]
        torch.testing.assert_close(labels.hidden, final[3:8], atol=1e-5, rtol=1e-4)
        columns = head.vocabulary(batch).ids.tolist()
        assert columns[:12] == head.draft_ids.tolist()
        for at, (probs, label) in enumerate(zip(labels.probs, labels.tokens.tolist(), strict=True), start=3):
            guessable = {*head.draft_ids.tolist(), *ids[: at + 1]}
            known = [column for column, token in enumerate(columns) if token in guessable]
            expected = output.logits[0, at, [columns[column] for column in known]].softmax(-1)
            torch.testing.assert_close(probs[known], expected, atol=1e-5, rtol=1e-4)
            assert float(probs.sum()) == pytest.approx(1)
            assert label == (columns.index(ids[at + 1]) if ids[at + 1] in guessable else -1), step


def test_the_first_step_reads_the_next_tokens_embedding_and_the_targets_last_hidden_state(target: Target) -> None:
    head = eagle(target)
    with torch.no_grad():
        head.midlayer.o_proj.weight.zero_()
        head.midlayer.mlp.down_proj.weight.zero_()  # what is left of the layer is fc
        batch = batch_for(target)
        first = head.unroll(batch, 1)[0]
        embedding, hidden = target.embed(batch.states.tokens[0, 3:8]), batch.states.hidden[0, 2:7]
        expected = head.fc(torch.cat([embedding, hidden], dim=-1))
    torch.testing.assert_close(first.hidden, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first.logits, target.unembed(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere", "granite", "phi"])
@pytest.mark.parametrize("draft_vocab", [None, 10])
def test_logits_are_the_targets_own_of_the_estimated_state(architecture: str, draft_vocab: int | None) -> None:
    target = tiny_target(architecture)
    head = eagle(target, draft_vocab)
    hidden = torch.randn(3, target.hidden_size)
    torch.testing.assert_close(head.guess(hidden), target.unembed(hidden, head.draft_ids), atol=1e-5, rtol=1e-4)


def test_the_targets_output_matrix_is_neither_trained_nor_saved_nor_copied_whole(target: Target) -> None:
    head = eagle(target)
    head.unroll(batch_for(target), 1)[0].logits.sum().backward()
    assert head.fc.weight.grad is not None
    assert head.output_layer.weight.grad is None
    assert head.output_layer.weight.data_ptr() == target.output.weight.data_ptr()
    assert not any("output" in name or "lm_head" in name for name in head.state_dict())


def test_another_draft_vocabulary_reads_other_rows(target: Target) -> None:
    head = eagle(target, draft_vocab=8)
    other = eagle(target, draft_vocab=8, seed=1)
    hidden = torch.randn(2, target.hidden_size)
    head.guess(hidden)
    head.load_state_dict(other.state_dict())
    torch.testing.assert_close(head.guess(hidden), other.guess(hidden))
    head.set_draft_vocabulary(torch.arange(8))
    torch.testing.assert_close(head.guess(hidden), target.unembed(hidden, torch.arange(8)))


def test_noise_is_added_in_training_alone_within_each_dimensions_reach(target: Target) -> None:
    head = eagle(target, noise=0.2)
    head.input_scale.copy_(torch.linspace(0.5, 2.0, head.input_scale.numel()))
    states = batch_for(target).states
    assert torch.equal(head.read_states(states), states.hidden)
    moved = (head.train().read_states(states) - states.hidden).abs()
    reach = 0.2 * head.input_scale[target.hidden_size :]
    assert (moved <= reach + 1e-6).all()
    assert (moved.amax((0, 1)) > 0.5 * reach).float().mean() > 0.9


def test_a_warm_start_is_the_best_linear_guess_at_the_next_state() -> None:
    target = Target(tiny_model(seed=6))
    rows = [Row(tuple(ids[:4]), tuple(ids[4:])) for ids in random_prompts([24] * 40, seed=6)]
    batch = training_batch(OnlineFeatures(target, rows, ()), range(40))
    head = EagleHead.from_target(target, torch.arange(VOCAB), steps=1, noise=0.0)
    head.warm_start([batch])
    prediction = head.unroll(batch, 1)[0]
    truth = batch.states.hidden[prediction.rows, prediction.positions]
    assert prediction.hidden is not None
    error = (prediction.hidden - truth).pow(2).mean()
    inputs = torch.cat([target.embed(batch.states.tokens[:, 1:]), batch.states.hidden[:, :-1]], dim=-1)
    x = inputs[prediction.rows, prediction.positions - 1]
    best = (x.double() @ torch.linalg.pinv(x.double(), rtol=1e-6) @ truth.double() - truth).pow(2).mean()
    assert best - 1e-6 <= error <= 1.05 * best
    assert error < 0.8 * truth.pow(2).mean()


def test_regression_brings_the_estimate_to_the_targets_state(target: Target) -> None:
    head = eagle(target, noise=0.05).train()
    batch = batch_for(target)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    errors = []
    for _ in range(80):
        teacher = teacher_probs(head, batch)
        losses = [
            mixture({"smooth_l1": 1.0, "soft_cross_entropy": 0.1}, step, labels_of(head, batch, step, teacher)).mean()
            for step in head.unroll(batch, 2)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
        last = head.unroll(batch, 2)[1]
        assert last.hidden is not None
        errors.append(smooth_l1(last.hidden, batch.states.hidden[last.rows, last.positions]).mean().item())
    assert errors[-1] < 0.2 * errors[0]


class QuantisedWeight(torch.nn.Parameter):
    """Stands for the weight types of quantisation libraries."""


def test_a_target_whose_output_matrix_cannot_be_read_is_refused_with_what_to_do() -> None:
    target = tiny_target()
    layer = target.causal_lm.get_output_embeddings()
    layer.weight = QuantisedWeight(layer.weight.detach())
    with pytest.raises(UnsupportedTargetError, match=r"Linear over a QuantisedWeight on cpu.*head\.family=eagle3"):
        EagleHead.from_target(target, torch.arange(8), steps=1)


def test_a_token_of_its_own_is_the_texts_with_the_heads_probability() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.7, 0.2, 0.1]).log().expand(20_000, -1)
    labels = torch.arange(20_000) % 4 - 1
    missed = misses_own_token(logits, labels)
    shares = [missed[labels == label].float().mean().item() for label in (-1, 0, 1, 2)]
    assert shares == pytest.approx([1.0, 0.3, 0.8, 0.9], abs=0.02)


def certain_of(texts: Tensor, wrong_at: int) -> object:
    """A stand-in for ``guess`` of a head that is sure of the text, except at one step of its unrolling."""
    calls = iter(range(100))

    def guess(hidden: Tensor, step: int = 0) -> Tensor:
        # Of fewer bases than tokens, those that are left here are the foremost.
        right = texts if next(calls) != wrong_at else (texts + 1) % VOCAB
        return 50.0 * torch.nn.functional.one_hot(right[: len(hidden)], VOCAB).float()

    return guess


@pytest.mark.parametrize("family", FOLLOWING)
def test_behind_a_wrong_token_of_its_own_no_step_is_trained(
    family: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tiny_head(family, target)
    batch = batch_for(target, head.taps)
    for share, wrong_at, expected in [
        (1.0, 99, [5, 5, 5]),  # its own tokens are the text's: nothing is lost
        (1.0, 0, [5, 1, 2]),  # all first guesses wrong: only bases whose first trained step is a later one go on
        (0.0, 0, [5, 5, 5]),  # the text's own tokens are fed
    ]:
        monkeypatch.setattr(head, "guess", certain_of(torch.tensor(ANSWER), wrong_at))
        predictions = head.unroll(replace(batch, own_tokens=share), 3)
        assert [len(prediction.rows) for prediction in predictions] == expected


@pytest.mark.parametrize("family", FOLLOWING)
def test_steps_that_are_trained_on_own_tokens_predict_the_same_as_on_the_texts(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    batch = batch_for(target, head.taps)
    torch.manual_seed(1)
    followed = head.unroll(replace(batch, own_tokens=1.0), 3)
    for own, true in zip(followed, head.unroll(batch, 3), strict=True):
        kept = torch.isin(true.positions, own.positions)
        torch.testing.assert_close(own.logits, true.logits[kept], atol=1e-5, rtol=1e-4)
    assert len(followed[2].rows) < len(followed[0].rows)


def test_drafts_are_the_likeliest_tokens_through_the_packed_output_matrix_too(target: Target) -> None:
    head = eagle(target)
    states = batch_for(target).states
    head.start(states, capacity=64)
    tree = head.propose(torch.tensor([5]), Budget(4))
    head.start(states, capacity=64)
    _, logits = head.first(torch.tensor([5]))
    first = tree.tokens[0][tree.depths[0] == 1]
    assert set(first.tolist()) <= set(logits[0, 0].topk(3).indices.tolist())
