"""What is different in a stock model while a pass of ours runs; each is taken back at the end of its block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def attention_implementation(configs: list[Any], name: str) -> Iterator[None]:
    """Within the block, modules with these configs attend through the function registered under ``name``."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside the block; a model in training mode is afterwards as it was, module by module."""
    if not model.training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def without_layers(layers: Sequence[nn.Module], as_tuple: bool) -> Iterator[None]:
    """Inside the block these layers hand on what they are given.  They stay in their list, which models count.

    Args:
        as_tuple: layers of this architecture return their hidden states as the first of several things.
    """

    def hand_on(*args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states,) if as_tuple else states

    before = [layer.__dict__.get("forward") for layer in layers]  # a hook of accelerate's, where there is one
    for layer in layers:
        layer.__dict__["forward"] = hand_on
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward
