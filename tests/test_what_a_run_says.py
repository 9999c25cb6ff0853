"""What a training run says, and when: what it will take before it starts, and how far it is on the way."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.workshop import make_workshop, recipe
from train import heads as program
from train.feature_cache import CachedFeatures
from train.features import FeatureSource


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.mark.parametrize("mode", ["online", "cached"])
def test_size_and_time_of_the_hidden_states_are_said_before_any_is_kept(
    mode: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("train.estimate.FEWEST", 0)
    caplog.set_level(logging.INFO)
    said: list[str] = []  # by the time that the first states are kept or trained on

    def watch(owner: type[FeatureSource], name: str) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            if not said:
                said.append(caplog.text)
            return original(*arguments)

        monkeypatch.setattr(owner, name, watched)

    watch(CachedFeatures, "build")
    watch(FeatureSource, "batch")
    program.main(recipe(workshop, tmp_path / "run", "optim.epochs=1", f"features.mode={mode}"))
    size = (
        r"[\d.e-]+ GB on disk, \d+ to compute now" if mode == "cached" else r"nothing on disk, \d+ to compute in each"
    )
    assert re.search(rf"hidden states of \d+ positions: {size}.*, about \d+ s at \d+ positions/s", said[0])


def test_a_bar_shows_rate_and_time_left(workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(recipe(workshop, tmp_path / "run", "optim.epochs=1"))
    bar = capsys.readouterr().err
    assert re.search(r"training: +\d+%.*\d+/\d+ \[\d\d:\d\d<\d\d:\d\d, +[\d.]+step/s, acc=[\d.]+, loss=[\d.]+\]", bar)
