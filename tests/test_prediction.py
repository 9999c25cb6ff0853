"""Predicted outputs: the caller's text as the draft, and how it is taken up again behind an edit."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from talking import letters
from tiny import FOUR, VOCAB, padded, tiny_model

from mtp.drafters import NgramDrafter, PredictionDrafter
from mtp.drafters.lookup import followers
from mtp.drafters.prediction import ASTRAY, LEAD, Reading, predicted_ids
from mtp.model import SpeculativeModel, SpeculativeOutput
from mtp.suffix import SuffixAutomaton

NEW = 40


def likeliest_after(prediction: list[int], answer: list[int]) -> set[int]:
    """What is guessed to follow an answer so far, at each place where it may stand in the prediction."""
    text = SuffixAutomaton.of([[*LEAD, *prediction]])
    reading = Reading(text.find(LEAD))
    for token in answer:
        reading = reading.after(text, token)
    guessed = [followers([(text, match)]) for match in reading.places(text)]
    return {max(found, key=itemgetter(1))[0] for found in guessed if found}


TEXT = list(range(10, 40))


def test_before_the_first_word_the_beginning_is_expected() -> None:
    assert likeliest_after(TEXT, []) == {10}


@given(st.integers(0, 29))
def test_an_answer_as_predicted_is_followed_to_the_end(length: int) -> None:
    assert likeliest_after(TEXT, TEXT[:length]) == {TEXT[length]}
    assert likeliest_after(TEXT, TEXT) == set()


@given(st.integers(0, 20), st.integers(1, 5))
def test_behind_tokens_that_replace_as_many_the_rest_is_expected_at_once(at: int, count: int) -> None:
    assert TEXT[at + count] in likeliest_after(TEXT, [*TEXT[:at], *range(50, 50 + count)])


@given(st.integers(0, 20), st.integers(1, 5))
def test_behind_tokens_that_replace_one_the_rest_is_expected_at_once(at: int, count: int) -> None:
    assert TEXT[at + 1] in likeliest_after(TEXT, [*TEXT[:at], *range(50, 50 + count)])


@given(st.integers(0, 20), st.integers(1, 5))
def test_behind_insertions_the_rest_is_expected_at_once(at: int, count: int) -> None:
    assert TEXT[at] in likeliest_after(TEXT, [*TEXT[:at], *range(50, 50 + count)])


@given(st.integers(0, 20), st.integers(1, 8))
def test_behind_a_gap_the_rest_is_expected_one_token_later(at: int, count: int) -> None:
    assert TEXT[at + count + 1] in likeliest_after(TEXT, [*TEXT[:at], TEXT[at + count]])


def test_a_place_is_given_up_when_the_answer_stays_away() -> None:
    away = [*TEXT[:5], *[50] * ASTRAY]
    assert likeliest_after(TEXT, away)
    assert likeliest_after(TEXT, [*away, 50]) == set()
    assert likeliest_after(TEXT, [*away, 50, 50, 30]) == {31}


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=30))
def test_any_prediction_of_any_answer_can_be_followed(prediction: list[int], answer: list[int]) -> None:
    assert likeliest_after(prediction, answer) <= set(prediction)


# ---- generate -------------------------------------------------------------------------------------------------------


def model_with(tokenizer: Any = None) -> SpeculativeModel:
    return SpeculativeModel.from_target(tiny_model(), "none", tokenizer)


def generated(prediction: Any, prompts: list[list[int]] = FOUR[1:2], **settings: Any) -> SpeculativeOutput:
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "nodes": 14} | settings
    return model_with(letters()).generate(**padded(prompts), prediction=prediction, **settings)


def plain(prompts: list[list[int]] = FOUR[1:2]) -> list[list[int]]:
    batch = padded(prompts)
    out = tiny_model().generate(**batch, max_new_tokens=NEW, do_sample=False)
    return out[:, batch["input_ids"].shape[1] :].tolist()


def test_a_right_prediction_is_copied_whole_blocks_at_a_time() -> None:
    answer = plain()[0]
    out = generated(answer)
    assert out.sequences[0, -NEW:].tolist() == answer
    assert out.acceptance.target_passes == 3  # 39 tokens in rounds of 13 guesses and one of the target's


def test_a_text_is_a_prediction_too() -> None:
    answer = plain()[0]
    spelt = letters().decode(answer)
    assert generated(spelt).acceptance.target_passes == generated(torch.tensor(answer)).acceptance.target_passes == 3


def test_a_wrong_prediction_changes_nothing_but_the_time() -> None:
    assert generated([1 + token % (VOCAB - 1) for token in plain()[0]]).sequences[0, -NEW:].tolist() == plain()[0]
    assert generated([]).sequences[0, -NEW:].tolist() == plain()[0]


def test_edits_cost_few_passes() -> None:
    answer = plain()[0]
    other = 1 + answer[8] % (VOCAB - 1)
    for edited in (
        [*answer[:8], other, *answer[9:]],
        [*answer[:8], other, *answer[8:]],
        [*answer[:8], *answer[9:]],
        [*answer[:8], other, *answer[9:20], *answer[22:]],
    ):
        out = generated(edited)
        assert out.sequences[0, -NEW:].tolist() == answer
        assert out.acceptance.target_passes <= 8


def test_every_prompt_of_a_batch_has_its_own_prediction() -> None:
    answers = plain(FOUR)
    out = generated(answers, FOUR)
    assert out.sequences[:, -NEW:].tolist() == answers
    assert out.acceptance.target_passes == 3 * 4
    crossed = generated(answers[::-1], FOUR)
    assert crossed.sequences[:, -NEW:].tolist() == answers
    assert crossed.acceptance.target_passes > 2 * out.acceptance.target_passes
    assert generated([answers[0], [], "", answers[3]], FOUR).sequences[:, -NEW:].tolist() == answers


def test_several_samples_of_a_prompt_share_its_prediction() -> None:
    two = FOUR[1:3]
    out = generated(plain(two), two, num_return_sequences=3, do_sample=True, temperature=1e-4)
    assert out.acceptance.mean_accepted_length > 10


def test_a_prediction_goes_with_a_conversation() -> None:
    model, settings = model_with(), {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(torch.tensor(FOUR[1:2]), prediction=plain()[0], max_new_tokens=8, **settings)
    turn = [*first.sequences[0].tolist(), 5, 6]
    expected = plain([turn])[0]
    out = model.generate(torch.tensor([turn]), prediction=expected, past=first.past, max_new_tokens=NEW, **settings)
    assert out.sequences[0, -NEW:].tolist() == expected
    assert out.acceptance.target_passes == 3


def test_the_planner_goes_on_learning_although_every_call_has_its_own_drafter() -> None:
    model = model_with()
    planners = [model.planner(PredictionDrafter([[1, 2]]), "auto") for _ in range(2)]
    assert planners[0] is planners[1]
    assert model.planner(NgramDrafter(), "auto") is not planners[0]


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        ([3, VOCAB], f"token {VOCAB}.*tokens 0 to {VOCAB - 1}"),
        ([3, -1], "token -1"),
        (3.5, "holds a float"),
        ([[1, 2], 3.5], "holds a float"),
        ({"text": "abc"}, "holds a dict"),
        ([[1], [2]], "2 predictions for 1 prompts"),
    ],
)
def test_what_is_no_prediction_is_refused_with_a_reason(prediction: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        generated(prediction)


def test_a_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer.*token ids"):
        model_with().generate(torch.tensor(FOUR[1:2]), prediction="abc", max_new_tokens=4)


def test_a_prediction_beside_a_drafter_is_refused() -> None:
    with pytest.raises(ValueError, match="itself the draft"):
        generated([1, 2], drafter="ngram")
    with pytest.raises(ValueError, match="no predictions"):
        PredictionDrafter([])


def test_ids_come_in_any_usual_container() -> None:
    for prediction in ([1, 2], (1, 2), torch.tensor([1, 2]), np.array([1, 2]), [torch.tensor([1, 2])], [[1, 2]]):
        assert predicted_ids(prediction, None) == [[1, 2]]
    assert predicted_ids(["ab", [3]], letters()) == [[0, 1], [3]]
