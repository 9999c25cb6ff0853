"""Where a run's hidden states come from, what they will take, and how much of each prompt a head is shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtp.heads import Head
from mtp.heads.extending import ExtendingHead
from mtp.target import Target
from train.config import ConfigError, RunConfig
from train.data import Row
from train.estimate import FeatureEstimate, estimate_features
from train.feature_cache import CachedFeatures, make_room
from train.features import FeatureSource, OnlineFeatures, resolve_dtype
from train.joint import UnadaptedFeatures


@dataclass(frozen=True)
class Sources:
    """States of the training and the held-out rows.

    Attributes:
        train: of the training rows.
        held_out: of the rows for evaluation.
        root: folder of caches.
        budget: bytes that the caches may take together.
    """

    train: FeatureSource
    held_out: FeatureSource
    root: Path
    budget: float

    def budgets(self) -> dict[FeatureSource, float]:
        """What each may take.  Held-out states are few and read at every evaluation: they come first."""
        spent = 0
        if isinstance(self.held_out, CachedFeatures):
            spent = sum(map(self.held_out.shard_bytes, self.held_out.within(self.budget)))
        return {self.train: self.budget - spent, self.held_out: self.budget}

    def estimate(self, processes: int = 1) -> FeatureEstimate:
        """What they will take; nothing is computed but a pass to take the time of.

        Raises:
            DataError: if a cache does not fit on the disk.
        """
        return estimate_features(self.budgets(), processes)

    def make_room(self) -> None:
        """Remove other caches as far as the budget demands; for one process."""
        caches = [source for source in (self.train, self.held_out) if isinstance(source, CachedFeatures)]
        if caches and self.budget < float("inf"):
            make_room(self.root, caches, self.budget)

    def build(self, part: int = 0, parts: int = 1) -> None:
        """Compute what is to be cached and is not there; of ``parts`` processes, the share of process ``part``."""
        for source, budget in self.budgets().items():
            if isinstance(source, CachedFeatures):
                source.build(budget, part, parts)


def plan_sources(config: RunConfig, target: Target, head: Head, train: list[Row], held_out: list[Row]) -> Sources:
    """The sources that a recipe asks for; nothing is computed yet.

    Raises:
        ConfigError: for a precision, a budget or a window that cannot be had.
    """
    features = config.features
    dtype = resolve_dtype(features.dtype, target)
    window = prompt_window(config, type(head))
    root = Path(features.folder or Path(config.output) / "features").expanduser()
    budget = float("inf") if features.budget_gb is None else features.budget_gb * 1e9

    def source(rows: list[Row], online: type[OnlineFeatures] = OnlineFeatures) -> FeatureSource:
        if features.mode == "online":
            return online(target, rows, head.taps, dtype, window)
        return CachedFeatures(target, rows, head.taps, root, dtype, window, features.storage)

    own = UnadaptedFeatures if config.target.adapter.rank > 0 else OnlineFeatures
    return Sources(source(train, own), source(held_out), root, budget)


def prompt_window(config: RunConfig, head: type[Head]) -> int | None:
    """How many positions of each prompt the head is shown; None for all.

    Raises:
        ConfigError: for a window from which the answer's first tokens cannot be guessed.
    """
    wanted = config.features.prompt_positions
    needed = config.head.steps + 1  # step s guesses a token from the position s + 2 before it
    if wanted == "auto":
        # A target that is trained along reads the rows itself, and its answers depend on the whole prompt.
        whole = head.attends_to_prompt or takes_up_text(config, head) or config.target.adapter.rank > 0
        return None if whole else needed
    if wanted == "all":
        return None
    if wanted < needed:
        raise ConfigError(
            f"features.prompt_positions is {wanted}; with head.steps={config.head.steps} the first tokens of an answer "
            f"are guessed from {needed} positions before it. Expected at least {needed}, auto or all."
        )
    return wanted


def takes_up_text(config: RunConfig, head: type[Head]) -> bool:
    """Whether the head is to guess tokens of the text too, those of the prompt among them."""
    asked = bool(config.head.sizes.get("context_vocabulary", True))
    return asked and issubclass(head, ExtendingHead) and config.head.draft_vocab_size is not None
