"""Recipes: every key and type is checked, and an error names the key and the nearest right one."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from train.config import ConfigError, RunConfig
from train.recipe import load_config

REQUIRED = ["target.path=somewhere", "data.path=elsewhere"]
RECIPES = sorted(Path("configs").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_loads(recipe: Path) -> None:
    assert load_config([str(recipe), *REQUIRED]).target.path == "somewhere"


def test_overrides_win_over_the_file_and_keep_their_types() -> None:
    config = load_config(["configs/smollm2_eagle3.yaml", *REQUIRED, "optim.lr=1e-3", "data.limit=null", "head.steps=2"])
    assert config.optim.lr == 1e-3
    assert config.data.limit is None
    assert config.head.steps == 2


def test_an_unknown_key_is_refused_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key optim\.lrr; did you mean optim\.lr"):
        load_config([*REQUIRED, "optim.lrr=1"])


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown key optimizer; did you mean optim"):
        load_config([*REQUIRED, "optimizer.lr=1"])


@pytest.mark.parametrize("override", ["head.steps=three", "optim.lr=fast", "head.steps=2.5", "data.limit=yes"])
def test_a_wrong_type_is_refused_with_what_was_found_and_expected(override: str) -> None:
    with pytest.raises(ConfigError, match=f"{override.split('=')[0]}: found .*expected"):
        load_config([*REQUIRED, override])


def numbers(schema: type, prefix: str = "") -> Iterator[str]:
    """Every key of the recipe that may be a number."""
    for name, kind in typing.get_type_hints(schema, include_extras=True).items():
        if is_dataclass(kind):
            yield from numbers(kind, f"{prefix}{name}.")
        elif typing.get_origin(kind) is not dict and {int, float} & leaves(kind):
            yield prefix + name


def leaves(kind: Any) -> set[Any]:
    """What a type is made of, literal values left out."""
    parts = () if typing.get_origin(kind) is typing.Literal else typing.get_args(kind)
    return {kind}.union(*map(leaves, parts))


# Checked with the head that it is for, as are the weights of losses (tests/test_fitting.py).
NUMBERS = sorted(set(numbers(RunConfig)) - {"optim.step_weight"})


@pytest.mark.parametrize("value", ["-1", ".nan", "-.inf"])
@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_of_a_recipe_has_a_range(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: found .*expected"):
        load_config([*REQUIRED, f"{key}={value}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("log_every=0", "log_every: found 0, expected 1 or more."),
        ("optim.lr=0", "optim.lr: found 0.0, expected more than 0."),
        ("optim.warmup=1.5", "optim.warmup: found 1.5, expected 0 to 1."),
        ("optim.beta2=1", "optim.beta2: found 1.0, expected 0 to below 1."),
        ("start.traffic_share=0", "start.traffic_share: found 0.0, expected more than 0 to 1."),
        ("optim.seed=4294967296", "optim.seed: found 4294967296, expected 0 to 4294967295."),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_what_it_may_be(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load_config([*REQUIRED, override])


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("features.dtype", "auto or float32 or bfloat16 or float16"),
        ("target.dtype", "auto or float32 or bfloat16 or float16"),
        ("features.mode", "online or cached"),
        ("mixed_precision", "no or bf16 or fp16 or null"),
    ],
)
def test_a_name_that_is_none_of_those_there_are_is_refused_with_all_of_them(key: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: found 'bloat16' \(str\), expected {allowed}\."):
        load_config([*REQUIRED, f"{key}=bloat16"])


def test_a_name_that_is_one_of_those_there_are_is_taken() -> None:
    config = load_config([*REQUIRED, "features.dtype=bfloat16", "features.mode=cached"])
    assert (config.features.dtype, config.features.mode) == ("bfloat16", "cached")


@pytest.mark.parametrize(("text", "value"), [("null", None), ("no", "no"), ("bf16", "bf16")])
def test_mixed_precision_may_be_left_to_accelerate_or_named(text: str, value: str | None) -> None:
    assert load_config([*REQUIRED, f"mixed_precision={text}"]).mixed_precision == value


@pytest.mark.parametrize("override", ["optim.loss={top_k:", "report_to=[wandb", "output='runs"])
def test_a_value_that_is_no_yaml_is_refused_with_its_place(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(override)}, line 1, column \d+: not YAML"):
        load_config([*REQUIRED, override])


def test_a_recipe_that_is_no_yaml_is_refused_with_its_place(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("output: runs\noptim: {lr: 1e-3\n")
    with pytest.raises(ConfigError, match=r"recipe\.yaml, line 3, column 1: not YAML"):
        load_config([str(recipe), *REQUIRED])


def test_a_missing_recipe_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"No recipe at nowhere\.yaml"):
        load_config(["nowhere.yaml"])


def test_a_recipe_without_target_or_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target\.path is empty"):
        load_config(["data.path=x"])
    with pytest.raises(ConfigError, match=r"data\.path is empty"):
        load_config(["target.path=x"])


def test_an_override_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        load_config([*REQUIRED, "optim.lr"])


def test_a_tilde_in_a_recipe_is_the_home_of_who_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    paths = {"data.path": "data", "output": "run", "start.head": "head", "start.traffic": "traffic"}
    config = load_config(["target.path=t", *(f"{key}=~/{name}" for key, name in paths.items())])
    found = (config.data.path, config.output, config.start.head, config.start.traffic)
    assert found == tuple(f"/home/x/{name}" for name in paths.values())
    assert load_config(["target.path=t", "data.path=rows"]).start.head is None
