"""Settings for all tests: offline, deterministic, one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn
from torch.utils import _pytree as pytree

from mtp import compiled, compiled_part, kernels
from mtp.layer_call import LayerGraphError

settings.register_profile(
    "mtp", max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("mtp")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _trees_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What pays depends on the machine; tests draft in every round unless they ask for ``nodes="auto"``."""
    monkeypatch.setattr("mtp.model.DEFAULT_NODES", 16)
    monkeypatch.setenv("MTP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the whole run."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch, compiled_once: Path) -> None:
    """Compiling takes seconds for each architecture; tests of it ask for it, and share the kernels."""
    monkeypatch.setattr("serve.loading.COMPILE", False)
    monkeypatch.setattr(kernels, "_outcome", [])
    monkeypatch.setattr(kernels, "kept_at", lambda source: compiled_once / f"{source.stem}.so")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs are run as they were traced, without a compiler; structures are listed as they are traced.

    Passes over less than eight tokens are filled up to eight rows, as they may be where that is measured to be faster.
    """
    traced: list[str] = []

    def native(key: str, module: nn.Module, trace: Callable[[], torch.export.ExportedProgram]) -> Any:
        traced.append(key)
        try:
            graph = trace().module()
        except LayerGraphError as error:
            return error
        except Exception as error:
            return LayerGraphError(f"{type(error).__name__}: {error}")
        return lambda inputs: pytree.tree_leaves(graph(inputs))

    monkeypatch.setattr(compiled, "native_function", native)
    monkeypatch.setattr(compiled_part, "native_function", native)
    monkeypatch.setattr(compiled, "fullest", lambda products: dict.fromkeys(range(1, 8), 8))
    return traced
