"""Native functions of decoder layers and of parts of drafters: what they depend on, and how they are made and kept.

A function is kept under a name made of everything its code depends on: the module's own code and settings, the shapes
of its weights, how it is called, the libraries and the processor.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mtp import kernels, layer_graph
from mtp.errors import first_line
from mtp.files import cache_folder
from mtp.layer_call import LayerCall, LayerGraphError

logger = logging.getLogger(__name__)

FORMAT = 3
SUFFIX = ".pt2"
PLAIN = (bool, int, float, str, type(None))
# Every module has these.  And a layer's number is not in the graph: only the cache goes by it.
NO_SETTINGS = frozenset({*vars(nn.Module()), "layer_idx"})

Native = Callable[[list[Tensor]], list[Tensor]]


def structure(layer: nn.Module, call: LayerCall) -> str:
    """Everything that a layer's graph depends on: two layers of the same structure share it."""
    modules = [
        [name, f"{type(module).__module__}.{type(module).__qualname__}", settings_of(module)]
        for name, module in layer.named_modules()
    ]
    names = {id(module): name for name, module in layer.named_modules()}
    groups = [[names[id(linear)] for linear in group] for group in call.groups]
    inputs = [[str(tensor.dtype), list(tensor.shape)] for tensor in call.inputs]
    places = [repr(place) for place in (*call.tensors, call.mask, call.cache)]
    rest = [(key, value) for key, value in (*enumerate(call.args), *call.kwargs.items()) if isinstance(value, PLAIN)]
    configs = list(map(config_settings, configs_of(layer)))
    return json.dumps([modules, shapes(layer), configs, groups, inputs, places, rest], sort_keys=True)


def shapes(layer: nn.Module) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str, str]]:
    """Of all weights, by name: a native function takes them for what they were, and looks at none of this."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return [(name, tuple(t.shape), t.stride(), str(t.dtype), str(t.device)) for name, t in tensors]


def made_of(module: nn.Module) -> Any:
    """What may not change below ``module`` for a native function to stand for it, beside the weights' values."""
    return [(id(part), type(part), settings_of(part)) for part in list(module.modules())[1:]], shapes(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody listens below ``module``, or has replaced a ``forward``: a native function calls neither."""
    parts = list(module.modules())[1:]
    return any(part._forward_hooks or part._forward_pre_hooks or "forward" in part.__dict__ for part in parts)


def configs_of(layer: nn.Module) -> list[Any]:
    """The configs that a layer's code may read while it runs, each once."""
    return list({id(m.config): m.config for m in layer.modules() if hasattr(m, "config")}.values())


def settings_of(owner: Any) -> dict[str, Any]:
    """The attributes of a module or a config that its code may branch on, as plain values."""
    return {name: _plain(value) for name, value in vars(owner).items() if name not in NO_SETTINGS}


def config_settings(config: Any) -> dict[str, Any]:
    """Those of a config that say something of the model: names with an underscore are where it comes from, and how it
    attends, which is different during our passes."""
    return {name: value for name, value in settings_of(config).items() if not name.startswith("_")}


def _plain(value: Any) -> Any:
    """A value that can be compared and written down; of what has no such form (a function, an object) its name."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def artefact(key: str, module: nn.Module) -> Path:
    """Where a module of this structure is kept, by everything that its code depends on."""
    sources = sorted(
        {
            layer_graph.__name__,
            "mtp.compiled_part",
            *(base.__module__ for part in module.modules() for base in _mtp(part)),
        }
    )
    what = [
        FORMAT,
        key,
        torch.__version__,
        transformers.__version__,
        torch.backends.cpu.get_cpu_capability(),
        kernels.processor(),
        kernels.signature(),
        torch.get_num_threads(),
        *(hashlib.sha256(inspect.getsource(sys.modules[name]).encode()).hexdigest() for name in sources),
    ]
    return cache_folder() / "compiled" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}{SUFFIX}"


def native_function(
    key: str, module: nn.Module, traced: Callable[[], torch.export.ExportedProgram]
) -> Native | LayerGraphError:
    """The function for modules of this structure, or why there is none.

    Args:
        key: everything that its graph depends on, beside the code of ``module`` and of what is in it.
        traced: makes the graph, where it is not kept yet.
    """
    try:
        path = artefact(key, module)
        if not _is_whole(path):
            _compile(path, traced)
        return torch._inductor.aoti_load_package(str(path)).loader.boxed_run
    except LayerGraphError as error:
        return error
    except Exception as error:  # compilers fail in many ways, and none of them may stop a generation
        logger.debug("%s cannot be compiled", type(module).__name__, exc_info=True)
        return LayerGraphError(first_line(error))


def _mtp(module: nn.Module) -> list[type]:
    """Classes whose code a module runs: its own, and those of ours that this one is made of."""
    return [base for base in type(module).__mro__ if base is type(module) or base.__module__.startswith("mtp.")]


def _is_whole(path: Path) -> bool:
    """Whether what was kept can be loaded: code of which a part is missing or spoilt would end the process."""
    try:
        with zipfile.ZipFile(path) as package:
            return package.testzip() is None
    except Exception:  # no file, or one that is spoilt in one of many ways
        return False


@cache
def _multiply_natively() -> None:
    """Let compiled code call oneDNN by itself.  Without this it would ask the interpreter for every product.

    torch compiles products with packed weights only where these are constants of the graph, which all layers share.
    """
    try:
        from torch._inductor.ir import TensorBox
        from torch._inductor.lowering import register_lowering
        from torch._inductor.mkldnn_ir import LinearUnary
    except ImportError:  # not part of torch's interface: it may be elsewhere in another version
        logger.debug("products of compiled layers go through the interpreter", exc_info=True)
        return

    @register_lowering(torch.ops.mtp.packed_linear.default, type_promotion_kind=None)
    def lower(x: Any, packed: Any, bias: Any) -> Any:
        return TensorBox.create(LinearUnary.create(x, packed, bias, "none", [], ""))


def _compile(path: Path, traced: Callable[[], torch.export.ExportedProgram]) -> None:
    _multiply_natively()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        staged = str(Path(folder) / path.name)
        torch._inductor.aoti_compile_and_package(traced(), package_path=staged)
        os.replace(staged, path)
