"""Settings for all tests: offline, deterministic, one thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from hypothesis import HealthCheck, settings

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


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds for each architecture; tests of it ask for it."""
    monkeypatch.setattr("serve.loading.COMPILE", False)
