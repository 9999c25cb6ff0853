"""An interrupt that waits for the end of a step."""

from __future__ import annotations

import signal
from typing import Any


class Interrupts:
    """Within the block SIGINT and SIGTERM are noted and end nothing; a second SIGINT does.

    Attributes:
        requested: whether one came.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> None:
        def note(number: int, frame: Any) -> None:
            self.requested = True
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
