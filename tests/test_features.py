"""Hidden states for training: the precision they are computed in, and the cache they are kept in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import random_prompts, tiny_head, tiny_model

from mtp.heads import HEADS
from mtp.target import Target
from train.batches import training_batch
from train.config import ConfigError, FeaturesConfig, HeadSection, RunConfig
from train.data import DataError, Row
from train.estimate import estimate_features
from train.feature_cache import CachedFeatures, folder_bytes, make_room
from train.features import OnlineFeatures, resolve_dtype
from train.quantise import dequantise, quantise, unit_of
from train.sources import plan_sources, prompt_window


def target_in(dtype: torch.dtype) -> Target:
    return Target(tiny_model("llama").to(dtype))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_float32_target_computes_in_every_precision(name: str) -> None:
    target = target_in(torch.float32)
    dtype = resolve_dtype(name, target)
    assert dtype == getattr(torch, name)
    row = Row(prompt_ids=[3, 5, 7], response_ids=[2, 4])
    exact, states = (OnlineFeatures(target, [row], (1,), kind).batch([0]) for kind in (torch.float32, dtype))
    assert states.hidden.dtype == torch.float32
    assert torch.equal(states.hidden, exact.hidden) == (name == "float32")
    torch.testing.assert_close(states.hidden, exact.hidden, rtol=0.1, atol=0.1)


def test_the_targets_own_precision_may_be_named() -> None:
    assert resolve_dtype("bfloat16", target_in(torch.bfloat16)) == torch.bfloat16
    assert resolve_dtype("auto", target_in(torch.float16)) == torch.float16


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_a_precision_that_a_narrow_target_cannot_give_is_refused(name: str) -> None:
    message = rf"features\.dtype: found {name}, but the target is loaded in bfloat16.*target\.dtype={name}"
    with pytest.raises(ConfigError, match=message):
        resolve_dtype(name, target_in(torch.bfloat16))


PAIRS = [random_prompts([4 + at % 5, 3 + at % 7], seed=at) for at in range(20)]
ROWS = [Row(tuple(prompt), tuple(response)) for prompt, response in PAIRS]


def cache(folder: Path, target: Target | None = None, rows: list[Row] = ROWS, **options: Any) -> CachedFeatures:
    return CachedFeatures(target or target_in(torch.float32), rows, options.pop("taps", (1, 2)), folder, **options)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.feature_cache.ROWS_A_SHARD", 4)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass of the target."""
    seen: list[int] = []
    encode = Target.encode

    def counting(self: Target, ids: torch.Tensor, taps: Any = ()) -> Any:
        seen.append(ids.shape[0])
        return encode(self, ids, taps)

    monkeypatch.setattr(Target, "encode", counting)
    return seen


def shards(source: CachedFeatures) -> list[int]:
    return sorted(int(path.stem) for path in source.folder.glob("*.safetensors"))


@pytest.mark.parametrize(("storage", "tolerance"), [("bfloat16", 1e-2), ("int8", 3e-2)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_gives_what_the_target_computes(
    tmp_path: Path, storage: Any, tolerance: float, window: int | None
) -> None:
    source = cache(tmp_path, storage=storage, prompt_positions=window)
    source.build()
    exact = OnlineFeatures(source.target, ROWS, (1, 2), prompt_positions=window)
    for indices in ([0, 19, 7], [4]):
        found, expected = source.batch(indices), exact.batch(indices)
        assert torch.equal(found.tokens, expected.tokens)
        for ours, theirs in ((found.hidden, expected.hidden), (found.taps, expected.taps)):
            real = expected.valid
            error = (ours[real] - theirs[real]).norm() / theirs[real].norm()
            assert error < tolerance
    written = folder_bytes(source.folder)
    assert source.num_bytes <= written <= source.num_bytes + 6000 * source.num_shards  # names of the entries


def test_a_window_cuts_prompts_and_nothing_else() -> None:
    target = target_in(torch.float32)
    whole, cut = OnlineFeatures(target, ROWS, (1,)), OnlineFeatures(target, ROWS, (1,), prompt_positions=3)
    indices = [2, 9, 17]
    long, short = whole.batch(indices), cut.batch(indices)
    for at, index in enumerate(indices):
        assert cut.response_start(index) == 3
        skipped, count = len(ROWS[index].prompt_ids) - 3, int(short.counts[at])
        assert torch.equal(short.tokens[at, :count], long.tokens[at, skipped : skipped + count])
        assert torch.equal(short.hidden[at, :count], long.hidden[at, skipped : skipped + count])
        assert torch.equal(short.taps[at, :count], long.taps[at, skipped : skipped + count])


def test_an_interrupted_cache_computes_only_the_shards_that_are_missing(tmp_path: Path, passes: list[int]) -> None:
    source = cache(tmp_path)
    source.build()
    assert shards(source) == [0, 1, 2, 3, 4]
    source.shard_path(3).unlink()
    passes.clear()
    source.build()
    assert shards(source) == [0, 1, 2, 3, 4]
    assert sum(passes) == 4


def test_what_is_over_budget_is_evicted_and_computed_when_asked_for(tmp_path: Path, passes: list[int]) -> None:
    source = cache(tmp_path)
    source.build()
    before = source.batch(range(20))
    budget = source.shard_bytes(4) + source.shard_bytes(3) + 1
    source.build(budget)
    assert shards(source) == [3, 4]  # the longest rows
    assert sum(map(source.shard_bytes, shards(source))) <= budget
    passes.clear()
    after = source.batch(range(20))
    assert sum(passes) == 12
    torch.testing.assert_close(after.hidden, before.hidden, atol=2e-2, rtol=1e-2)
    source.build()
    assert shards(source) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "other",
    [
        {"target": Target(tiny_model("llama", seed=3))},
        {"taps": (1, 3)},
        {"rows": [Row((1, *row.prompt_ids), row.response_ids) for row in ROWS]},  # another chat template
        {"rows": ROWS[1:]},
        {"storage": "int8"},
        {"dtype": torch.bfloat16},
        {"prompt_positions": 3},
    ],
)
def test_a_cache_of_something_else_is_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    source = cache(tmp_path)
    source.build()
    stranger = cache(tmp_path, **other)
    assert stranger.folder != source.folder
    source.folder.rename(stranger.folder)
    with pytest.raises(DataError, match=r"holds hidden states of something else \(.*Remove it"):
        stranger.build()


def test_caches_of_others_make_room_when_there_is_a_budget(tmp_path: Path) -> None:
    old, new = cache(tmp_path, taps=(1,)), cache(tmp_path)
    old.build()
    make_room(tmp_path, [new], old.num_bytes + new.num_bytes + 10**5)
    assert old.folder.exists()
    make_room(tmp_path, [new], new.num_bytes)
    assert not old.folder.exists()


def test_the_estimate_counts_what_is_missing_and_what_is_computed_in_each_pass(tmp_path: Path) -> None:
    source = cache(tmp_path)
    whole = estimate_features({source: float("inf")})
    assert (whole.positions, whole.missing, whole.recomputed) == (sum(map(len, ROWS)), sum(map(len, ROWS)), 0)
    assert whole.disk == source.num_bytes
    source.build()
    assert estimate_features({source: float("inf")}).missing == 0
    half = estimate_features({source: source.num_bytes / 2})
    assert 0 < half.disk <= source.num_bytes / 2
    assert "features.budget_gb" in half.sentence()
    assert half.recomputed > 0
    online = estimate_features({OnlineFeatures(source.target, ROWS, ()): 0.0})
    assert "nothing on disk" in online.sentence()


def test_a_cache_larger_than_the_disk_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[int]
) -> None:
    source = cache(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=source.num_bytes))
    with pytest.raises(DataError, match=r"needs 0.00 GB more.*features\.budget_gb="):
        estimate_features({source: float("inf")})
    assert passes == []


def test_the_time_is_estimated_from_a_timed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.estimate.FEWEST", 0)
    estimate = estimate_features({OnlineFeatures(target_in(torch.float32), ROWS, ()): 0.0})
    assert estimate.rate > 0
    assert "positions/s" in estimate.sentence()


@pytest.mark.parametrize(
    "section",
    [HeadSection(steps=3, draft_vocab_size=None), HeadSection(steps=3, sizes={"context_vocabulary": False})],
)
def test_heads_that_neither_attend_nor_take_up_the_text_keep_little_of_a_prompt(section: HeadSection) -> None:
    assert prompt_window(RunConfig(head=section), HEADS["medusa"]) == 4
    assert prompt_window(RunConfig(head=section), HEADS["eagle3"]) is None
    assert prompt_window(RunConfig(head=HeadSection(steps=3)), HEADS["medusa"]) is None
    for asked, expected in ((7, 7), ("all", None)):
        config = RunConfig(head=section, features=FeaturesConfig(prompt_positions=asked))
        assert prompt_window(config, HEADS["medusa"]) == expected
    with pytest.raises(ConfigError, match=r"features\.prompt_positions is 2.*at least 4"):
        prompt_window(RunConfig(head=section, features=FeaturesConfig(prompt_positions=2)), HEADS["medusa"])


@pytest.mark.parametrize("family", sorted(name for name, head in HEADS.items() if not head.attends_to_prompt))
def test_heads_that_say_they_do_not_attend_predict_the_same_without_the_prompt(family: str) -> None:
    target = target_in(torch.float32)
    head = tiny_head(family, target)
    sources = [OnlineFeatures(target, ROWS, head.taps, prompt_positions=window) for window in (None, 4)]
    whole, cut = (head.unroll(training_batch(source, [3, 8]), 3) for source in sources)
    for ours, theirs in zip(whole, cut, strict=True):
        torch.testing.assert_close(ours.logits, theirs.logits)


def test_eight_bits_keep_small_dimensions_beside_large_ones() -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 32)
    states[:, 3] *= 500
    unit = unit_of(states)
    back = dequantise(*quantise(states, unit), unit)
    error = (back - states).pow(2).mean(0).sqrt() / unit
    assert error.max() < 0.02
    plain = dequantise(*quantise(states, torch.ones(32)), torch.ones(32))
    assert (plain - states)[:, :3].norm() > 10 * (back - states)[:, :3].norm()
    zeros = torch.zeros(2, 4)
    assert torch.equal(dequantise(*quantise(zeros, unit_of(zeros)), unit_of(zeros)), zeros)


def test_held_out_states_come_first_in_a_budget(tmp_path: Path) -> None:
    target = target_in(torch.float32)
    config = RunConfig(features=FeaturesConfig(mode="cached", budget_gb=3e-5), output=str(tmp_path))
    sources = plan_sources(config, target, tiny_head("eagle3", target), ROWS, ROWS[:4])
    assert sources.held_out.num_bytes < 3e4 < sources.train.num_bytes + sources.held_out.num_bytes
    sources.build()
    assert shards(sources.held_out) == [0]
    assert 0 < len(shards(sources.train)) < sources.train.num_shards
