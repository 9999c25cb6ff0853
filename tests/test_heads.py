"""Trained heads: which positions they train on, and that training and decoding see the same thing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from mtp.attention import AttentionPass
from mtp.drafters import Budget, TargetStates
from mtp.heads import HEADS, Head, TrainingBatch
from mtp.heads.growing import GrowingHead
from mtp.heads.warmstart import TooFewRowsError
from mtp.model import SpeculativeModel, speculate
from mtp.target import Target
from tests.tiny import VOCAB, padded, random_prompts, tiny_head, tiny_model, tiny_target
from train.batches import training_batch
from train.data import Row
from train.evaluate import held_out_metrics, teacher_probs
from train.features import OnlineFeatures
from train.losses import soft_cross_entropy
from train.processes import trained_copy

FAMILIES = sorted(HEADS)
GROWING = [family for family in FAMILIES if issubclass(HEADS[family], GrowingHead)]
# An MTP module turns with the target's own tables.
ATTENDING = [
    family
    for family in FAMILIES
    if family != "mtp" and "rope_parameters" in HEADS[family].config_class.__dataclass_fields__
]

# A prompt of two turns, then the answer that is trained: user, assistant, user, assistant.
TWO_TURNS = Row(prompt_ids=(1, 7, 8, 2, 1, 9, 10, 11, 2, 1, 12, 2, 1), response_ids=(13, 14, 15, 16, 2))


def batch_of(target: Target, head: Head, rows: list[Row]) -> TrainingBatch:
    return training_batch(OnlineFeatures(target, rows, head.taps), range(len(rows)))


def part_of(states: TargetStates, begin: int, end: int) -> TargetStates:
    """The states of one row from ``begin`` to ``end``."""
    taps = None if states.taps is None else states.taps[:, begin:end]
    return TargetStates(states.tokens[:, begin:end], states.hidden[:, begin:end], taps, torch.tensor([end - begin]))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_trains_each_response_token_exactly_once_and_nothing_else(family: str, target: Target) -> None:
    short = Row(prompt_ids=(3, 4), response_ids=(5, 6, 7))
    head = tiny_head(family, target)
    batch = batch_of(target, head, [TWO_TURNS, short])
    for step, prediction in enumerate(head.unroll(batch, 3)):
        trained = sorted(zip(prediction.rows.tolist(), (prediction.positions + 1).tolist(), strict=True))
        two_turns = [(0, token) for token in range(13, 18)]  # the first and the end token too
        # In the short row a step can only stand at position 0 or later: token 2 + step is the first in its reach.
        beginning = [(1, token) for token in range(2, 5) if token >= 2 + step]
        assert trained == two_turns + beginning


@pytest.mark.parametrize("family", FAMILIES)
def test_labels_are_the_targets_distribution_before_the_predicted_token(family: str, target: Target) -> None:
    head = tiny_head(family, target, draft_vocab=10)
    batch = batch_of(target, head, [TWO_TURNS])
    probs, place = teacher_probs(head, batch)
    with torch.no_grad():
        logits = target.causal_lm(torch.tensor([TWO_TURNS.ids])).logits[0]
    columns = head.vocabulary(batch).ids.tolist()
    for prediction in head.unroll(batch, 3):
        for at, found in zip(prediction.positions.tolist(), probs[place[0, prediction.positions]], strict=True):
            guessable = {*head.draft_ids.tolist(), *(TWO_TURNS.ids[: at + 1] if len(columns) > 10 else ())}
            known = [column for column, token in enumerate(columns) if token in guessable]
            expected = logits[at, [columns[column] for column in known]].softmax(-1)
            torch.testing.assert_close(found[known], expected, atol=1e-5, rtol=1e-4)
            assert float(found.sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_batch_neighbours_change_no_prediction(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    short = Row(prompt_ids=(3, 4, 6), response_ids=(5, 6, 7))
    alone = head.unroll(batch_of(target, head, [short]), 3)
    together = head.unroll(batch_of(target, head, [TWO_TURNS, short]), 3)
    for one, both in zip(alone, together, strict=True):
        torch.testing.assert_close(one.logits, both.logits[both.rows == 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_vocab", [None, 8])
def test_what_a_head_is_trained_on_is_what_it_drafts(draft_vocab: int | None, family: str, architecture: str) -> None:
    target = tiny_target(architecture)
    refuse_other_guesses_than_trained(tiny_head(family, target, draft_vocab=draft_vocab), target, [8, 6])


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_ends_at_2048_positions_where_the_target_does_not(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("architectures.POSITIONS", 4096)
    target = tiny_target("llama")
    assert target.max_positions == 4096
    refuse_other_guesses_than_trained(tiny_head(family, target), target, [2300])


def refuse_other_guesses_than_trained(head: Head, target: Target, lengths: list[int]) -> None:
    """The log-probabilities along a path of its tree are those of the unrolled steps, had the text gone that way.

    Args:
        lengths: of the rows' texts, the longest first; the token behind each is pending.
    """
    longest, counts = lengths[0], torch.tensor(lengths)
    ids = torch.tensor(random_prompts([longest + 1] * len(lengths), seed=3))
    hidden, taps = target.encode(ids, head.taps)
    tapped = None if taps is None else taps[:, :longest]
    head.start(TargetStates(ids[:, :longest], hidden[:, :longest], tapped, counts), capacity=longest + 56)
    tree = head.propose(ids.gather(1, counts[:, None])[:, 0], Budget(24))
    assert tree.log_q is not None
    for row, count in enumerate(counts.tolist()):
        depths = tree.depths[row].clamp_max(head.config.steps)
        node = int(depths.argmax())
        path = [at for at in range(tree.num_nodes) if tree.ancestor_mask()[row, node, at]]
        text = Row(tuple(ids[row, :count].tolist()), tuple(tree.tokens[row, path].tolist()))
        batch = batch_of(target, head, [text])
        for step, prediction in enumerate(head.unroll(batch, len(path) - 1)):
            here = prediction.positions == count + step
            index = int(head.vocabulary(batch).index[tree.tokens[row, path[step + 1]]])
            expected = prediction.logits[here][0].log_softmax(-1)[index]
            if prediction.confidence is not None:
                expected = torch.logit(expected.exp()).add(prediction.confidence[here][0]).sigmoid().log()
            torch.testing.assert_close(tree.log_q[row, path[step + 1]], expected, atol=1e-4, rtol=1e-4)
        assert len(path) > 2


@pytest.mark.parametrize("family", GROWING)
def test_unrolled_steps_equal_what_decoding_computes_along_the_same_tokens(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    ids = random_prompts([14], seed=3)[0]
    row = Row(tuple(ids[:8]), tuple(ids[8:]))
    batch = batch_of(target, head, [row])
    steps = head.unroll(batch, 3)
    compared = 0
    for base in (7, 8, 9):  # the token at base + 1 is pending; everything up to base is committed
        states = batch.states
        head.start(part_of(states, 0, base + 1), capacity=64)
        carry, logits = head.first(states.tokens[:, base + 1])
        for step, unrolled in enumerate(steps):
            if step > 0:
                token = states.tokens[:, base + 1 + step][None]
                carry, logits = head.then(token, carry, torch.ones(1, 1, step, dtype=torch.bool), depth=step)
            at = (unrolled.positions == base + 1 + step).nonzero()
            if len(at):
                torch.testing.assert_close(logits[0, 0], unrolled.logits[at[0, 0]], atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared == 9


@pytest.mark.parametrize("family", GROWING)
def test_reading_in_pieces_equals_reading_at_once(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    ids = torch.tensor(random_prompts([12], seed=4))
    hidden, taps = target.encode(ids, head.taps)
    states = TargetStates(ids, hidden, taps, torch.tensor([12]))
    head.start(part_of(states, 0, 10), capacity=64)
    _, at_once = head.first(ids[:, 10])
    head.start(part_of(states, 0, 6), capacity=64)
    head.first(ids[:, 6])
    head.observe(part_of(states, 6, 9))
    head.first(ids[:, 9])
    head.observe(part_of(states, 9, 10))
    _, in_pieces = head.first(ids[:, 10])
    torch.testing.assert_close(at_once, in_pieces, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_trained_to_convergence_on_one_sample_is_accepted_nearly_always(family: str) -> None:
    model = tiny_model(seed=5)
    prompt = random_prompts([6], seed=5)
    answer = model.generate(**padded(prompt), max_new_tokens=24, do_sample=False)[0, 6:].tolist()
    target = Target(model)
    steps = 3
    head = tiny_head(family, target, nodes=64, steps=steps).train()
    batch = batch_of(target, head, [Row(tuple(prompt[0]), tuple(answer))])
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(150):
        probs, place = teacher_probs(head, batch)
        loss = sum(
            soft_cross_entropy(p.logits, probs[place[p.rows, p.positions]]).mean() for p in head.unroll(batch, steps)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    output = SpeculativeModel(target, head.eval()).generate(
        **padded(prompt), max_new_tokens=24, do_sample=False, nodes=64, return_dict_in_generate=True
    )
    assert output.sequences[0, 6:].tolist() == answer
    # 23 tokens after the first, in rounds of at most steps + 1.
    assert output.acceptance.mean_accepted_length > 0.9 * 23 / 6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_warm_start_is_better_than_a_random_one_on_rows_it_did_not_see(family: str) -> None:
    model = tiny_model(seed=6)
    target = Target(model)
    prompts = random_prompts([5] * 40, seed=6)
    answers = model.generate(**padded(prompts), max_new_tokens=20, do_sample=False)[:, 5:].tolist()
    rows = [Row(tuple(p), tuple(a)) for p, a in zip(prompts, answers, strict=True)]
    head = HEADS[family].from_target(target, torch.arange(VOCAB), steps=3)
    seen, unseen = batch_of(target, head, rows[:30]), batch_of(target, head, rows[30:])
    before = held_out_metrics(head, [unseen], 3)
    head.warm_start([seen])
    after = held_out_metrics(head, [unseen], 3)
    assert after["loss"][0] < before["loss"][0]
    assert after["accuracy"][0] > before["accuracy"][0]


NOTHING = Row((), (5,))  # its only token follows nothing


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [[], [NOTHING]], ids=["no rows", "too short a row"])
def test_a_warm_start_on_nothing_is_refused(family: str, rows: list[Row], target: Target) -> None:
    head = tiny_head(family, target)
    batches = [batch_of(target, head, [row]) for row in rows]
    with pytest.raises(TooFewRowsError, match=r"A warm start needs answers .*found none"):
        head.warm_start(batches)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_are_too_short_change_no_warm_start(family: str, target: Target) -> None:
    started = []
    for before in ([], [NOTHING]):
        torch.manual_seed(0)
        head = HEADS[family].from_target(target, torch.arange(VOCAB), steps=3)
        head.warm_start([batch_of(target, head, [row]) for row in (*before, TWO_TURNS)])
        started.append(head.state_dict())
    for name, weight in started[0].items():
        assert torch.equal(weight, started[1][name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_whose_weights_are_no_numbers_costs_speed_and_no_text(family: str, target: Target) -> None:
    head = tiny_head(family, target)
    with torch.no_grad():
        for weight in head.parameters():
            weight.fill_(float("nan"))
    batch = padded(random_prompts([5, 3], seed=7))
    expected = target.causal_lm.generate(**batch, max_new_tokens=6, do_sample=False)
    model = SpeculativeModel(target, head)
    assert model.generate(**batch, max_new_tokens=6, do_sample=False, nodes=8).equal(expected)
    for rule in ("walk", "rejection", "traversal"):
        model.generate(**batch, max_new_tokens=6, do_sample=True, nodes=8, rule=rule)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_is_made_for_engines_that_take_weights_apart(
    family: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.processes.engine", lambda accelerator: "FSDP2")
    head = tiny_head(family, target, draft_vocab=10)
    copy = trained_copy(Accelerator(cpu=True), head)
    assert copy is not head
    assert copy.target is target
    for name, tensor in head.state_dict().items():
        assert torch.equal(copy.state_dict()[name], tensor), name


def test_tokens_outside_the_draft_vocabulary_count_as_missed(target: Target) -> None:
    head = tiny_head("medusa", target, draft_vocab=4, context_vocabulary=False)
    metrics = held_out_metrics(head, [batch_of(target, head, [TWO_TURNS])], 3)
    outside = sum(token not in head.draft_ids.tolist() for token in TWO_TURNS.response_ids) / 5
    assert metrics["outside_draft_vocabulary"] == pytest.approx(outside)
    assert metrics["accuracy"][0] <= 1 - outside + 1e-9


@pytest.mark.parametrize("family", ATTENDING)
def test_draft_layer_takes_its_rotary_base_from_the_target(family: str) -> None:
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
    head = tiny_head(family, target)
    inverse = head.rotary.embedding.inv_freq
    torch.testing.assert_close(inverse[1], torch.tensor(1_000_000.0 ** (-2 / head.config.head_dim)))


def test_a_head_refuses_a_target_of_another_size() -> None:
    head = tiny_head("medusa", tiny_target())
    with pytest.raises(ValueError, match=r"vocab_size 24.*48"):
        head.attach(tiny_target(vocab=48))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"taps": ()}, "at least one layer"),
        ({"layers": -1}, "layers of at least 0"),
        ({"markov_rank": 0}, "markov_rank of at least 1"),
        ({"steps": 3, "depth": 4}, "drafts 3 tokens at most; found depth=4"),
    ],
)
def test_a_block_drafter_that_cannot_be_is_refused(sizes: dict[str, Any], reason: str, target: Target) -> None:
    with pytest.raises(ValueError, match=reason):
        HEADS["block"].from_target(target, torch.arange(VOCAB), **sizes)


def test_a_prefill_pass_sees_no_later_token() -> None:
    mask = AttentionPass.over_chain(4, torch.tensor([0, 0]), 0).mask(None, torch.device("cpu"))
    assert torch.equal(mask[1], torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_scaling_made_for_part_of_a_head_is_not_taken_over_but_the_base_is() -> None:
    target = tiny_target()
    target.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    head = tiny_head("eagle3", target)
    assert head.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_the_loop_is_refused_on_another_model_than_its_own(target: Target) -> None:
    model = SpeculativeModel(target, tiny_head("medusa", target))
    with pytest.raises(ValueError, match="called on another"):
        tiny_model(seed=3).generate(**padded([[3, 4]]), max_new_tokens=3, custom_generate=speculate(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_in_half_precision_guesses_as_it_does_in_full(family: str) -> None:
    """Rounding moves its logits a little; a scale that is applied twice, or not at all, would move them a lot."""
    target = tiny_target()
    heads = [tiny_head(family, target), tiny_head(family, target).cast(torch.bfloat16)]
    for head in heads:
        for name, buffer in head.named_buffers():
            if name.endswith("scale"):
                buffer.copy_(torch.linspace(0.5, 2, buffer.numel()).view_as(buffer))
                assert buffer.dtype == torch.float32
    full, half = (head.unroll(batch_of(target, head, [TWO_TURNS]), 3) for head in heads)
    for expected, found in zip(full, half, strict=True):
        assert found.logits.dtype == torch.bfloat16
        off = (found.logits.float() - expected.logits).square().mean().sqrt() / expected.logits.std()
        assert off < 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_of_a_head_that_has_drafted_has_weights_of_its_own_and_the_same_target(family: str) -> None:
    target = tiny_target()
    head = tiny_head(family, target)
    settings = {"max_new_tokens": 8, "do_sample": False, "nodes": 8, "return_dict_in_generate": True}

    def kept(head: Head) -> Any:
        return SpeculativeModel(target, head).generate(**padded(random_prompts([6])), **settings).kept

    before = kept(head)
    head.compile_parts()
    clone = copy.deepcopy(head)
    assert clone.target is target
    assert clone.config == head.config
    assert kept(clone) == kept(head) == before
    own = {parameter.data_ptr() for parameter in head.parameters()}
    assert all(parameter.data_ptr() not in own for parameter in clone.parameters())
    assert [p.requires_grad for p in clone.parameters()] == [p.requires_grad for p in head.parameters()]
    for parameter in clone.parameters():
        parameter.data.fill_(float("nan"))
    kept(clone)
    assert kept(head) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_an_optimiser_changed_are_those_of_the_next_generation(family: str) -> None:
    """Fused ones change weights without raising their version, by which packed copies are known to be stale."""
    target = tiny_target()
    used, fresh = (SpeculativeModel(target, tiny_head(family, target)) for _ in range(2))
    settings = {"max_new_tokens": 8, "do_sample": False, "nodes": 8, "return_dict_in_generate": True}
    before = used.generate(**padded(random_prompts([6])), **settings).acceptance
    for model in (used, fresh):
        weights = [weight for weight in model.drafter.parameters() if weight.requires_grad]
        for weight in weights:
            weight.grad = torch.sin(torch.arange(weight.numel(), dtype=torch.float32)).view_as(weight)
        torch.optim.AdamW(weights, lr=0.5, fused=True).step()
    found, expected = (model.generate(**padded(random_prompts([6])), **settings) for model in (used, fresh))
    assert found.acceptance.to_dict()["histogram"] == expected.acceptance.to_dict()["histogram"]
    assert found.kept == expected.kept
    assert before.drafted_tokens
