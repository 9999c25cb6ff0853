"""MTP modules: what they compute, and that those which targets ship are taken as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import REGISTRY, Architecture, plain
from safetensors.torch import save_file
from tiny import VOCAB, padded, random_prompts, tiny_head, tiny_model, tiny_target
from torch import Tensor
from transformers import AutoModelForCausalLM
from workshop import make_workshop, recipe

import mtp
from mtp.heads import TrainingBatch
from mtp.heads.mtp_module import MtpModuleHead, affine_of
from mtp.model import SpeculativeModel
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from train import heads as program
from train.batches import training_batch
from train.data import Row
from train.features import OnlineFeatures


def batch_of(target: Target) -> TrainingBatch:
    ids = random_prompts([12], seed=2)[0]
    return training_batch(OnlineFeatures(target, [Row(tuple(ids[:5]), tuple(ids[5:]))], ()), [0])


def test_the_first_step_is_the_papers_formula_in_the_models_own_code() -> None:
    target = tiny_target()
    head = tiny_head("mtp", target)
    batch = batch_of(target)
    tokens, hidden = batch.states.tokens, batch.states.hidden
    model = target.causal_lm
    joined = torch.cat([head.enorm(model.model.embed_tokens(tokens[:, 1:])), head.hnorm(hidden[:, :-1])], dim=-1)
    x = joined @ head.eh_proj.weight.T
    positions = torch.arange(x.shape[1])[None]
    triangle = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
    layer = head.layer.block
    for module in layer.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    out = layer(x, attention_mask=triangle, position_embeddings=model.model.rotary_emb(x, positions))
    prediction = head.unroll(batch, 1)[0]
    expected = model.lm_head(head.norm(out))[0, prediction.positions - 1]
    torch.testing.assert_close(prediction.logits, expected, atol=1e-4, rtol=1e-4)


# ---- modules that targets ship ------------------------------------------------------------------------------------

# Ours in the checkpoints' names, written down by hand.
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm", "layer.block": ""}
QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "norm": "norm",
    "layer.block": "layers.0",
}
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
    "layer.block": "",
}
SHIPPED = {
    "deepseek_v3": ("model.layers.3.", DEEPSEEK, {"chain_normed": False}),
    "glm4_moe": ("model.layers.3.", DEEPSEEK, {"chain_normed": False}),
    "qwen3_moe": ("mtp.", QWEN, {"chain_normed": True}),
    "qwen2": ("model.mtp_layers.0.", MIMO, {"chain_normed": True, "hidden_first": True}),
}


def one_by_one(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor as checkpoints have it: experts apart."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    parts: dict[str, Tensor] = {}
    stem = name.rpartition(".")[0]
    for index, expert in enumerate(tensor):
        if name.endswith("down_proj"):
            parts[f"{stem}.{index}.down_proj.weight"] = expert
        else:
            parts[f"{stem}.{index}.gate_proj.weight"], parts[f"{stem}.{index}.up_proj.weight"] = expert.chunk(2)
    return parts


def ship(head: MtpModuleHead, architecture: str, folder: Path) -> dict[str, Tensor]:
    """Write the module into ``folder`` as the target's makers would; returns what was written."""
    prefix, names, _ = SHIPPED[architecture]
    tensors = {"model.embed_tokens.weight": torch.zeros(3), "model.layers.0.input_layernorm.weight": torch.zeros(3)}
    for name, tensor in head.state_dict().items():
        ours = next((ours for ours in names if name.startswith(f"{ours}.")), None)
        if ours is not None:
            theirs = f"{names[ours]}.{name.removeprefix(ours + '.')}".removeprefix(".")
            tensors |= one_by_one(prefix + theirs, tensor)
    if names is DEEPSEEK:
        tensors[f"{prefix}embed_tokens.weight"] = head.target.causal_lm.get_input_embeddings().weight
        tensors[f"{prefix}shared_head.head.weight"] = head.target.output.weight
    write(tensors, folder)
    return tensors


def write(tensors: dict[str, Tensor], folder: Path) -> None:
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


GLM = Architecture(
    "Glm4MoeForCausalLM",
    "Glm4MoeConfig",
    plain(
        head_dim=8,
        num_key_value_heads=2,
        attention_bias=True,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
)


@pytest.mark.parametrize("architecture", sorted(SHIPPED))
def test_a_shipped_module_is_taken_as_it_is(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "glm4_moe", GLM)
    target = tiny_target(architecture)
    head = tiny_head("mtp", target, **SHIPPED[architecture][2])
    written = ship(head, architecture, tmp_path)
    assert not any("gate_up_proj" in name for name in written)
    loaded = MtpModuleHead.from_target_checkpoint(target, tmp_path, steps=3)
    batch = batch_of(target)
    for one, other in zip(loaded.unroll(batch, 3), head.unroll(batch, 3), strict=True):
        torch.testing.assert_close(one.logits, other.logits)
    prompts = padded(random_prompts([4, 9]))
    expected = target.causal_lm.generate(**prompts, max_new_tokens=10, do_sample=False)
    assert torch.equal(
        SpeculativeModel(target, loaded).generate(**prompts, max_new_tokens=10, do_sample=False), expected
    )


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.eh_proj.weight"] = tensors["model.layers.3.eh_proj.weight"].to(torch.float8_e4m3fn)


def other_output(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.shared_head.head.weight"] = torch.randn(
        VOCAB, tensors["model.layers.3.enorm.weight"].numel()
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(dict.clear, "No MTP module", id="none there"),
        pytest.param(drop("model.layers.3.hnorm.weight"), r"missing hnorm\.weight", id="a tensor is missing"),
        pytest.param(narrow, "is quantised", id="quantised"),
        pytest.param(other_output, "of its own", id="an output matrix of its own"),
    ],
)
def test_a_module_that_cannot_be_taken_is_refused(
    change: Callable[[dict[str, Tensor]], None], reason: str, tmp_path: Path
) -> None:
    target = tiny_target("deepseek_v3")
    tensors = ship(tiny_head("mtp", target), "deepseek_v3", tmp_path)
    change(tensors)
    write(tensors, tmp_path)
    with pytest.raises(UnsupportedTargetError, match=reason):
        MtpModuleHead.from_target_checkpoint(target, tmp_path)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"), architecture="deepseek_v3")


def test_a_recipe_measures_and_keeps_a_shipped_module(workshop: Path, tmp_path: Path) -> None:
    target = Target(AutoModelForCausalLM.from_pretrained(workshop / "target"))
    shutil.copytree(workshop / "target", tmp_path / "target")
    module = tiny_head("mtp", target, chain_normed=False)
    (tmp_path / "shipped").mkdir()
    ship(module, "deepseek_v3", tmp_path / "shipped")
    (tmp_path / "shipped" / "model.safetensors").rename(tmp_path / "target" / "mtp.safetensors")
    own = ["head.family=mtp", "head.sizes.shipped=true", "head.draft_vocab_size=null"]
    arguments = recipe(workshop, tmp_path / "run", f"target.path={tmp_path / 'target'}", *own)
    program.main([*arguments, "optim.epochs=0"])
    model = mtp.load(tmp_path / "run" / "best")
    for name, weight in module.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[name], weight), name
    assert not model.drafter.config.chain_normed
    measured = json.loads((tmp_path / "run" / "best" / "acceptance.json").read_text())
    assert measured["mean_accepted_length"] >= 1
    program.main([*arguments, f"output={tmp_path / 'further'}", "optim.epochs=1"])
    further = mtp.load(tmp_path / "further" / "best").drafter
    assert not torch.equal(further.eh_proj.weight, module.eh_proj.weight)
    torch.testing.assert_close(further.eh_proj.weight, module.eh_proj.weight, atol=0.1, rtol=0.0)


def test_a_recipe_for_a_module_that_the_target_does_not_ship_is_refused(workshop: Path, tmp_path: Path) -> None:
    arguments = recipe(workshop, tmp_path / "run", "head.family=mtp", "head.sizes.shipped=true")
    with pytest.raises(SystemExit, match=r"error: No MTP module in .*target.*Train one: head\.family=mtp"):
        program.main(arguments)
    assert not (tmp_path / "run" / "features").exists()
    with pytest.raises(UnsupportedTargetError, match=r"files of the target \(''\) are not on this machine"):
        MtpModuleHead.from_target(tiny_target(), torch.arange(VOCAB), shipped=True)


def test_a_target_whose_layers_attend_by_themselves_is_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="choose another head family"):
        MtpModuleHead.from_target(tiny_target("falcon"), torch.arange(VOCAB))


# ---- the copy of the target's layer -------------------------------------------------------------------------------


def test_training_the_module_leaves_the_target_alone() -> None:
    target = Target(tiny_model("llama").requires_grad_(False))
    before = {name: weight.clone() for name, weight in target.causal_lm.state_dict().items()}
    head = tiny_head("mtp", target)
    head.unroll(batch_of(target), 3)[2].logits.sum().backward()
    torch.optim.SGD(head.parameters(), lr=1.0).step()
    assert all(torch.equal(weight, before[name]) for name, weight in target.causal_lm.state_dict().items())
    assert all(weight.grad is not None for weight in head.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_scale_and_shift_of_any_norm_are_found(architecture: str) -> None:
    head = tiny_head("mtp", tiny_target(architecture))
    width = head.config.hidden_size
    with torch.no_grad():
        for weight in head.norm.parameters():
            weight.uniform_(0.5, 1.5)
        scale, shift = affine_of(head.norm, width)
        state = torch.randn(width)
        state = state - state.mean() if architecture == "gpt2" else state
        unit = state / state.pow(2).mean().sqrt()
        torch.testing.assert_close(head.norm(state), unit * scale + shift, atol=1e-3, rtol=1e-3)
