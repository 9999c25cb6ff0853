"""How the learning rate changes while a head is trained."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmup_cosine(total: int, warmup: int, floor: float = 0.1) -> Callable[[int], float]:
    """Factor on the peak learning rate at a step: linear warm-up, then a cosine down to ``floor``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        share = min(1.0, (step - warmup) / max(total - warmup, 1))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))

    return factor
