"""The target adapter: what it reads is Transformers' own."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from tiny import LAYERS, padded, random_prompts, tiny_model, tiny_target
from transformers import AutoModelForCausalLM

from mtp.attention import AttentionPass
from mtp.fingerprint import fingerprint_mismatch
from mtp.target import Target, TargetOutput

target_of = cache(tiny_target)


def prefill(target: Target, ids: torch.Tensor, **options: Any) -> TargetOutput:
    cache_ = target.new_cache(ids.shape[0], 32)
    return target.forward(ids, cache_, AttentionPass.over_chain(ids.shape[1], cache_.lengths, 0), **options)


# ---- taps and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_tap_k_is_transformers_hidden_state_k(architecture: str, layer: int) -> None:
    target = target_of(architecture)
    ids = torch.tensor(random_prompts([11], 1))
    with torch.no_grad():
        expected = target.causal_lm(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    output = prefill(target, ids, taps=[layer])
    torch.testing.assert_close(output.taps, expected[layer], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.hidden, expected[-1], rtol=1e-4, atol=1e-5)


def test_the_tap_behind_the_last_layer_is_taken_before_the_final_norm() -> None:
    target = target_of("llama")
    output = prefill(target, torch.tensor(random_prompts([11], 1)), taps=[LAYERS])
    assert not torch.allclose(output.taps, output.hidden, atol=1e-2)
    torch.testing.assert_close(target.backbone.norm(output.taps), output.hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [-1, LAYERS + 1])
def test_a_layer_that_does_not_exist_cannot_be_tapped(layer: int) -> None:
    with pytest.raises(ValueError, match=f"Layer id {layer} cannot be tapped"):
        prefill(target_of("llama"), torch.tensor(random_prompts([5], 1)), taps=[layer])


def test_taps_come_side_by_side_in_the_order_asked_for() -> None:
    target, ids = target_of("llama"), torch.tensor(random_prompts([5], 1))
    together = prefill(target, ids, taps=[2, 1]).taps
    apart = torch.cat([prefill(target, ids, taps=[layer]).taps for layer in (2, 1)], dim=-1)
    assert torch.equal(together, apart)
    assert prefill(target, ids).taps is None


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 12])
def test_default_taps_name_layers_that_exist(layers: int) -> None:
    target = tiny_target("llama", layers=layers)
    assert all(1 <= tap <= layers for tap in target.default_taps())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unembed_of_hidden_is_the_targets_logits(architecture: str) -> None:
    target = target_of(architecture)
    output = prefill(target, torch.tensor(random_prompts([7], 2)))
    torch.testing.assert_close(target.unembed(output.hidden), output.logits, rtol=1e-4, atol=1e-5)
    some = torch.tensor([5, 2, 9])
    torch.testing.assert_close(target.unembed(output.hidden, some), output.logits[..., some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_embed_is_what_enters_the_first_layer(architecture: str) -> None:
    target, ids = target_of(architecture), torch.tensor(random_prompts([7], 2))
    with torch.no_grad():
        entering = target.causal_lm(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[0]
        torch.testing.assert_close(target.embed(ids), entering)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encode_gives_the_states_of_a_prefill_whatever_the_padding_behind(architecture: str) -> None:
    target, prompts = target_of(architecture), random_prompts([13, 4], 3)
    batch = padded(prompts, "right")["input_ids"]
    hidden, taps = target.encode(batch, taps=[1, 2])
    for row, prompt in enumerate(prompts):
        alone = prefill(target, torch.tensor([prompt]), taps=[1, 2])
        torch.testing.assert_close(hidden[row, : len(prompt)], alone.hidden[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(taps[row, : len(prompt)], alone.taps[0], rtol=1e-4, atol=1e-5)


def test_logits_are_given_only_where_asked_for() -> None:
    target, ids = target_of("llama"), torch.tensor(random_prompts([7, 7], 2))
    every = prefill(target, ids).logits
    some = prefill(target, ids, logits_at=torch.tensor([2, 6])).logits
    torch.testing.assert_close(some, every[:, [2, 6]], rtol=1e-5, atol=1e-5)


def test_end_tokens_are_all_those_the_generation_config_names() -> None:
    model = tiny_model("llama")
    assert Target(model).eos_token_ids == []
    model.generation_config.eos_token_id = [4, 9]
    assert Target(model).eos_token_ids == [4, 9]
    model.generation_config.eos_token_id = 5
    assert Target(model).eos_token_ids == [5]
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 7
    assert Target(model).eos_token_ids == [7]


# ---- fingerprint --------------------------------------------------------------------------------------------------


def saved(tmp_path: Any, dtype: torch.dtype) -> str:
    folder = tmp_path / str(dtype)
    tiny_model("llama").to(dtype).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_is_the_same_in_every_precision(tmp_path: Any, stored: torch.dtype, loaded: torch.dtype) -> None:
    folder = saved(tmp_path, stored)
    prints = [
        Target(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)).fingerprint() for dtype in (stored, loaded)
    ]
    assert fingerprint_mismatch(*prints) is None


def test_fingerprint_does_not_depend_on_use() -> None:
    target = tiny_target("gemma3")
    before = target.fingerprint()
    prefill(target, torch.tensor(random_prompts([5])))
    assert target.fingerprint() == before == tiny_target("gemma3").fingerprint()


def test_fingerprint_tells_other_weights_apart() -> None:
    first, second = tiny_target("llama", seed=0), tiny_target("llama", seed=1)
    assert fingerprint_mismatch(first.fingerprint(), second.fingerprint()) is not None


def test_fingerprint_says_what_differs() -> None:
    first, second = tiny_target("llama"), tiny_target("llama")
    with torch.no_grad():
        second.layers[1].mlp.up_proj.weight.add_(0.5)
    assert fingerprint_mismatch(first.fingerprint(), second.fingerprint()) == "weight matrices"
    with torch.no_grad():
        second.causal_lm.get_input_embeddings().weight.add_(0.5)
    assert fingerprint_mismatch(first.fingerprint(), second.fingerprint()) == "embeddings and biases"
    deeper = tiny_target("llama", layers=4)
    assert fingerprint_mismatch(first.fingerprint(), deeper.fingerprint()) == "architecture"


def test_quantised_matrices_do_not_count() -> None:
    assert fingerprint_mismatch("a-b-c", "a-b-quantised") is None
    assert fingerprint_mismatch("a-b-quantised", "a-b-c") is None
    assert fingerprint_mismatch("a-x-quantised", "a-b-c") == "embeddings and biases"


def test_tied_and_untied_targets_can_be_fingerprinted() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert len(Target(model).fingerprint().split("-")) == 3


def test_what_is_packed_is_not_looked_at_in_the_middle_of_another_threads_pass() -> None:
    target = tiny_target("llama")
    inside, go_on, looked = threading.Event(), threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    def look() -> None:
        target.new_cache(1, 8)
        looked.set()

    handle = target.layers[0].register_forward_hook(wait)
    one = threading.Thread(target=target.encode, args=(torch.tensor([[1, 2, 3]]),))
    one.start()
    assert inside.wait(60)
    other = threading.Thread(target=look)
    other.start()
    assert not looked.wait(0.2)
    handle.remove()
    go_on.set()
    one.join()
    other.join()
    assert looked.is_set()
