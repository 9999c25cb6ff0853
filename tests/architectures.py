"""Every architecture that is tested, as a tiny random model.

An entry is a Transformers class and what its config needs beyond the sizes that all share.  ``docs/architectures.md``
lists the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedModel

HIDDEN = 32
WINDOW = 8
POSITIONS = 96
SHORT_TEXT = 64  # up to here the angles of "phi3_longrope" stay the same
PAD = 0

SPECIAL_TOKENS: dict[str, Any] = {
    "pad_token_id": PAD,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}

Fields = dict[str, Any]


def sizes(vocab: int, layers: int) -> Fields:
    """What nearly all configs call by the same names."""
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        **SPECIAL_TOKENS,
    }


def alternating(layers: int, local: str = "sliding_attention") -> list[str]:
    """Layer types: every other layer local."""
    return ["full_attention" if layer % 2 else local for layer in range(layers)]


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        model: name of the causal LM's class in Transformers.
        config: name of its config's class.
        fields: the config's fields for a number of vocabulary entries and layers.
        local: some layers see a window or a chunk of ``WINDOW`` tokens.
    """

    model: str
    config: str
    fields: Callable[[int, int], Fields]
    local: bool = False

    def build(self, vocab: int, layers: int) -> PreTrainedModel:
        """A model with weights as the library initialises them."""
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**self.fields(vocab, layers)))


GROUPED: Fields = {"num_key_value_heads": 2}
EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Transformers' own attention functions other than "eager" know neither soft-capping nor sinks.
EAGER: Fields = {"attn_implementation": "eager"}
GEMMA: Fields = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": WINDOW}
VISION: Fields = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
LATENT: Fields = {  # multi-head latent attention: keys of 8 + 4, values of 6
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN: Fields = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": POSITIONS // 2,
}
LONG_ROPE: Fields = {  # two pairs of angles a head, different below and above SHORT_TEXT tokens
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": SHORT_TEXT,
}


def plain(**extra: Any) -> Callable[[int, int], Fields]:
    """The shared sizes and some fields more."""
    return lambda vocab, layers: {**sizes(vocab, layers), **extra}


def mixed(local: str = "sliding_attention", **extra: Any) -> Callable[[int, int], Fields]:
    """As ``plain``, with every other layer local."""
    return lambda vocab, layers: {**sizes(vocab, layers), "layer_types": alternating(layers, local), **extra}


def _gpt2(vocab: int, layers: int) -> Fields:
    names = {"n_embd": HIDDEN, "n_layer": layers, "n_head": 4, "n_positions": POSITIONS, "n_inner": 48}
    return {"vocab_size": vocab, **names, **SPECIAL_TOKENS}


def _gptj(vocab: int, layers: int) -> Fields:
    return {**_gpt2(vocab, layers), "rotary_dim": 4}


def _opt(vocab: int, layers: int) -> Fields:
    return {**sizes(vocab, layers), "ffn_dim": 48, "word_embed_proj_dim": HIDDEN}


def _multimodal(text: Callable[[int, int], Fields], vision: Fields, **extra: Any) -> Callable[[int, int], Fields]:
    """A config with a text and a vision part."""

    def fields(vocab: int, layers: int) -> Fields:
        return {"text_config": text(vocab, layers), "vision_config": vision, "tie_word_embeddings": False, **extra}

    return fields


def _with_type(model_type: str, text: Callable[[int, int], Fields]) -> Callable[[int, int], Fields]:
    return lambda vocab, layers: {"model_type": model_type, **text(vocab, layers)}


def _causal_lm(name: str, fields: Callable[[int, int], Fields], **flags: bool) -> Architecture:
    return Architecture(f"{name}ForCausalLM", f"{name}Config", fields, **flags)


def _image_text(name: str, fields: Callable[[int, int], Fields], **flags: bool) -> Architecture:
    return Architecture(f"{name}ForConditionalGeneration", f"{name}Config", fields, **flags)


REGISTRY: dict[str, Architecture] = {
    "llama": _causal_lm("Llama", plain(**GROUPED)),
    "qwen3": _causal_lm("Qwen3", plain(head_dim=8, **GROUPED)),
    "mistral": _causal_lm("Mistral", plain(sliding_window=WINDOW, **GROUPED), local=True),
    "gemma3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", mixed(num_key_value_heads=1, **GEMMA), local=True),
    "gemma2": _causal_lm(
        "Gemma2",
        mixed(attn_logit_softcapping=5.0, final_logit_softcapping=10.0, **GEMMA, **GROUPED, **EAGER),
        local=True,
    ),
    "gpt_neox": _causal_lm("GPTNeoX", plain()),
    "gpt2": Architecture("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "arcee": _causal_lm("Arcee", plain(**GROUPED)),
    "cohere": _causal_lm("Cohere", plain(logit_scale=0.5, **GROUPED)),
    "cohere2": _causal_lm("Cohere2", mixed(sliding_window=WINDOW, logit_scale=0.5, **GROUPED), local=True),
    "deepseek_v2": _causal_lm("DeepseekV2", plain(**LATENT)),
    "deepseek_v3": _causal_lm("DeepseekV3", plain(**LATENT)),
    "ernie4_5": _causal_lm("Ernie4_5", plain(head_dim=8, **GROUPED)),
    "exaone4": _causal_lm("Exaone4", mixed(sliding_window=WINDOW, **GROUPED), local=True),
    "falcon": _causal_lm("Falcon", plain(multi_query=True, parallel_attn=True, alibi=False)),
    "falcon_new_decoder": _causal_lm(
        "Falcon", plain(new_decoder_architecture=True, num_kv_heads=2, alibi=False, multi_query=False)
    ),
    "gemma4": Architecture(  # the last layer reads the keys and values of the one of its kind before it
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        lambda vocab, layers: {
            **sizes(vocab, layers),
            "layer_types": ["sliding_attention", *["full_attention"] * (layers - 1)],
            "num_kv_shared_layers": 1,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": vocab,
            "final_logit_softcapping": 10.0,
            **GROUPED,
        },
        local=True,
    ),
    "glm4": _causal_lm("Glm4", plain(head_dim=8, **GROUPED)),
    "gpt_oss": _causal_lm(
        "GptOss",
        mixed(
            head_dim=8,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=YARN,
            **GROUPED,
            **EAGER,
        ),
        local=True,
    ),
    "gptj": _causal_lm("GPTJ", _gptj),
    "granite": _causal_lm("Granite", plain(logits_scaling=2.0, residual_multiplier=0.7, **GROUPED)),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        mixed(
            "chunked_attention",
            attention_chunk_size=WINDOW,
            attn_temperature_tuning=False,
            no_rope_layers=[1, 0, 1, 0, 1, 0],
            head_dim=8,
            intermediate_size_mlp=48,
            num_local_experts=4,
            **GROUPED,
        ),
        local=True,
    ),
    "mixtral": _causal_lm("Mixtral", plain(num_local_experts=4, sliding_window=WINDOW, **GROUPED), local=True),
    "nemotron": _causal_lm("Nemotron", plain(**GROUPED)),
    "olmo2": _causal_lm("Olmo2", plain(**GROUPED)),
    "olmo3": _causal_lm("Olmo3", mixed(sliding_window=WINDOW, **GROUPED), local=True),
    "opt": _causal_lm("OPT", _opt),
    "phi": _causal_lm("Phi", plain(**GROUPED)),
    "phi3": _causal_lm("Phi3", plain(sliding_window=WINDOW, **GROUPED), local=True),
    "phi3_longrope": _causal_lm(
        "Phi3", plain(rope_parameters=LONG_ROPE, original_max_position_embeddings=SHORT_TEXT, **GROUPED)
    ),
    "phimoe": _causal_lm("Phimoe", plain(num_local_experts=4, sliding_window=WINDOW, **GROUPED), local=True),
    "qwen2": _causal_lm(
        "Qwen2", mixed(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1, **GROUPED), local=True
    ),
    "qwen2_moe": _causal_lm(
        "Qwen2Moe",
        mixed(
            use_sliding_window=True,
            sliding_window=WINDOW,
            shared_expert_intermediate_size=24,
            **EXPERTS,
            **GROUPED,
        ),
        local=True,
    ),
    "qwen3_moe": _causal_lm("Qwen3Moe", plain(head_dim=8, **EXPERTS, **GROUPED)),
    "seed_oss": _causal_lm("SeedOss", plain(head_dim=8, **GROUPED)),
    "smollm3": _causal_lm("SmolLM3", plain(no_rope_layer_interval=2, **GROUPED)),
    "stablelm": _causal_lm("StableLm", plain(**GROUPED)),
    "starcoder2": _causal_lm("Starcoder2", plain(sliding_window=WINDOW, **GROUPED), local=True),
    "gemma3_vision": _image_text(
        "Gemma3",
        _multimodal(mixed(num_key_value_heads=1, **GEMMA), {**VISION, "vision_use_head": False}, mm_tokens_per_image=1),
        local=True,
    ),
    "llava": _image_text(
        "Llava",
        _multimodal(_with_type("llama", plain(**GROUPED)), {**VISION, "model_type": "clip_vision_model"}),
    ),
    "qwen2_5_vl": _image_text(
        "Qwen2_5_VL",
        _multimodal(
            plain(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, **GROUPED),
            {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": HIDDEN, "intermediate_size": 16},
        ),
    ),
    "qwen3_vl": _image_text(
        "Qwen3VL",
        _multimodal(
            plain(
                head_dim=8,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
                **GROUPED,
            ),
            {
                "hidden_size": 16,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": HIDDEN,
                "intermediate_size": 16,
                "deepstack_visual_indexes": [0],
            },
        ),
    ),
    "smolvlm": _image_text("SmolVLM", _multimodal(_with_type("llama", plain(**GROUPED)), VISION)),
}


def _is_there(name: str) -> bool:
    """An older Transformers may lack the newest, and its GPT-J attends by itself."""
    model = getattr(transformers, REGISTRY[name].model, None)
    return model is not None and (name != "gptj" or model._supports_attention_backend)


ARCHITECTURES = sorted(filter(_is_there, REGISTRY))
# For tests that are about something else, and need to see each kind of positions, windows and weights only once.
CORE = ["gemma2", "gemma3", "gpt2", "gpt_neox", "llama", "mistral", "qwen3"]
LOCAL = [name for name in ARCHITECTURES if REGISTRY[name].local]
