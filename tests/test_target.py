"""The target adapter: what it reads is Transformers' own, and what it cannot verify it refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, LONG_ROPE, SHORT_TEXT, sizes
from tiny import LAYERS, padded, random_prompts, tiny_model, tiny_target
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from mtp.attention import AttentionPass
from mtp.support import UnsupportedTargetError
from mtp.target import Target, TargetOutput, fingerprint_mismatch

SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
LINEAR: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}

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


# ---- refusals -----------------------------------------------------------------------------------------------------


RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba": ("Mamba", {"state_size": 4}),
    "Mamba2": ("Mamba2", {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1}),
    "RWKV": ("Rwkv", {"attention_hidden_size": 16}),
    "RecurrentGemma": ("RecurrentGemma", {"num_attention_heads": 2, "lru_width": 16}),
    "Jamba": ("Jamba", {"num_attention_heads": 2, "num_key_value_heads": 1, "use_mamba_kernels": False}),
    "Bamba": ("Bamba", {"mamba_n_heads": 4, "mamba_d_head": 8, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "FalconH1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "Qwen3-Next": ("Qwen3Next", LINEAR),
    "Qwen3.5": ("Qwen3_5", LINEAR),
    "LFM2": (
        "Lfm2",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]},
    ),
}


@pytest.mark.parametrize("name", sorted(RECURRENT))
def test_a_target_with_a_state_is_refused_with_a_reason(name: str) -> None:
    library, fields = RECURRENT[name]
    config_class = getattr(transformers, f"{library}TextConfig", None) or getattr(transformers, f"{library}Config")
    model = getattr(transformers, f"{library}ForCausalLM")(config_class(**SMALL, **fields))
    with pytest.raises(UnsupportedTargetError, match=r"branches of a tree at once"):
        Target(model)


def test_the_kinds_of_layers_that_are_in_the_way_are_named() -> None:
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SMALL, **LINEAR))
    with pytest.raises(UnsupportedTargetError, match="layers of type linear_attention"):
        Target(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedTargetError, match="encoder-decoder"):
        Target(T5ForConditionalGeneration(config))


@pytest.mark.parametrize(
    ("library", "fields", "reason"),
    [
        ("Falcon", {"alibi": True, "num_attention_heads": 2}, "ALiBi"),
        ("Bloom", {"n_head": 2}, "ALiBi"),
        ("Mpt", {"d_model": 16, "n_heads": 2, "n_layers": 2}, "ALiBi"),
        ("GPTNeo", {"num_heads": 2, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "local windows"),
        ("OpenAIGPT", {"n_embd": 16, "n_layer": 2, "n_head": 2}, "AttentionInterface"),
        ("Llama4", {"num_attention_heads": 2, "num_key_value_heads": 1, "no_rope_layers": [1, 0]}, "slot"),
    ],
)
def test_attention_that_goes_by_slots_is_refused_with_a_reason(
    library: str, fields: dict[str, Any], reason: str
) -> None:
    """The nodes of a tree lie side by side: a node's slot in the cache is not its position in the text."""
    config_class = getattr(transformers, f"{library}TextConfig", None) or getattr(transformers, f"{library}Config")
    model_class = getattr(transformers, f"{library}ForCausalLM", None) or getattr(transformers, f"{library}LMHeadModel")
    with pytest.raises(UnsupportedTargetError, match=reason):
        Target(model_class(config_class(**{**SMALL, **fields})))


def test_layers_that_attend_by_themselves_are_noticed() -> None:
    target = tiny_target("llama")
    layer = target.layers[1]
    layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedTargetError, match=f"{LAYERS - 1} times in a pass over {LAYERS} layers"):
        prefill(target, torch.tensor(random_prompts([5])))


# ---- rotary angles that depend on the length ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_end_where_the_rotary_angles_would_change(kind: str) -> None:
    rope = {**LONG_ROPE, "rope_type": kind, "factor": 2.0}
    config = transformers.LlamaConfig(**{**sizes(24, 2), "rope_parameters": rope})
    target = Target(transformers.LlamaForCausalLM(config))
    assert target.max_positions == SHORT_TEXT
    prefill(target, torch.tensor(random_prompts([SHORT_TEXT])))
    with pytest.raises(UnsupportedTargetError, match=f"{SHORT_TEXT + 1} tokens.*{SHORT_TEXT} tokens.*rope_parameters"):
        prefill(target, torch.tensor(random_prompts([SHORT_TEXT + 1])))


def test_an_encoding_past_the_change_of_angles_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="rope_parameters"):
        target_of("phi3_longrope").encode(torch.tensor(random_prompts([SHORT_TEXT + 1])))
