"""The one file that knows which version of Transformers calls a thing by which name."""

from __future__ import annotations

import inspect

from torch import nn


def cache_argument(model_class: type[nn.Module]) -> str:
    """The name under which a model's ``forward`` takes its key-value cache.

    Transformers 5.2x renamed ``past_key_values`` to ``cache``; models written outside of it may keep the old name.
    """
    parameters = inspect.signature(model_class.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
