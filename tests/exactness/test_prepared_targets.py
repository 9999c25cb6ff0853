"""Targets in half precision, offloaded or quantised: still the text of that same model under Transformers."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import torch
from architectures import CORE
from talking import letters
from test_attention import path_logits
from test_cache import prefill
from tiny import OracleDrafter, padded, random_prompts, random_tree, tiny_model, tiny_target
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from mtp.attention import AttentionPass
from mtp.fingerprint import fingerprint_mismatch
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree

pytestmark = pytest.mark.usefixtures("graphs")

NEW = 20
FOUR = random_prompts([4, 11, 7, 1], seed=4)
HALVES = [torch.bfloat16, torch.float16]


def greedy(model: PreTrainedModel, new: int = NEW) -> Tensor:
    """``[4, new]`` what Transformers alone answers."""
    batch = padded(FOUR)
    return model.generate(**batch, max_new_tokens=new, do_sample=False)[:, batch["input_ids"].shape[1] :]


def assert_drafted_text_is_the_models_own(model: PreTrainedModel) -> Target:
    """With a drafter that is often right, and many nodes that are wrong; and again with what can be compiled."""
    expected = greedy(model, NEW + 8)
    target = Target(model)
    drafted = SpeculativeModel(target, OracleDrafter(expected.tolist(), lengths=[3, 0, 5, 1], clutter=6))
    batch = padded(FOUR)
    for compiled in (False, True):
        if compiled:
            drafted.compile(progress=False)
        out = drafted.generate(**batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
        assert out.sequences[:, batch["input_ids"].shape[1] :].equal(expected[:, :NEW])
        assert out.acceptance.mean_accepted_length > 2
    return target


def assert_unembed_gives_the_models_logits(target: Target) -> None:
    ids, some = torch.tensor(random_prompts([9])), torch.tensor([5, 2, 9])
    with torch.no_grad():
        logits = target.causal_lm(input_ids=ids).logits
        hidden, _ = target.encode(ids)
        torch.testing.assert_close(target.unembed(hidden), logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(target.unembed(hidden, some), logits[..., some], rtol=1e-4, atol=1e-5)


# ---- half precision -----------------------------------------------------------------------------------------------


def tree_logits(target: Target, prompts: list[list[int]], tree: TokenTree, mask: Tensor | None = None) -> Tensor:
    cache = prefill(target, prompts)
    attention = AttentionPass.over_tree(tree, cache.lengths, cache.start)
    if mask is not None:
        attention.staged_mask = mask
    return target.forward(tree.tokens, cache, attention).logits.float()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("architecture", CORE)
def test_half_precision_trees_are_as_near_to_fp32_as_the_stock_model(architecture: str, dtype: torch.dtype) -> None:
    """In half precision two ways of computing the same thing differ by rounding, so equality is the wrong question.

    Asked is whether our rounding errors are like Transformers' own: root mean squares over all nodes and logits,
    against the same rounded weights in fp32.  A node that sees one token too many is far outside of that.
    """
    half = Target(tiny_model(architecture).to(dtype))
    exact = Target(copy.deepcopy(half.causal_lm).float())
    tree, prompts = random_tree(random.Random(3), 2, 10), random_prompts([19, 6], 3)
    truth, stock = (torch.stack([path_logits(m, prompts[r], tree, r) for r in range(2)]) for m in (exact, half))

    def error(logits: Tensor) -> float:
        return float((logits.float() - truth).square().mean().sqrt())

    assert 0 < error(tree_logits(half, prompts, tree)) <= 1.5 * error(stock)
    sees_siblings = torch.ones(10, 10, dtype=torch.bool).tril().expand(2, -1, -1)
    assert error(tree_logits(half, prompts, tree, sees_siblings)) > 5 * error(stock)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("architecture", CORE)
def test_half_precision_text_is_the_models_own_up_to_the_first_near_tie(architecture: str, dtype: torch.dtype) -> None:
    """Where the texts part, the model itself cannot tell the two tokens apart in this precision.

    The two logits there differ by no more than twice the largest rounding error of the stock model's logits at any
    position of that text.
    """
    model = tiny_model(architecture).to(dtype)
    exact = copy.deepcopy(model).float()
    expected = greedy(model, NEW + 8)
    drafted = SpeculativeModel(Target(model), OracleDrafter(expected.tolist(), lengths=[3, 0, 5, 1], clutter=6))
    batch = padded(FOUR)
    found = drafted.generate(**batch, max_new_tokens=NEW, do_sample=False)[:, batch["input_ids"].shape[1] :]
    for row, prompt in enumerate(FOUR):
        ours, theirs = found[row].tolist(), expected[row, :NEW].tolist()
        part = next((at for at in range(NEW) if ours[at] != theirs[at]), None)
        if part is None:
            continue
        with torch.no_grad():
            text = torch.tensor([prompt + theirs[:part]])
            logits, truth = model(text).logits[0].float(), exact(text).logits[0]
        rounding = float((logits - truth).abs().max())
        assert abs(float(truth[-1, ours[part]] - truth[-1, theirs[part]])) <= 2 * rounding


# ---- offloaded ----------------------------------------------------------------------------------------------------

PARTS = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm"]
OFFLOADED = {
    "one layer": ["model.layers.1"],
    "all layers": ["model.layers.0", "model.layers.1", "model.layers.2"],
    "ends": ["model.embed_tokens", "lm_head"],
}


@pytest.mark.parametrize("name", sorted(OFFLOADED))
def test_text_of_a_model_with_layers_on_disk(name: str, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    places = {part: "disk" if part in OFFLOADED[name] else "cpu" for part in [*PARTS, "lm_head"]}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert any(weight.device.type == "meta" for weight in model.parameters())
    target = assert_drafted_text_is_the_models_own(model)
    assert_unembed_gives_the_models_logits(target)
    assert target.device.type == "cpu"
    assert fingerprint_mismatch(target.fingerprint(), tiny_target("llama").fingerprint()) is None


def test_text_of_a_model_whose_weights_are_fetched_for_each_layer() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model("gemma3"), execution_device="cpu")
    assert all(weight.device.type == "meta" for weight in model.parameters())
    target = assert_drafted_text_is_the_models_own(model)
    assert_unembed_gives_the_models_logits(target)
    assert fingerprint_mismatch(target.fingerprint(), tiny_target("gemma3").fingerprint()) is None


# ---- quantised ----------------------------------------------------------------------------------------------------


def test_text_of_a_model_with_int8_weights() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    target = assert_drafted_text_is_the_models_own(model)
    assert_unembed_gives_the_models_logits(target)
    assert fingerprint_mismatch(target.fingerprint(), tiny_target("llama").fingerprint()) is None


def save_model_of_whole_blocks(folder: Path) -> None:
    """Quantisers take columns in groups, and refuse matrices that are smaller."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 24}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, pad_token_id=0, eos_token_id=None, **sizes))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.2)
    model.save_pretrained(folder)


@pytest.mark.parametrize("bits", [4, 8])
def test_text_of_a_model_quantised_by_bitsandbytes(bits: int, tmp_path: Path) -> None:
    """With 8 bits, without outliers: which columns count as such is decided over all tokens of a pass (LLM.int8())."""
    pytest.importorskip("bitsandbytes")
    save_model_of_whole_blocks(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, llm_int8_threshold=0.0)
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    target = assert_drafted_text_is_the_models_own(quantised)
    assert target.fingerprint().endswith("quantised")


def test_text_of_a_model_quantised_by_gptq(tmp_path: Path) -> None:
    pytest.importorskip("optimum")
    pytest.importorskip("gptqmodel")
    save_model_of_whole_blocks(tmp_path)
    texts = ["".join(random.Random(seed).choices("bcdefghijklmnopqrstuvwx", k=96)) for seed in range(8)]
    config = GPTQConfig(bits=4, group_size=32, dataset=texts, tokenizer=letters(), backend="torch")
    quantised = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    assert type(quantised.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    target = assert_drafted_text_is_the_models_own(quantised)
    assert target.fingerprint().endswith("quantised")
