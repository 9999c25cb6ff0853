"""The project's own records agree: versions in pyproject.toml and in the two constraint files."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINTERS = {"ruff", "mypy", "types-pyyaml", "types-tqdm"}  # not run at the lowest versions


def requirements() -> dict[str, Requirement]:
    """What the project and its extras need, by name; ``mtp`` itself is not among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = {canonicalize_name(requirement.name): requirement for requirement in map(Requirement, lines)}
    return {name: requirement for name, requirement in found.items() if name != project["name"]}


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / "scripts" / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lowest_versions_tested_are_the_bounds_that_are_promised() -> None:
    bounds = {name: need.specifier for name, need in requirements().items() if name not in LINTERS}
    assert bounds == {name: SpecifierSet(f">={version}") for name, version in pins("constraints-lowest.txt").items()}


@pytest.mark.parametrize("name", sorted(pins("constraints.txt")))
def test_the_newest_versions_tested_are_allowed(name: str) -> None:
    assert requirements()[name].specifier.contains(pins("constraints.txt")[name])
