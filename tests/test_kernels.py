"""Products and attention in native code: what their definitions say, for every size, and the same text as without."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from tiny import FOUR, OracleDrafter, padded, random_prompts, tiny_model, tiny_target
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mtp import SpeculativeModel, kernels, layer_graph
from mtp.attention import AttentionPass, attend, mask_bias
from mtp.packing import PackedProduct, is_available
from mtp.target import Target
from mtp.tree import TokenTree

pytestmark = pytest.mark.skipif(not is_available(), reason="this build of torch cannot pack weights")


@pytest.fixture
def loaded() -> None:
    assert kernels.load() is None


# ---- products -----------------------------------------------------------------------------------------------------


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """That ``panel_linear`` takes on this processor."""
    weight = torch.randn(outputs, inputs).to(dtype)
    if not kernels.multiplies(weight):
        assert dtype == torch.bfloat16, "every processor multiplies in float32"
        pytest.skip("this processor has no products in bfloat16")
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 2), (64, 34), (96, 576)])
def test_products_are_what_they_should_be_and_each_row_is_as_if_it_were_alone(
    loaded: None, dtype: torch.dtype, has_bias: bool, rows: int, outputs: int, inputs: int
) -> None:
    weight = weight_of(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    x = torch.randn(rows, inputs).to(dtype)
    found = kernels.panel_linear(x, kernels.panels_of(weight), bias)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((found.double() - expected).abs().max()) < limit * float(expected.abs().max())
    alone = [kernels.panel_linear(row, kernels.panels_of(weight), bias) for row in x]
    assert torch.equal(found, torch.stack(alone))


def test_products_take_any_shape_and_layout_of_rows(loaded: None) -> None:
    weight = weight_of(32, 6, torch.float32)
    x = torch.randn(6, 3, 5)
    expected = torch.nn.functional.linear(x.permute(2, 1, 0), weight)
    torch.testing.assert_close(kernels.panel_linear(x.permute(2, 1, 0), kernels.panels_of(weight)), expected)
    assert kernels.panel_linear(torch.randn(0, 6), kernels.panels_of(weight)).shape == (0, 32)


def test_weights_that_fit_no_panels_stay_with_torch(loaded: None) -> None:
    for weight in (torch.randn(33, 4), torch.randn(32, 5), torch.randn(32, 4).double()):
        assert not kernels.multiplies(weight)
    linear = torch.nn.Linear(5, 33)
    product, x = PackedProduct([linear]), torch.randn(3, 5)
    with torch.no_grad():
        torch.testing.assert_close(product(x), linear(x))
    assert product.operands()[0].is_mkldnn


def test_wrong_operands_of_products_are_refused(loaded: None) -> None:
    panels = kernels.panels_of(weight_of(32, 6, torch.float32))
    refused: list[Callable[[], Any]] = [
        lambda: kernels.panel_linear(torch.randn(2, 5), panels),
        lambda: kernels.panel_linear(torch.randn(2, 0), panels[:, :0]),
        lambda: kernels.panel_linear(torch.randn(2, 6).double(), panels),
        lambda: kernels.panel_linear(torch.randn(2, 6), panels, torch.randn(31)),
        lambda: kernels.panel_linear(torch.randn(2, 6), panels, torch.randn(32).double()),
        lambda: kernels.panel_linear(torch.randn(2, 6), panels[:31]),
        lambda: kernels.panel_linear(torch.randn(2, 6), panels[:, ::2]),
    ]
    for each in refused:
        with pytest.raises(RuntimeError, match="mtp::panel_linear: found rows"):
            each()


def test_packed_layers_use_them_once_they_are_loaded(loaded: None) -> None:
    linears = [torch.nn.Linear(8, 48), torch.nn.Linear(8, 16, bias=False)]
    product, x = PackedProduct(linears), torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        torch.testing.assert_close(product(x), expected)
        assert not product.operands()[0].is_mkldnn
        linears[1].weight.data += 1  # behind autograd's back
        product.refresh()
        torch.testing.assert_close(product(x), torch.cat([linear(x) for linear in linears], dim=-1))


# ---- attention ----------------------------------------------------------------------------------------------------


def drawn(heads: int, kv_heads: int, length: int, keys: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as models have them (views of other layouts), and a mask ``[2, T, S]``."""
    query = torch.randn(2, length, heads, dim).to(dtype).transpose(1, 2)
    key, value = (torch.randn(2, kv_heads, keys + 9, dim).to(dtype).narrow(2, 0, keys) for _ in range(2))
    mask = torch.rand(2, length, keys) < 0.7
    mask[..., -1] = True
    return query, key, value, mask


def by_definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * scaling).masked_fill(~mask[:, None], float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 24, 64, 80, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 33), (2, 64), (3, 5), (7, 100), (13, 31), (32, 130)])
def test_it_gives_what_the_definition_says(
    loaded: None, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, length: int, keys: int
) -> None:
    query, key, value, mask = drawn(heads, kv_heads, length, keys, dim, dtype)
    expected = by_definition(query, key, value, mask, 0.3)
    for groups in (1, heads // kv_heads):  # the mask once for all heads that share a key, or once for each
        found = kernels.attend_few(query, key, value, mask_bias(mask, groups, dtype), 0.3)
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(
            found.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2 * float(value.abs().max())
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same(loaded: None, threads: int) -> None:
    query, key, value, mask = drawn(9, 3, 6, 50, 64, torch.float32)
    expected = kernels.attend_few(query, key, value, mask_bias(mask, 1, torch.float32), 0.3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = kernels.attend_few(query, key, value, mask_bias(mask, 1, torch.float32), 0.3)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gets_zeros_and_large_scores_do_not_overflow(loaded: None) -> None:
    query, key, value, mask = drawn(2, 1, 3, 40, 32, torch.float32)
    mask[0, 1] = False
    found = kernels.attend_few(1e4 * query, key, value, mask_bias(mask, 1, torch.float32), 1.0)
    assert found.isfinite().all()
    assert not found[0, 1].any()


def test_what_it_cannot_read_is_refused(loaded: None) -> None:
    query, key, value, mask = drawn(4, 2, 3, 10, 16, torch.float32)
    bias = mask_bias(mask, 1, torch.float32)
    call = kernels.attend_few
    refused: list[Callable[[], Any]] = [
        lambda: call(query.double(), key.double(), value.double(), bias.double(), 1.0),
        lambda: call(query, key, value, bias.bfloat16(), 1.0),
        lambda: call(query, key, value, bias[..., 1:], 1.0),
        lambda: call(query, key[..., :8], value, bias, 1.0),
        lambda: call(query, key[:1], value, bias, 1.0),
        lambda: call(query[:, :3], key, value, bias, 1.0),
        lambda: call(query, key, value, bias[:, :, :2], 1.0),
        lambda: call(query, key, value, bias.repeat(1, 4, 1, 1), 1.0),
    ]
    for each in refused:
        with pytest.raises(RuntimeError, match="mtp::attend_few: found query"):
            each()


def test_gradients_flow_as_without_it(loaded: None) -> None:
    query, key, value, mask = drawn(4, 2, 3, 10, 16, torch.float32)
    query.requires_grad_(True)
    attend(query, key, value, mask_bias(mask, 2, torch.float32), 1.0).sum().backward()
    assert query.grad is not None
    assert query.grad.any()


# ---- both, in compiled layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_layers_of_every_architecture_generate_the_same_text_with_it(
    architecture: str, graphs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of rows of different lengths and single rows, trees and plain rounds, filled up and not."""
    lm = tiny_model(architecture)
    for batch in (1, 3):
        inputs = padded(FOUR[:batch])
        truth = lm.generate(**inputs, max_new_tokens=16, do_sample=False)
        answers = truth[:, inputs["input_ids"].shape[1] :].tolist()
        model = SpeculativeModel(Target(lm), OracleDrafter(answers, lengths=(3, 0, 5), clutter=4))
        model.compile(progress=False)
        assert kernels.is_loaded()
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), truth)


def test_layers_attend_without_the_interpreter(graphs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_model()
    model = SpeculativeModel.from_target(lm, "ngram")
    model.compile(progress=False)
    asked: list[int] = []
    through = layer_graph.tree_attention

    def counted(module: Any, query: Tensor, *rest: Any) -> Any:
        asked.append(query.shape[2])
        return through(module, query, *rest)

    monkeypatch.setattr(layer_graph, "tree_attention", counted)
    inputs = padded(random_prompts([39]))
    truth = lm.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), truth)
    assert set(asked) == {39}  # the prompt, and nothing behind it


def test_where_it_cannot_be_compiled_a_line_says_so_and_the_text_is_the_same(
    graphs: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no compiler is to be found\nand much else")

    monkeypatch.setattr(kernels, "_load", fail)
    lm = tiny_model()
    inputs = padded(FOUR)
    truth = lm.generate(**inputs, max_new_tokens=12, do_sample=False)
    model = SpeculativeModel.from_target(lm, "ngram")
    with caplog.at_level(logging.WARNING):
        assert model.compile(progress=False).compiled == len(model.target.layers)
        tiny_target().compile(progress=False)
    assert not kernels.is_loaded()
    lines = [r.getMessage() for r in caplog.records if "left to torch" in r.getMessage()]
    assert lines == ["products and attention are left to torch: RuntimeError: no compiler is to be found"]
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), truth)


@pytest.mark.parametrize("name", ["attend_few", "panel_linear"])
def test_what_gives_something_else_than_torch_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *args: right(*args) + 0.5)
    assert kernels.load() == "they compute something else than torch does"
    assert not kernels.is_loaded()


@pytest.mark.parametrize("setting", ["autocast", "matmul precision", "default device"])
def test_settings_of_the_callers_do_not_make_them_look_wrong(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = torch.get_float32_matmul_precision()
    device = torch.device("meta") if setting == "default device" else nullcontext()
    with torch.autocast("cpu", enabled=setting == "autocast"), device:
        torch.set_float32_matmul_precision("medium" if setting == "matmul precision" else precision)
        try:
            assert kernels.load() is None
        finally:
            torch.set_float32_matmul_precision(precision)


def test_what_is_kept_is_loaded_without_a_compiler(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_outcome", [])
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: pytest.fail("a compiler was asked for"))
    assert kernels.load() is None


def test_a_spoilt_file_is_told_from_a_whole_one(loaded: None, tmp_path: Path) -> None:
    kept = kernels.kept_at(kernels.SOURCES[0])
    for path in (kept, kept.with_suffix(".sha256")):
        shutil.copy(path, tmp_path)
    copied = tmp_path / kept.name
    assert kernels._is_whole(copied)
    copied.write_bytes(copied.read_bytes()[:-1])
    assert not kernels._is_whole(copied)
    assert not kernels._is_whole(tmp_path / "none.so")


def test_other_kernels_than_those_of_this_process_are_not_loaded_beside_them(
    loaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Operators that are defined twice end a process."""
    monkeypatch.setattr(kernels, "_outcome", [])
    monkeypatch.setattr(kernels, "kept_at", lambda source: tmp_path / source.stem)
    assert kernels.load() == "other kernels were loaded before, and a process keeps those"


def test_what_cannot_be_opened_is_made_again_and_nothing_else(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been opened may not be made again: opened twice, it would end the process."""
    monkeypatch.setattr(kernels, "_outcome", [])
    through, made = torch.ops.load_library, []

    def open_library(path: str) -> None:
        if Path(path).stem == "attention" and not any(made):
            raise OSError("it wants another libc")
        through(path)

    monkeypatch.setattr(torch.ops, "load_library", open_library)
    monkeypatch.setattr(kernels, "_compile", made.append)
    assert kernels.load() is None
    attention = kernels.SOURCES[1]
    assert made == [[], [(attention, kernels.kept_at(attention))]]


def test_halves_are_left_to_tiles_where_there_are_some(loaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(32, 8, torch.bfloat16)
    monkeypatch.setattr(kernels, "processor", lambda: ["amx_bf16"])
    assert not kernels.multiplies(weight)
    assert kernels.multiplies(weight.float())


def test_graphs_know_the_shapes_of_what_they_give(loaded: None) -> None:
    query, key, value, mask = drawn(4, 2, 3, 10, 16, torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(x) for x in (query, key, value, mask_bias(mask, 1, torch.float32))]
        assert kernels.attend_few(*fake, 0.3).shape == (2, 3, 4, 16)
        assert kernels.panel_linear(fake[0], mode.from_tensor(torch.zeros(32, 16))).shape == (2, 4, 3, 32)


def test_a_pass_that_goes_wrong_leaves_nothing_of_itself_behind(graphs: list[str]) -> None:
    target = tiny_target()
    target.compile(progress=False)
    assert target._compiled is not None
    function = target._compiled._functions[0]

    def fail(inputs: Any) -> Any:
        raise MemoryError

    whole, function._native = function._native, fail
    ids = torch.tensor([[1, 2, 3]])
    cache = target.new_cache(1, 16)
    with pytest.raises(MemoryError):
        target.forward(ids, cache, AttentionPass.over_chain(3, cache.lengths, 0))
    assert function._site.mask is None
    assert function._site.cache is None
    function._native = whole
    found = target.forward(ids, target.new_cache(1, 16), AttentionPass.over_chain(3, cache.lengths, 0)).logits
    torch.testing.assert_close(found, target.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_folders_may_have_spaces_in_their_names(tmp_path: Path) -> None:
    code = "from mtp import kernels; print(kernels.load()); print(*kernels.signature()[1:])"
    environment = {**os.environ, "MTP_CACHE": str(tmp_path / "my cache")}
    for _ in range(2):  # compiled, and from what was kept
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[0] == "None"
    assert len(list((tmp_path / "my cache/compiled").glob("*.so"))) == len(kernels.SOURCES)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_every_layer_counts_once_as_one_that_attended(architecture: str, graphs: list[str]) -> None:
    target = tiny_target(architecture)
    assert target.compile(progress=False).compiled == target.num_layers
    cache = target.new_cache(1, 16)
    target.forward(torch.tensor([[1, 2, 3]]), cache, AttentionPass.over_chain(3, cache.lengths, 0))
    cache.commit(None, torch.tensor([3]), 3)
    tree = TokenTree.from_parents(torch.tensor([[4, 5, 6]]), torch.tensor([[-1, 0, 0]]))
    attention = AttentionPass.over_tree(tree, cache.lengths, cache.start)
    target.forward(tree.tokens, cache, attention)
    assert attention.calls == target.num_layers


def test_they_are_kept_for_the_processor_and_the_versions_that_they_were_made_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    here = [kernels.kept_at(source) for source in kernels.SOURCES]
    assert len(set(here)) == len(here)
    assert here == [kernels.kept_at(source) for source in kernels.SOURCES]
    monkeypatch.setattr(kernels, "processor", lambda: ["another"])
    assert not set(here) & {kernels.kept_at(source) for source in kernels.SOURCES}
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert not set(here) & {kernels.kept_at(source) for source in kernels.SOURCES}
