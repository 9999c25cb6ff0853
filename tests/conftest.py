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
