"""What a pass over a tree spends its time on, in native code for CPUs: products and attention with a few rows.

``linear.cpp`` multiplies with weights that lie in panels.  Few rows are a matter of reading weights, once and in one
stream: all products of a pass of SmolLM2-135M over one to eight nodes take 7 ms in bfloat16 and 13 in float32 on two
AVX-512 cores, where oneDNN takes 11 to 13 and 18 to 23; with hundreds of rows both take the same.

``attention.cpp`` attends from a few nodes to a long text.  torch's kernel is made for many queries: for one node behind
256 tokens, 9 heads over 3, it takes 38 us, and this one 14.  In a compiled layer it also writes the cache, so that
nothing there goes through the interpreter.

Both are compiled once on a machine, by the compiler that torch finds for its own generated code, and kept beside the
compiled layers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp.errors import first_line
from mtp.files import cache_folder, whole_file

logger = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("linear.cpp", "attention.cpp")]
MOST_QUERIES = 32  # of a row: with more, torch's attention is as fast
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

_lock = threading.Lock()
_outcome: list[str | None] = []  # once tried: why they cannot be used, or None


def is_loaded() -> bool:
    """Whether ``load`` has succeeded."""
    return _outcome == [None]


def load() -> str | None:
    """Compile them, unless they are kept from before, and load them; returns why they cannot be used, None where they
    can.  Tried once in a process: later calls return the same."""
    with _lock:
        if not _outcome:
            try:
                reason = _load()
            except Exception as error:  # compilers fail in many ways, and none of them may stop a generation
                logger.debug("native code cannot be used", exc_info=True)
                reason = first_line(error)
            _outcome.append(reason)
            if reason is not None:
                logger.warning("products and attention are left to torch: %s", reason)
        return _outcome[0]


def _load() -> str | None:
    paths = [kept_at(source) for source in SOURCES]
    if hasattr(torch.ops.mtp, "panel_linear") and not {str(path) for path in paths} <= torch.ops.loaded_libraries:
        return "other kernels were loaded before, and a process keeps those"  # defined twice, they would end it
    pairs = list(zip(SOURCES, paths, strict=True))
    _compile([each for each in pairs if not _is_whole(each[1])])
    for each in pairs:
        try:
            torch.ops.load_library(str(each[1]))
        except OSError:  # made where other libraries were, say; what has been loaded already must not be made again
            _compile([each])
            torch.ops.load_library(str(each[1]))
    _describe()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if not all(_multiplies(dtype) and _attends(dtype) for dtype in DTYPES):
            return "they compute something else than torch does"
    return None


def _compile(missing: Sequence[tuple[Path, Path]]) -> None:
    """Compile sources into the files beside them.

    Raises:
        Exception: whatever keeps compilers from it.
    """
    if not missing:
        return  # where all is kept, no compiler has to be there
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions  # not part of torch's interface: it may be
    from torch._inductor.cpu_vec_isa import pick_vec_isa  # elsewhere in another version

    instructions = pick_vec_isa()
    if not instructions:
        raise RuntimeError("this processor has no vector instructions that torch compiles for")

    def compile_one(each: tuple[Path, Path]) -> None:
        source, path = each
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # The builder takes no paths with spaces in them, which folders of packages and of caches may have.
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=path.parent) as beside:
            copied = shutil.copy(source, folder)
            options = CppTorchOptions(vec_isa=instructions, include_pytorch=True, warning_all=False)
            builder = CppBuilder(path.stem, [copied], options, folder)
            builder.build()
            made = Path(shutil.copy(builder.get_target_file_path(), beside))
            with whole_file(_checksum(path)) as staged:
                staged.write_text(_digest(made), encoding="utf-8")
            os.replace(made, path)

    with ThreadPoolExecutor(len(missing)) as pool:
        list(pool.map(compile_one, missing))


def _is_whole(path: Path) -> bool:
    """Whether what was kept can be loaded: code of which a part is missing or spoilt would end the process."""
    try:
        return _checksum(path).read_text(encoding="utf-8") == _digest(path)
    except OSError:
        return False


def _checksum(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kept_at(source: Path) -> Path:
    """Where the compiled ``source`` is kept, by everything that its code depends on."""
    what = [source.read_text(encoding="utf-8"), torch.__version__, torch.backends.cpu.get_cpu_capability(), processor()]
    return cache_folder() / "compiled" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.so"


def signature() -> list[Any]:
    """What graphs depend on that were made for these kernels, or for none."""
    if not is_loaded():
        return []
    texts = [path.read_text(encoding="utf-8") for path in (Path(__file__), *SOURCES)]
    made_for = [torch.ops.mtp.panel_width(), torch.ops.mtp.multiplies_bfloat16()]
    return [hashlib.sha256("".join(texts).encode()).hexdigest(), *made_for]


def processor() -> list[str]:
    """What this very processor can do, all of which compilers use: on another one such code would end the process."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return sorted(name for name, has in known.items() if has is True)


@cache
def _describe() -> torch.library.Library:
    """Tell graphs of which shapes results are.  What is registered lasts as long as what is returned."""
    library = torch.library.Library("mtp", "FRAGMENT")
    library.impl("panel_linear", lambda x, panels, bias: x.new_empty(*x.shape[:-1], panels.shape[0]), "Meta")

    def attended(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    for name in ("attend_cached", "attend_few"):
        library.impl(name, attended, "Meta")
    return library


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether products are what they should be, for rows that fill no block, with biases and without."""
    weight, x, bias = (_drawn(*size).to(dtype) for size in ((64, 48), (3, 7, 48), (64,)))
    if not _fits_panels(weight):
        return dtype == torch.bfloat16  # which not every processor multiplies
    for added in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        off = (panel_linear(x, panels_of(weight), added).double() - expected).abs().max()
        if not off < TOLERANCE[dtype] * expected.abs().max():
            return False
    return True


def _attends(dtype: torch.dtype) -> bool:
    """Whether attention is what it should be, for heads that share keys, a mask, and sizes that fill no vector."""
    query, key, value = (_drawn(2, h, t, 64).to(dtype) for h, t in ((6, 5), (2, 37), (2, 38)))
    value = value[:, :, 1:]
    hidden = _drawn(2, 1, 5, 37) < -0.5
    hidden[..., 0] = False
    bias = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, float("-inf"))
    found = attend_few(query, key, value, bias, 0.1)
    # In double precision, in which no setting of the caller's makes products less exact.
    scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(2, 3) * 0.1 + bias.double()
    expected = (scores.softmax(-1) @ value.double().repeat_interleave(3, 1)).transpose(1, 2)
    return bool((found.double() - expected).abs().max() < TOLERANCE[dtype])


def _drawn(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator("cpu").manual_seed(sum(size)), device="cpu")


# ---- products -----------------------------------------------------------------------------------------------------


def multiplies(weight: Tensor) -> bool:
    """Whether ``weight [out, in]`` is to lie in panels: ``panel_linear`` is there, and takes its type and sizes."""
    return is_loaded() and _fits_panels(weight)


def _fits_panels(weight: Tensor) -> bool:
    outputs, inputs = weight.shape
    if not (outputs and inputs) or outputs % torch.ops.mtp.panel_width() or inputs % 2:
        return False
    if weight.dtype == torch.bfloat16:  # oneDNN has tiles for it on processors with AMX, which read prompts faster
        return torch.ops.mtp.multiplies_bfloat16() and "amx_bf16" not in processor()
    return weight.dtype == torch.float32


def panels_of(weight: Tensor) -> Tensor:
    """``[out, in]`` the same numbers in the order in which ``panel_linear`` reads them."""
    outputs, inputs = weight.shape
    width = torch.ops.mtp.panel_width()
    if weight.dtype == torch.bfloat16:  # two inputs at a time, which one instruction multiplies and adds
        ordered = weight.reshape(outputs // width, width, inputs // 2, 2).permute(0, 2, 1, 3)
    else:
        ordered = weight.reshape(outputs // width, width, inputs).permute(0, 2, 1)
    return ordered.reshape(outputs, inputs).contiguous()


def panel_linear(x: Tensor, panels: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in] -> [..., out]``.  A row's results do not depend on what other rows there are, to the last bit."""
    product: Tensor = torch.ops.mtp.panel_linear(x, panels, bias)
    return product


# ---- attention ----------------------------------------------------------------------------------------------------


def attends(query: Tensor, key: Tensor, value: Tensor) -> bool:
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
