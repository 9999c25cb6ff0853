"""Where a Transformers model keeps its parts, whatever it is wrapped in."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from mtp.support import UnsupportedTargetError


def unwrap_adapter(model: nn.Module) -> Any:
    """The Transformers model inside a PEFT wrapper (whose adapters stay in force); any other model as it is."""
    unwrap: Any = getattr(model, "get_base_model", lambda: model)
    return unwrap()


def text_config(config: PreTrainedConfig) -> Any:
    """The language model's config: that of a text model, or the text part of a multimodal one."""
    return config.get_text_config(decoder=True)


def find_decoder(causal_lm: Any, count: int) -> tuple[Any, nn.ModuleList]:
    """The text decoder below the output matrix, and its ``count`` layers, wherever the architecture keeps them.

    The decoder is the module that holds the list (``layers``, ``h``, ``blocks`` ...) itself.
    """
    for module in causal_lm.get_decoder().modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise UnsupportedTargetError(
        f"{type(causal_lm).__name__} has no list of {count} decoder layers (config.num_hidden_layers); hidden states "
        "cannot be tapped. Please report the architecture."
    )
