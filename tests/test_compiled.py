"""Compiled layers: what the layers themselves give, for every architecture, and never in their way."""

from __future__ import annotations

import gc
import random
import weakref
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from tiny import FOUR, VOCAB, OracleDrafter, padded, random_prompts, random_tree, tiny_model, tiny_target
from torch import nn
from transformers import OlmoConfig, OlmoForCausalLM
from transformers.cache_utils import Cache

from mtp import SpeculativeModel, compiled, kernels, native
from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.cost import Costs
from mtp.drafters import PlainDrafter
from mtp.files import cache_folder
from mtp.packing import is_available
from mtp.support import UnsupportedTargetError
from mtp.target import Target, TargetOutput

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch cannot pack weights")

# Layers that run as they are, and why.
NOT_COMPILED = {
    "deepseek_v2": (3, "it keeps something else than the keys and values that it attends to"),
    "deepseek_v3": (3, "it keeps something else than the keys and values that it attends to"),
    "falcon": (3, "it is handed 0 masks"),
    "falcon_new_decoder": (3, "it is handed 0 masks"),
    "gemma4": (3, "other layers read its keys and values"),
}


def pass_over_trees(target: Target, prompts: list[list[int]], **options: Any) -> TargetOutput:
    """A tree behind ragged prompts."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts])
    cache = target.new_cache(len(prompts), 48)
    target.forward(ids, cache, AttentionPass.over_chain(ids.shape[1], cache.lengths, 0))
    cache.commit(None, lengths, int(lengths.max()))
    tree = random_tree(random.Random(5), batch=len(prompts), nodes=7, vocab=VOCAB)
    return target.forward(tree.tokens, cache, AttentionPass.over_tree(tree, cache.lengths, cache.start), **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_passes_give_the_same_with_compiled_layers(architecture: str, graphs: list[str]) -> None:
    target = tiny_target(architecture)
    prompts = [random_prompts([9], 1), FOUR]
    expected = [pass_over_trees(target, each, taps=(1, 2)) for each in prompts]
    report = target.compile(progress=False)
    count, why = NOT_COMPILED.get(architecture, (0, ""))
    assert report.layers - report.compiled == count, str(report)
    assert why in str(report)
    for each, wanted in zip(prompts, expected, strict=True):
        found = pass_over_trees(target, each, taps=(1, 2))
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.taps, wanted.taps, rtol=1e-4, atol=1e-4)


def test_layers_that_are_built_alike_share_a_graph(graphs: list[str]) -> None:
    tiny_target("llama", layers=6).compile(progress=False)
    assert len(graphs) == 1
    graphs.clear()
    tiny_target("gemma3", layers=6).compile(progress=False)
    assert len(graphs) == 2  # sliding and full


def test_compiled_layers_can_be_left_out_at_once(graphs: list[str]) -> None:
    target = tiny_target()
    target.compile(progress=False)
    found = pass_over_trees(target, FOUR, skip=(1,)).logits
    expected = pass_over_trees(Target(target.model), FOUR, skip=(1,)).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_generated_text_is_the_same(batch: int, graphs: list[str]) -> None:
    lm = tiny_model()
    inputs = padded(FOUR[:batch])
    truth = lm.generate(**inputs, max_new_tokens=20, do_sample=False)
    answers = truth[:, inputs["input_ids"].shape[1] :].tolist()
    model = SpeculativeModel(Target(lm), OracleDrafter(answers, lengths=(3, 0, 5), clutter=4))
    assert model.compile(progress=False).compiled == len(model.target.layers)
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, do_sample=False), truth)


def test_passes_are_filled_up_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 5.0, 2: 6.0, 3: 4.0, 4: 3.0, 5: 2.95, 6: 2.9, 7: 3.0, 8: 3.1}
    clock = [0.0]

    class Product:
        def inputs(self, rows: int) -> torch.Tensor:
            return torch.zeros(rows, 2)

        def __call__(self, x: torch.Tensor) -> None:
            clock[0] += seconds[len(x)]

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert compiled.fullest([Product(), Product()]) == {1: 6, 2: 6, 3: 6}  # four rows would win three hundredths
    assert compiled.fullest([]) == {}  # kernels of our own take as long for one row as for eight


@pytest.mark.parametrize(("batch", "nodes"), [(1, 1), (1, 5), (2, 2), (3, 1), (4, 2)])
def test_what_fills_a_pass_up_leaves_no_trace(batch: int, nodes: int, graphs: list[str]) -> None:
    plain, filled = tiny_target(), tiny_target()
    filled.compile(progress=False)
    widths: list[int] = []
    filled.layers[0].register_forward_pre_hook(lambda module, args: widths.append(args[0].shape[1]))
    caches = [target.new_cache(batch, 32) for target in (plain, filled)]
    for seed in range(3):  # each behind what the one before has left in the cache
        tree = random_tree(random.Random(seed), batch=batch, nodes=nodes, vocab=VOCAB)
        outputs = []
        for target, cache in zip((plain, filled), caches, strict=True):
            attention = AttentionPass.over_tree(tree, cache.lengths, cache.start)
            outputs.append(target.forward(tree.tokens, cache, attention, taps=(0, 2)))
            cache.commit(None, torch.ones(batch, dtype=torch.long), seed + 1)
        for name in ("logits", "hidden", "taps"):
            found, expected = (getattr(output, name) for output in reversed(outputs))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert set(widths) == ({8 // batch} if batch * nodes < 8 else {nodes})


# ---- nothing is stale, and nothing is in the way -------------------------------------------------------------------


def change_a_weight(layer: nn.Module) -> None:
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(-2)  # type: ignore[union-attr, operator]


def change_data(layer: nn.Module) -> None:
    layer.self_attn.k_proj.weight.data += 1.0  # type: ignore[union-attr, operator]


def replace_a_norm(layer: nn.Module) -> None:
    layer.input_layernorm.weight = nn.Parameter(torch.randn(32))  # type: ignore[union-attr]


def replace_a_part(layer: nn.Module) -> None:
    layer.mlp = nn.Linear(32, 32)


def hook_a_part(layer: nn.Module) -> None:
    layer.mlp.register_forward_hook(lambda module, args, output: output * 3)  # type: ignore[union-attr]


def replace_the_forward(layer: nn.Module) -> None:
    layer.mlp.forward = lambda states: states * 0.5  # type: ignore[union-attr, method-assign]


def add_a_bias(layer: nn.Module) -> None:
    layer.mlp.up_proj.bias = nn.Parameter(torch.randn(48))  # type: ignore[union-attr]


def swap_the_class(layer: nn.Module) -> None:
    layer.mlp.act_fn.__class__ = nn.Tanh  # type: ignore[union-attr, assignment]


def change_another_precision(layer: nn.Module) -> None:
    layer.to(torch.bfloat16).to(torch.float32)
    layer.input_layernorm.weight = nn.Parameter(torch.randn(32).bfloat16())  # type: ignore[union-attr]


def replace_a_norm_by_a_view(layer: nn.Module) -> None:
    layer.input_layernorm.weight = nn.Parameter(torch.randn(64)[::2])  # type: ignore[union-attr]


CHANGES = [
    change_a_weight,
    change_data,
    replace_a_norm,
    replace_a_part,
    hook_a_part,
    replace_the_forward,
    add_a_bias,
    swap_the_class,
    change_another_precision,
    replace_a_norm_by_a_view,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_is_noticed(change: Any, graphs: list[str]) -> None:
    target = tiny_target()
    before = pass_over_trees(target, FOUR).logits
    target.compile(progress=False)
    pass_over_trees(target, FOUR)  # packs
    change(target.layers[1])
    found = pass_over_trees(target, FOUR).logits
    assert not torch.allclose(found, before, atol=1e-2)
    torch.testing.assert_close(found, pass_over_trees(Target(target.model), FOUR).logits, rtol=1e-4, atol=1e-4)


def test_layers_that_run_as_they_are_again_are_named_once(graphs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    target = tiny_target()
    target.compile(progress=False)
    pass_over_trees(target, FOUR)
    hook_a_part(target.layers[1])
    for _ in range(2):
        pass_over_trees(target, FOUR)
    said = [record.getMessage() for record in caplog.records if record.name == compiled.__name__]
    assert said == ["1 compiled layers were changed: they run as they are, and slower"]


def test_weights_that_are_no_longer_shared_are_noticed(graphs: list[str]) -> None:
    target = tiny_target()
    layer = target.layers[1]
    layer.post_attention_layernorm.weight = layer.input_layernorm.weight  # type: ignore[union-attr]
    target.compile(progress=False)
    layer.post_attention_layernorm.weight = nn.Parameter(torch.randn(32))  # type: ignore[union-attr]
    found = pass_over_trees(target, FOUR).logits
    torch.testing.assert_close(found, pass_over_trees(Target(target.model), FOUR).logits, rtol=1e-4, atol=1e-4)


def olmo(clip: float | None) -> Target:
    """Its attention clips by what it reads in the config, which nothing else of the layer shows."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = OlmoConfig(vocab_size=VOCAB, clip_qkv=clip, pad_token_id=0, eos_token_id=None, **sizes)
    torch.manual_seed(0)
    return Target(OlmoForCausalLM(config).eval())


def test_settings_in_the_config_are_part_of_a_graph(graphs: list[str]) -> None:
    target, clipped = olmo(None), olmo(0.1)
    assert target.compile(progress=False).compiled == clipped.compile(progress=False).compiled == 2
    assert len(set(graphs)) == 2
    target.config.clip_qkv = 0.1
    found = pass_over_trees(target, FOUR).logits
    torch.testing.assert_close(found, pass_over_trees(clipped, FOUR).logits, rtol=1e-4, atol=1e-4)


def test_the_scale_of_an_adapter_is_part_of_a_graph(graphs: list[str]) -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), settings)
    target = Target(model)
    target.compile(progress=False)
    before = pass_over_trees(target, FOUR).logits
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    found = pass_over_trees(target, FOUR).logits
    assert not torch.allclose(found, before, atol=1e-2)
    torch.testing.assert_close(found, pass_over_trees(Target(model), FOUR).logits, rtol=1e-4, atol=1e-4)


def in_training_mode(target: Target) -> AbstractContextManager[Any]:
    target.causal_lm.train()
    return nullcontext()


def under_autocast(target: Target) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("state", [in_training_mode, under_autocast])
def test_nothing_that_holds_while_compiling_gets_into_a_graph(state: Any, graphs: list[str]) -> None:
    target = tiny_target("gpt2")
    expected = pass_over_trees(target, FOUR).logits
    for module in target.causal_lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with state(target):
        assert target.compile(progress=False).compiled == len(target.layers)
    torch.testing.assert_close(pass_over_trees(target, FOUR).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_target_in_double_precision_can_be_compiled_or_not(architecture: str, graphs: list[str]) -> None:
    target = Target(tiny_model(architecture).double())
    expected = pass_over_trees(target, FOUR).logits
    assert target.compile(progress=False).compiled in (0, len(target.layers))
    torch.testing.assert_close(pass_over_trees(target, FOUR).logits, expected)


class AsksForTheLength(nn.Module):
    """Adds something that grows with the text in the cache, as no pass over a short text would show."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next(value for value in kwargs.values() if isinstance(value, Cache))
        states, weights = self.attention(*args, **kwargs)
        return states + cache.get_seq_length() // 16, weights


def test_a_layer_that_asks_how_long_the_text_is_runs_as_it_is(graphs: list[str]) -> None:
    target = tiny_target()
    target.layers[1].self_attn = AsksForTheLength(target.layers[1].self_attn)  # type: ignore[arg-type]
    report = target.compile(progress=False)
    assert report.compiled == len(target.layers) - 1
    assert "how long" in str(report)


def test_a_layer_with_a_tensor_that_no_module_knows_of_runs_as_it_is(graphs: list[str]) -> None:
    target = tiny_target()
    layer: Any = target.layers[1]
    layer.mlp.scale = torch.tensor(2.0)
    forward = type(layer.mlp).forward
    scaled = {"forward": lambda self, x: forward(self, x) * self.scale}
    layer.mlp.__class__ = type("ScaledMLP", (type(layer.mlp),), scaled)
    report = target.compile(progress=False)
    assert report.compiled == len(target.layers) - 1
    assert "mlp.scale" in str(report)
    layer.mlp.scale = torch.tensor(-3.0)
    found = pass_over_trees(target, FOUR).logits
    torch.testing.assert_close(found, pass_over_trees(Target(target.model), FOUR).logits, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of those that were recorded nor of later ones: a cache may be large."""
    monkeypatch.setattr(compiled, "native_function", lambda *args: lambda inputs: [inputs[0] + 0.0])
    monkeypatch.setattr(compiled, "_compare", lambda *_: None)
    monkeypatch.setattr(compiled.CompiledLayers, "compare", lambda *_: None)
    made: list[weakref.ref[TreeCache]] = []
    initialise = TreeCache.__init__

    def remember(self: TreeCache, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        made.append(weakref.ref(self))

    monkeypatch.setattr(TreeCache, "__init__", remember)
    target = tiny_target()
    assert target.compile(progress=False).compiled == len(target.layers)
    with pytest.raises(UnsupportedTargetError):  # these functions do not attend
        pass_over_trees(target, FOUR)
    gc.collect()
    assert len(made) == 3
    assert not [cache for cache in made if cache() is not None]


def test_an_interrupt_leaves_the_target_as_it_was(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.load()  # which products and attention use from then on, in layers that are not compiled, too
    target = tiny_target()
    packed = len(target._packed)
    expected = pass_over_trees(target, FOUR).logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled.CompiledLayers, "compare", interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.compile(progress=False)
    assert target.num_compiled == 0
    assert len(target._packed) == packed
    assert torch.equal(pass_over_trees(target, FOUR).logits, expected)


def test_the_model_is_as_it_was_between_passes(graphs: list[str]) -> None:
    lm = tiny_model()
    before = {name: dict(module.__dict__) for name, module in lm.named_modules()}
    target = Target(lm)
    target.compile(progress=False)
    pass_over_trees(target, FOUR)
    for name, module in lm.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_layer_whose_function_is_wrong_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def native(*args: Any) -> Any:
        return lambda inputs: [inputs[0] * 1.5]

    monkeypatch.setattr(compiled, "native_function", native)
    kernels.load()
    target = tiny_target()
    expected = pass_over_trees(target, FOUR).logits
    report = target.compile(progress=False)
    assert report.compiled == 0
    assert "off by up to" in str(report)
    assert torch.equal(pass_over_trees(target, FOUR).logits, expected)


def test_what_layers_hand_to_one_another_is_compared_too(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "needed_layers", frozenset())
    kernels.load()
    target = tiny_target("gemma4")  # the compiled layers give what they should, but not to the layer that reads more
    expected = pass_over_trees(target, FOUR).logits
    assert target.compile(progress=False).compiled == 0
    assert torch.equal(pass_over_trees(target, FOUR).logits, expected)


def test_costs_of_compiled_passes_are_kept_apart(graphs: list[str], tmp_path: Path) -> None:
    target = tiny_target()
    costs = Costs(target, PlainDrafter(), tmp_path)
    before = costs.path(1)
    target.compile(progress=False)
    assert costs.path(1) != before


# ---- the compiler --------------------------------------------------------------------------------------------------


def test_without_a_compiler_all_runs_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:  # what this process has compiled before is kept, and stays loaded
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "_load", fail)
    target = tiny_target()
    expected = pass_over_trees(target, FOUR).logits
    with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)}):
        report = target.compile(progress=False)
    assert report.compiled == 0
    assert len(str(report).splitlines()) == 1
    assert not list(tmp_path.rglob("*.pt2"))
    assert torch.equal(pass_over_trees(target, FOUR).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_functions_give_the_same_and_are_kept(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_model("qwen3").to(dtype)
    expected = [pass_over_trees(Target(lm), each, taps=(1, 2)) for each in ([FOUR[1]], FOUR)]
    for _ in range(2):  # the second time from the disk
        target = Target(lm)
        assert target.compile(progress=False).compiled == len(target.layers)
        for each, wanted in zip(([FOUR[1]], FOUR), expected, strict=True):
            tolerance = 1e-4 if dtype == torch.float32 else 5e-2 * float(wanted.logits.abs().max())
            found = pass_over_trees(target, each, taps=(1, 2))
            torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-4, atol=tolerance)
        monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))


@pytest.mark.slow
def test_native_functions_take_weights_only_as_they_were() -> None:
    """Compiled code looks neither at their precision nor at how they lie in memory."""
    for change in (None, *CHANGES, lambda layer: layer.to(torch.bfloat16)):
        target = tiny_target()
        assert target.compile(progress=False).compiled == len(target.layers)  # all but the first from the disk
        if change is not None:
            change(target.layers[1])
        if next(target.layers[1].parameters()).dtype != torch.float32:
            target.model.to(torch.bfloat16)
        found = pass_over_trees(target, FOUR).logits
        expected = pass_over_trees(Target(target.model), FOUR).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def spoil(data: bytes) -> bytes:
    return data[:60_000] + bytes(2_000) + data[62_000:]


@pytest.mark.slow
def test_a_function_that_is_spoilt_on_the_disk_is_compiled_again(capfd: pytest.CaptureFixture[str]) -> None:
    tiny_target().compile(progress=False)
    (kept,) = (cache_folder() / "compiled").iterdir()
    for change in (spoil, lambda data: data[: len(data) // 2], lambda data: b""):
        kept.write_bytes(change(kept.read_bytes()))
        target = tiny_target()
        assert target.compile(progress=False).compiled == len(target.layers)
        assert zipfile.ZipFile(kept).testzip() is None
    assert not capfd.readouterr().err
