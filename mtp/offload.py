"""Weights that accelerate keeps on the CPU or on disk between passes.

Such a weight is on the ``meta`` device outside of its module's ``forward``; the module's hook knows where its values
are and where they go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def is_offloaded(weight: Tensor) -> bool:
    """Whether only the shape of ``weight`` is at hand."""
    return weight.device.type == "meta"


def execution_device(module: nn.Module, weight: Tensor) -> torch.device:
    """Where ``module`` computes with its ``weight``."""
    return torch.device(_hook(module).execution_device) if is_offloaded(weight) else weight.device


def stored_weight(module: nn.Module, name: str) -> Tensor:
    """The parameter ``name`` of ``module``, from wherever it is kept."""
    weight: Tensor = getattr(module, name)
    return _hook(module).weights_map[name] if is_offloaded(weight) else weight


def _hook(module: nn.Module) -> Any:
    """The hook that brings a module's weights; it may be one of several."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "weights_map", None) is not None:
            return one
    raise ValueError(
        f"The weights of a {type(module).__name__} are on the meta device and no hook of accelerate knows their "
        "values; load the model with from_pretrained(..., device_map=...)."
    )
