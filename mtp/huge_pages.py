"""Large pages of memory for what every pass reads from one end to the other.

A processor reads ahead within a page and looks up every new one; weights of hundreds of megabytes lie on tens of
thousands of pages of 4 KiB.  Linux puts 2 MiB together on request (``madvise(2)``, ``MADV_COLLAPSE`` since 6.1), which
makes products with few rows 7 to 14 % faster (measured on two cores, SmolLM2).  Everywhere else nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

PAGE = 2 * 2**20
HUGE_PAGES, COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of Linux: Python's mmap module lacks the second


@cache
def _madvise() -> Any:
    """The C library's function, or None."""
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is not None:
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def use_huge_pages(address: int, size: int) -> None:
    """Ask for large pages around ``size`` bytes at ``address``.

    A range that is not all in use yet is refused; what comes to lie beside it later asks for both.
    """
    madvise = _madvise()
    if madvise is None:
        return
    begin = address // PAGE * PAGE
    for page in range(begin, address + size, PAGE):
        if madvise(page, PAGE, HUGE_PAGES) == 0:
            madvise(page, PAGE, COLLAPSE)
