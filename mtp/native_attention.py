"""Attention of a tree's few nodes to a long text, in native code for CPUs.

torch's own kernel is made for many queries: for one node behind 256 tokens, 9 heads over 3, it takes 38 us on two
AVX-512 cores, and this one 14; with the way there and back through the interpreter, of which a compiled layer has none
then, that is an eighth of a whole pass.  ``native_attention.cpp`` is compiled once on a machine, by the compiler that
torch finds for its own generated code, and kept beside the compiled layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp.files import cache_folder

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_suffix(".cpp")
MOST_QUERIES = 32  # of a row: with more, torch's kernel is as fast
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

_lock = threading.Lock()
_outcome: list[str | None] = []  # once tried: why it cannot be used, or None


def is_loaded() -> bool:
    """Whether ``load`` has succeeded."""
    return _outcome == [None]


def load() -> str | None:
    """Compile it, unless it is kept from before, and load it; returns why it cannot be used, None where it can.

    Tried once in a process: later calls return the same.
    """
    with _lock:
        if not _outcome:
            try:
                reason = _load()
            except Exception as error:  # compilers fail in many ways, and none of them may stop a generation
                logger.debug("native attention cannot be used", exc_info=True)
                reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:200]}"
            _outcome.append(reason)
        return _outcome[0]


def _load() -> str | None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # not part of torch's interface: it may be elsewhere

    instructions = pick_vec_isa()
    if not instructions:
        return "this processor has no vector instructions that torch compiles for"
    path = kept_at()
    if not path.exists():
        _compile(path, instructions)
    torch.ops.load_library(str(path))
    return None if all(map(_is_right, DTYPES)) else "it computes something else than torch does"


def kept_at() -> Path:
    """Where it is kept, by everything that its code depends on."""
    what = [SOURCE.read_text(encoding="utf-8"), torch.__version__, torch.backends.cpu.get_cpu_capability(), processor()]
    return cache_folder() / "compiled" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.so"


def processor() -> list[str]:
    """What this very processor can do, all of which compilers use: on another one such code would end the process."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return sorted(name for name, has in known.items() if has is True)


def _compile(path: Path, instructions: Any) -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        options = CppTorchOptions(vec_isa=instructions, include_pytorch=True, warning_all=False)
        builder = CppBuilder(path.stem, [str(SOURCE)], options, folder)
        builder.build()
        os.replace(builder.get_target_file_path(), path)


@torch.no_grad()
def _is_right(dtype: torch.dtype) -> bool:
    """Whether it gives what its definition says, for heads that share keys, a mask, and sizes that fill no vector."""
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, h, t, 64, generator=draws).to(dtype) for h, t in ((6, 5), (2, 37), (2, 37)))
    hidden = torch.rand(2, 1, 5, 37, generator=draws) < 0.3
    hidden[..., 0] = False
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    found = attend_few(query, key, value, bias, 0.1)
    scores = query.float() @ key.float().repeat_interleave(3, 1).transpose(2, 3) * 0.1 + bias.float()
    expected = (scores.softmax(-1) @ value.float().repeat_interleave(3, 1)).transpose(1, 2)
    return bool((found.float() - expected).abs().max() < TOLERANCE[dtype])


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether ``attend_few`` takes ``query [B, Hq, T, D]`` to ``key [B, Hkv, S, D]`` and ``value``."""
    return (
        is_loaded()
        and query.shape[2] <= MOST_QUERIES
        and query.device.type == "cpu"
        and query.dtype in DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[3] == value.shape[3]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and not torch.is_grad_enabled()
    )


def attend_few(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Grouped-query attention.

    Args:
        query: ``[B, Hq, T, D]``; key, value: ``[B, Hkv, S, D]`` with Hkv dividing Hq.
        bias: ``[B, 1, T, S]``, or the same for every group of query heads, ``[B, 1, Hq / Hkv * T, S]``, of their type:
            what is added to scores.

    Returns:
        ``[B, T, Hq, D]``, contiguous.
    """
    attended: Tensor = torch.ops.mtp.attend_few(query, key, value, bias, scaling)
    return attended


def expect(keys: Tensor | None, values: Tensor | None, bias: Tensor | None) -> None:
    """Say what the next ``mtp::attend_cached`` on this thread attends to; with None it asks ``mtp::attend``.

    Args:
        keys, values: ``[B, Hkv, capacity, D]`` the layer's buffers.
        bias: ``[B, 1, T, S]`` over the S slots that hold something once the T of this pass are written.
    """
    torch.ops.mtp.expect(keys, values, bias)
