"""serve/export: what an engine computes from the exported files is what the head computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import VOCAB, tiny_head, tiny_target
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from mtp.drafters import TargetStates
from mtp.heads import Head
from serve.export.vllm import ExportError, export, vllm_config, vllm_tensors

TEXT, PENDING = torch.tensor([[3, 7, 1, 9, 4, 12, 5, 2, 8, 6]]), torch.tensor([11])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def engine(
    config: dict[str, Any], weights: dict[str, Tensor], following: Tensor, aux: Tensor, steps: int
) -> list[Tensor]:
    """Logits ``[V]`` along a chain of likeliest guesses, as vLLM's EAGLE-3 layer is published to compute them.

    Args:
        following: ``[T]`` for each position of the text, the token behind it.
        aux: ``[T, 3H]`` the target's tapped layers, in their order there.
    """
    eps, heads, dim = config["rms_norm_eps"], config["num_attention_heads"], config["head_dim"]
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config["hidden_size"],
            num_attention_heads=heads,
            head_dim=dim,
            max_position_embeddings=config["max_position_embeddings"],
            rope_parameters=config["rope_parameters"],
        )
    )
    table = weights["embed_tokens.weight"]
    hidden = aux @ weights["fc.weight"].T
    found: list[Tensor] = []
    inputs, keys, values = table[following], [], []
    first = 0
    for _ in range(steps):
        count = inputs.shape[0]
        normed = [
            rms_norm(inputs, weights["midlayer.input_layernorm.weight"], eps),
            rms_norm(hidden, weights["midlayer.hidden_norm.weight"], eps),
        ]
        x = torch.cat(normed, dim=-1)
        q, k, v = (
            (x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(count, heads, dim)
            for name in ("q", "k", "v")
        )
        positions = torch.arange(first, first + count)
        cos, sin = (part[0][:, None] for part in rotary(x, positions[None]))
        q, k = (each * cos + rotate_half(each) * sin for each in (q, k))
        keys.append(k)
        values.append(v)
        all_keys, all_values = torch.cat(keys), torch.cat(values)
        scores = torch.einsum("qhd,khd->hqk", q, all_keys) * dim**-0.5
        later = torch.arange(all_keys.shape[0])[None] > positions[:, None]
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, all_values)
        stream = hidden + attended.reshape(count, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
        y = rms_norm(stream, weights["midlayer.post_attention_layernorm.weight"], eps)
        gated = F.silu(y @ weights["midlayer.mlp.gate_proj.weight"].T) * (y @ weights["midlayer.mlp.up_proj.weight"].T)
        stream = stream + gated @ weights["midlayer.mlp.down_proj.weight"].T
        rows = rms_norm(stream[-1], weights["norm.weight"], eps) @ weights["lm_head.weight"].T
        ids = torch.arange(rows.numel()) + weights.get("d2t", 0)
        logits = rows.new_full((config["vocab_size"],), float("-inf")).index_put((ids,), rows)
        found.append(logits)
        inputs, hidden = table[logits.argmax()][None], stream[-1:]
        first += count
    return found


@torch.no_grad()
def head_chain(head: Head, steps: int) -> list[Tensor]:
    """The head's own logits ``[V]`` along the chain of its likeliest guesses, as it drafts them."""
    hidden, taps = head.target.encode(TEXT, head.config.taps)
    head.start(TargetStates(TEXT, hidden, taps, torch.tensor([TEXT.shape[1]])), 64)
    carry, logits = head.first(PENDING)
    found = []
    for depth in range(1, steps + 1):
        found.append(
            torch.full((VOCAB,), float("-inf")).index_put((head.draft_ids,), logits[0, 0, : len(head.draft_ids)])
        )
        token = found[-1].argmax()[None, None]
        if depth < steps:
            carry, logits = head.then(token, carry, torch.ones(1, 1, depth, dtype=torch.bool), depth)
    return found


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("llama", {}),
        ("llama", {"draft_vocab": 10}),
        ("llama", {"draft_vocab": 10, "taps": (2, 0, 3), "rms_norm_eps": 1e-3}),
        ("gemma3", {"draft_vocab": 10}),  # whose embeddings are scaled
    ],
)
def test_an_engine_gets_the_heads_own_logits(tmp_path: Path, architecture: str, sizes: dict[str, Any]) -> None:
    target = tiny_target(architecture)
    head = tiny_head("eagle3", target, **sizes)
    with torch.no_grad():
        head.tap_scale.uniform_(0.5, 40.0)
        for norm in (head.norm, head.midlayer.hidden_norm, head.midlayer.input_layernorm):
            norm.weight.uniform_(0.5, 2.0)
    shuffled = head.draft_ids[torch.randperm(head.draft_ids.numel())]
    head.set_draft_vocabulary(shuffled)
    config, weights = read(export(head, tmp_path / "draft"))
    assert ("embed_tokens.weight" in weights) == (architecture == "gemma3")
    weights.setdefault("embed_tokens.weight", target.causal_lm.get_input_embeddings().weight.detach())
    _, aux = target.encode(TEXT, config["eagle_aux_hidden_state_layer_ids"])
    following = torch.cat([TEXT[0, 1:], PENDING])
    for own, theirs in zip(head_chain(head, 3), engine(config, weights, following, aux[0], 3), strict=True):
        torch.testing.assert_close(theirs, own, atol=1e-4, rtol=1e-4)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), load_file(folder / "model.safetensors")


def test_the_draft_vocabulary_is_told_in_offsets_and_in_a_mask(tmp_path: Path) -> None:
    head = tiny_head("eagle3", tiny_target(), draft_vocab=10)
    _, weights = read(export(head, tmp_path / "draft"))
    ids = head.draft_ids.sort().values
    assert (torch.arange(10) + weights["d2t"]).tolist() == ids.tolist()
    assert weights["t2d"].nonzero()[:, 0].tolist() == ids.tolist()


def test_heads_of_another_family_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="'medusa'; only EAGLE-3"):
        export(tiny_head("medusa", tiny_target()), tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
    ],
)
def test_settings_that_vllm_computes_otherwise_are_refused(change: dict[str, Any], message: str) -> None:
    config = tiny_head("eagle3", tiny_target()).config
    with pytest.raises(ExportError, match=message):
        vllm_config(replace(config, **change))


def test_a_tensor_that_has_no_place_is_refused() -> None:
    head = tiny_head("eagle3", tiny_target())
    state = dict(head.state_dict())
    with pytest.raises(ExportError, match=r"fc\.bias \(found\)"):
        vllm_tensors({**state, "fc.bias": torch.zeros(1)}, head.config)
    del state["norm.weight"]
    with pytest.raises(ExportError, match=r"norm\.weight \(missing\)"):
        vllm_tensors(state, head.config)
