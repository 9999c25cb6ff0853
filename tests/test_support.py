"""Which targets are refused, why, and that docs/architectures.md says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import LONG_ROPE, REGISTRY, SHORT_TEXT, sizes
from test_target import prefill
from tiny import LAYERS, random_prompts, tiny_model, tiny_target
from transformers import PreTrainedModel

from mtp.model import SpeculativeModel
from mtp.support import UnsupportedTargetError
from mtp.target import Target

DOCUMENT = Path(__file__).parents[1] / "docs" / "architectures.md"
SMALL: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
LINEAR: dict[str, Any] = {
    **HEADS,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
STATE, SLOT = "branches of a tree at once", "slots that are not their positions"


@dataclass(frozen=True)
class Refused:
    """A model that cannot be verified in trees: its classes in Transformers, its sizes, and what the error says."""

    model: str
    config: str
    reason: str
    fields: dict[str, Any] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        return getattr(transformers, self.model)(getattr(transformers, self.config)(**{**SMALL, **self.fields}))


def _causal_lm(name: str, reason: str, config: str | None = None, **fields: Any) -> Refused:
    return Refused(f"{name}ForCausalLM", config or f"{name}Config", reason, fields)


MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 8, **HEADS}
REFUSED = [
    _causal_lm("Mamba", STATE, state_size=4),
    _causal_lm("Mamba2", STATE, state_size=4, num_heads=4, head_dim=8, n_groups=1),
    _causal_lm("Rwkv", STATE, attention_hidden_size=16),
    _causal_lm("RecurrentGemma", STATE, num_attention_heads=2, lru_width=16),
    _causal_lm("Jamba", STATE, use_mamba_kernels=False, **HEADS),
    _causal_lm("Bamba", STATE, **MAMBA_2),
    _causal_lm("FalconH1", STATE, mamba_d_ssm=32, **MAMBA_2),
    _causal_lm("Qwen3Next", STATE, **LINEAR),
    _causal_lm("Qwen3_5", STATE, config="Qwen3_5TextConfig", **LINEAR),
    _causal_lm("Lfm2", STATE, layer_types=["conv", "full_attention"], **HEADS),
    _causal_lm("MiniMax", STATE, layer_types=["linear_attention", "full_attention"], **HEADS),
    _causal_lm("Falcon", SLOT, alibi=True, num_attention_heads=2),
    _causal_lm("Bloom", SLOT, n_head=2),
    _causal_lm("Mpt", SLOT, d_model=16, n_heads=2, n_layers=2),
    _causal_lm("GPTNeo", SLOT, num_heads=2, num_layers=2, attention_types=[[["global", "local"], 1]]),
    _causal_lm("Llama4", SLOT, config="Llama4TextConfig", no_rope_layers=[1, 0], **HEADS),
    Refused("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", "AttentionInterface", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    Refused(
        "T5ForConditionalGeneration",
        "T5Config",
        "encoder-decoder",
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2},
    ),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda refused: refused.model)
def test_targets_whose_trees_would_not_be_exact_are_refused_with_the_reason(refused: Refused) -> None:
    with pytest.raises(UnsupportedTargetError, match=rf"{refused.model}.*{refused.reason}"):
        Target(refused.build())


def test_the_kinds_of_layers_that_are_in_the_way_are_named() -> None:
    model = next(refused for refused in REFUSED if refused.model == "Qwen3NextForCausalLM").build()
    with pytest.raises(UnsupportedTargetError, match="layers of type linear_attention"):
        Target(model)


def test_layers_that_attend_by_themselves_are_noticed() -> None:
    target = tiny_target("llama")
    target.layers[1].self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(UnsupportedTargetError, match=f"{LAYERS - 1} times in a pass over {LAYERS} layers"):
        prefill(target, torch.tensor(random_prompts([5])))


# ---- rotary angles that depend on the length ----------------------------------------------------------------------

long_rope = cache(lambda: tiny_target("phi3_longrope"))
BEYOND = rf"{SHORT_TEXT + 1} tokens.*past {SHORT_TEXT} tokens.*rope_parameters"


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_texts_end_where_the_rotary_angles_would_change(kind: str) -> None:
    rope = {**LONG_ROPE, "rope_type": kind, "factor": 2.0}
    config = transformers.LlamaConfig(**{**sizes(24, 2), "rope_parameters": rope})
    target = Target(transformers.LlamaForCausalLM(config))
    assert target.max_positions == SHORT_TEXT
    prefill(target, torch.tensor(random_prompts([SHORT_TEXT])))
    with pytest.raises(UnsupportedTargetError, match=BEYOND):
        prefill(target, torch.tensor(random_prompts([SHORT_TEXT + 1])))


def test_an_encoding_past_the_change_of_angles_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match=BEYOND):
        long_rope().encode(torch.tensor(random_prompts([SHORT_TEXT + 1])))


def test_generation_up_to_the_change_of_angles_equals_transformers_and_past_it_is_refused() -> None:
    """The last token is chosen, not read: a text may be one token longer than the passes that made it."""
    model = SpeculativeModel.from_target(tiny_model("phi3_longrope"), "none")
    ids = torch.tensor(random_prompts([SHORT_TEXT - 6]))
    settings = {"do_sample": False, "max_new_tokens": 7}
    assert model.generate(ids, **settings).equal(model.target.causal_lm.generate(ids, **settings))
    with pytest.raises(UnsupportedTargetError, match=BEYOND):
        model.generate(ids, do_sample=False, max_new_tokens=8)


# ---- what the documentation says ----------------------------------------------------------------------------------


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the table below a heading, by their first cell (without its backquotes)."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_documentation_lists_the_architectures_that_are_tested() -> None:
    documented = table("What is exact")
    assert sorted(documented) == sorted(REGISTRY)
    for name, (model, local, *_) in documented.items():
        assert model.strip("`") == REGISTRY[name].model, name
        assert (local != "") == REGISTRY[name].local, name


def test_the_documentation_lists_what_is_refused() -> None:
    assert sorted(table("What is refused")) == sorted(refused.model for refused in REFUSED)
