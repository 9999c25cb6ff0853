"""A smaller model as drafter: the target's text whatever it guesses, and every guess where it is the target's twin."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CORE, POSITIONS
from talking import letters
from tiny import FOUR, LAYERS, VOCAB, padded, random_prompts, tiny_head, tiny_model, tiny_target
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mtp.attention import AttentionPass
from mtp.checkpoint import load_head, save_checkpoint
from mtp.drafters import Assistant, Budget, TargetStates
from mtp.drafters.layer_subset import keep_layers
from mtp.drafters.lm_tree import TreeShape
from mtp.drafters.vocabulary import first_difference
from mtp.heads import HEADS, TrainingBatch
from mtp.model import SpeculativeModel
from mtp.planner import FixedPlanner
from mtp.support import UnsupportedTargetError
from mtp.target import Target

NEW = 20
ONE = random_prompts([5], seed=3)
CHAIN = TreeShape(width=1, depth=4)
model_of = cache(tiny_model)
target_of = cache(Target)


def reference(lm: PreTrainedModel, prompts: list[list[int]], **settings: Any) -> Tensor:
    return lm.generate(**padded(prompts), **{"max_new_tokens": NEW, "do_sample": False, **settings})


def drafted(lm: PreTrainedModel, assistant: Assistant, prompts: list[list[int]], **settings: Any) -> Any:
    model = SpeculativeModel(target_of(lm), assistant)
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(**padded(prompts), **settings)


# ---- exact whatever it guesses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "ragged batch"])
@pytest.mark.parametrize("architecture", CORE)
def test_greedy_output_equals_transformers(architecture: str, prompts: list[list[int]]) -> None:
    lm = model_of("llama")
    out = drafted(lm, Assistant(tiny_model(architecture, seed=1, layers=2)), prompts)
    assert torch.equal(out.sequences, reference(lm, prompts))


@pytest.mark.parametrize("prompts", [ONE, FOUR], ids=["one", "ragged batch"])
@pytest.mark.parametrize("architecture", CORE)
def test_a_twin_of_the_target_is_accepted_always(architecture: str, prompts: list[list[int]]) -> None:
    lm = model_of(architecture)
    out = drafted(lm, Assistant(lm, shape=CHAIN), prompts, nodes=5, max_new_tokens=21)
    assert torch.equal(out.sequences, reference(lm, prompts, max_new_tokens=21))
    assert out.acceptance.mean_accepted_length == CHAIN.depth + 1  # 20 tokens behind the first, in four rounds


def test_rows_that_end_leave_the_assistant_too() -> None:
    lm, ends = model_of("llama"), [3, 4, 9, 14]
    expected = reference(lm, FOUR, eos_token_id=ends)
    out = drafted(lm, Assistant(lm, shape=TreeShape(2, 3)), FOUR, eos_token_id=ends)
    assert torch.equal(out.sequences, expected)
    assert len({len(kept) for kept in out.kept}) > 1


def test_what_was_decoded_plainly_is_read_later_and_guesses_stay_right() -> None:
    class EveryThird(FixedPlanner):
        rounds = 0

        def budget(self, context: int, batch: int) -> Budget | None:  # type: ignore[override]
            self.rounds += 1
            return super().budget(context, batch) if self.rounds % 3 == 0 else None

    lm = model_of("llama")
    out = drafted(lm, Assistant(lm, shape=CHAIN), FOUR, planner=EveryThird(5), max_new_tokens=22)
    assert torch.equal(out.sequences, reference(lm, FOUR, max_new_tokens=22))
    assert out.acceptance.mean_accepted_length == 21 / 9  # rounds of 1, 1 and 5 tokens, three times over


def test_trees_as_large_as_pays_are_exact_too() -> None:
    lm = model_of("llama")
    out = drafted(lm, Assistant(tiny_model("llama", seed=1, layers=1)), FOUR, nodes="auto")
    assert torch.equal(out.sequences, reference(lm, FOUR))


def test_sampled_text_of_a_seed_does_not_depend_on_the_shape_of_walked_trees() -> None:
    lm = model_of("llama")

    def sample(shape: TreeShape) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        settings = {"do_sample": True, "generator": generator, "nodes": 8, "rule": "walk"}
        return drafted(lm, Assistant(lm, shape=shape), ONE, **settings).sequences

    assert torch.equal(sample(CHAIN), sample(TreeShape(3, 2)))


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_an_assistant_of_shorter_context_stops_drafting_at_its_end(architecture: str) -> None:
    lm, small = model_of("llama"), tiny_model(architecture)
    positions = 18
    small.config.max_position_embeddings = positions
    if architecture == "gpt2":
        small.transformer.wpe.weight.data = small.transformer.wpe.weight.data[:positions]
    out = drafted(lm, Assistant(small), FOUR, max_new_tokens=30)
    assert torch.equal(out.sequences, reference(lm, FOUR, max_new_tokens=30))
    assert out.acceptance.mean_accepted_length > 1


def test_drafting_goes_on_up_to_the_targets_last_position() -> None:
    lm = model_of("gpt2")
    prompts = random_prompts([POSITIONS - 12], seed=5)
    out = drafted(lm, Assistant(lm, shape=CHAIN), prompts, max_new_tokens=12)
    assert torch.equal(out.sequences, reference(lm, prompts, max_new_tokens=12))


# ---- a conversation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [3, 9, 25])
def test_a_text_that_goes_on_differently_is_continued_from_where_it_differs(shared: int) -> None:
    lm = model_of("gemma3")
    assistant = Assistant(lm, shape=CHAIN)
    first = drafted(lm, assistant, ONE)
    longer = [first.sequences[0, :shared].tolist() + random_prompts([4], seed=8)[0]]
    out = drafted(lm, assistant, longer, past=first.past, nodes=5, max_new_tokens=21)
    assert torch.equal(out.sequences, reference(lm, longer, max_new_tokens=21))
    assert out.acceptance.mean_accepted_length == CHAIN.depth + 1


def test_a_past_without_drafts_is_kept_for_those_that_come_later() -> None:
    lm = model_of("llama")
    assistant = Assistant(lm, shape=CHAIN)
    first = drafted(lm, assistant, ONE, nodes=1)
    known = len(first.past)
    longer = [[*first.sequences[0].tolist(), 5, 7]]
    kept = first.past.rewind(longer[0], assistant)
    assert kept is not None
    assert kept.start == known


def test_keys_and_values_of_another_assistant_are_not_taken_over() -> None:
    lm = model_of("llama")
    first = drafted(lm, Assistant(tiny_model("llama", seed=1)), ONE)
    longer = [first.sequences[0].tolist()]
    out = drafted(lm, Assistant(lm, shape=CHAIN), longer, past=first.past, nodes=5, max_new_tokens=21)
    assert torch.equal(out.sequences, reference(lm, longer, max_new_tokens=21))
    assert out.acceptance.mean_accepted_length == CHAIN.depth + 1


# ---- vocabularies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [VOCAB - 4, VOCAB + 8])
def test_differently_padded_vocabularies_of_one_tokenizer_go_together(rows: int) -> None:
    lm, tokenizer = model_of("llama"), letters()
    assistant = Assistant(tiny_model("llama", seed=1, vocab=rows), tokenizer, tokenizer)
    out = drafted(lm, assistant, FOUR)
    assert torch.equal(out.sequences, reference(lm, FOUR))
    sampled = drafted(lm, assistant, FOUR, do_sample=True, rule="traversal")
    assert int(sampled.sequences.max()) < VOCAB


def test_other_sizes_without_tokenizers_are_refused_before_anything_is_read() -> None:
    assistant = Assistant(tiny_model("llama", vocab=VOCAB + 8))
    with pytest.raises(ValueError, match=r"32 tokens and the target 24.*target_tokenizer"):
        SpeculativeModel.from_target(model_of("llama"), assistant)
    model = SpeculativeModel.from_target(model_of("llama"), "none")
    with pytest.raises(ValueError, match="32 tokens and the target 24"):
        model.generate(**padded(ONE), drafter=assistant, max_new_tokens=4)


def test_another_tokenizer_is_refused_with_the_first_token_that_differs() -> None:
    vocab = letters().get_vocab()
    swapped = {**vocab, "e": vocab["h"], "h": vocab["e"]}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=swapped, merges=[])))
    with pytest.raises(ValueError, match="token id 4 is 'h' to it and 'e' to the target"):
        SpeculativeModel.from_target(model_of("llama"), Assistant(tiny_model("llama", seed=1), other, letters()))


def test_tokens_that_only_one_of_them_has_are_no_difference() -> None:
    assert first_difference({"a": 0, "b": 1}, {"a": 0, "b": 1, "<chat>": 2}) is None
    assert first_difference({"a": 0, "b": 1}, {"b": 0, "a": 1}) == (0, "b", "a")


def test_tokenizers_that_lie_beside_the_weights_are_found(tmp_path: Path) -> None:
    for name, rows in (("target", VOCAB), ("assistant", VOCAB + 8)):
        tiny_model("llama", vocab=rows).save_pretrained(tmp_path / name)
        letters().save_pretrained(tmp_path / name)
    target = Target(type(model_of("llama")).from_pretrained(tmp_path / "target"))
    assistant = Assistant.from_pretrained(tmp_path / "assistant")
    assert SpeculativeModel(target, assistant).drafter is assistant


# ---- trained ------------------------------------------------------------------------------------------------------


def test_a_trained_assistant_guesses_as_it_was_trained_to() -> None:
    target = target_of(model_of("llama"))
    head = tiny_head("assistant", target, draft_vocab=9, width=1)
    ids = torch.tensor(random_prompts([12], seed=4))
    hidden, _ = target.encode(ids)
    states = TargetStates(ids, hidden, None, torch.tensor([12]))
    (prediction,) = head.unroll(TrainingBatch(states, torch.ones(1, 12, dtype=torch.bool)), 1)
    head.start(TargetStates(ids[:, :3], hidden[:, :3], None, torch.tensor([3])), 64)
    for at in range(3, 11):
        tree = head.propose(ids[:, at], Budget(2))
        choice = prediction.logits[prediction.positions == at].argmax(-1)
        assert tree.tokens[0, 1] == head.draft_ids[choice]
        head.observe(TargetStates(ids[:, at : at + 1], hidden[:, at : at + 1], None, torch.tensor([1])))


def test_an_assistant_of_a_target_with_tied_embeddings_has_an_output_matrix_of_its_own(tmp_path: Path) -> None:
    lm = tiny_model("llama")
    lm.lm_head.weight = lm.model.embed_tokens.weight
    lm.config.tie_word_embeddings = True
    head = HEADS["assistant"].from_target(Target(lm), torch.arange(VOCAB), layers=[0, 2])
    head.lm.lm_head.weight.data.add_(1.0)
    save_checkpoint(tmp_path / "head", head)
    again = load_head(tmp_path / "head", head.target)
    assert torch.equal(again.lm.lm_head.weight, head.lm.lm_head.weight)
    assert torch.equal(again.lm.model.embed_tokens.weight, lm.model.embed_tokens.weight)


def test_layers_that_no_assistant_can_be_made_of_are_refused_before_training() -> None:
    with pytest.raises(UnsupportedTargetError, match="expected some of 0 to 2"):
        HEADS["assistant"].from_target(target_of(model_of("llama")), torch.arange(VOCAB), layers=[0, 99])


# ---- made of the target's own layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", CORE)
def test_a_model_of_all_layers_is_the_target_and_takes_no_memory(architecture: str) -> None:
    lm = model_of(architecture)
    same = keep_layers(lm, range(LAYERS))
    ids = torch.tensor(ONE)
    with torch.no_grad():
        assert torch.equal(same(ids).logits, lm(ids).logits)
    places = {weight.data_ptr() for weight in lm.parameters()}
    assert {weight.data_ptr() for weight in same.parameters()} <= places


@pytest.mark.parametrize("architecture", [*CORE, "deepseek_v3", "phi3_longrope", "smollm3"])
def test_a_model_of_some_layers_is_the_target_that_skips_the_others(architecture: str, tmp_path: Path) -> None:
    target = tiny_target(architecture, layers=4)
    assistant = Assistant.from_layers(target.causal_lm, [0, 2])
    out = drafted(target.causal_lm, assistant, FOUR)
    assert torch.equal(out.sequences, reference(target.causal_lm, FOUR))
    assistant.save_pretrained(tmp_path)
    loaded = Assistant.from_pretrained(tmp_path, dtype=torch.float32).model
    ids = torch.tensor(ONE)
    logits = []
    for model, skip in ((target, (1, 3)), (assistant.model, ()), (loaded, ())):
        kept = model.new_cache(1, 8)
        logits.append(model.forward(ids, kept, AttentionPass.over_chain(5, kept.lengths, 0), skip=skip).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[2], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layers", [[], [0, 3], [-1, 0], [1, 1], [2, 0]])
def test_layers_that_do_not_exist_or_are_out_of_order_are_refused(layers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"expected some of 0 to 2 of LlamaForCausalLM, in rising order"):
        Assistant.from_layers(model_of("llama"), layers)


@pytest.mark.parametrize(
    ("architecture", "layers", "reason"),
    [
        ("llama4", [0, 2], "layer 1 of the smaller model in another way"),
        ("deepseek_v3", [1, 2], "layer 0 of the smaller model in another way"),
        ("gemma4", [0, 2], "cannot be made of layers"),
    ],
)
def test_layers_that_would_be_others_at_their_new_place_are_refused(
    architecture: str, layers: list[int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Assistant.from_layers(tiny_model(architecture), layers)


def test_no_model_is_made_of_quantised_layers() -> None:
    lm = tiny_model("llama")
    lm.config.quantization_config = {"quant_method": "some"}
    with pytest.raises(ValueError, match="quantised or offloaded"):
        Assistant.from_layers(lm, [0, 1])
