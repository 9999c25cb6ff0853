"""What is different in a stock model while a pass of ours runs; each is taken back at the end of its block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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


@contextmanager
def output_kept(module: nn.Module, key: int, kept: dict[int, Tensor]) -> Iterator[None]:
    """Inside the block what ``module`` returns, or the first of it, is put into ``kept`` under ``key``."""

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept[key] = output if isinstance(output, Tensor) else output[0]

    handle = module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def stream_into(layer: int, layers: nn.ModuleList, kept: dict[int, Tensor]) -> Iterator[None]:
    """Inside the block the stream that enters ``layer``, or leaves the last one, is put into ``kept`` under ``layer``.

    Raises:
        ValueError: if there is no such layer.
    """
    if not 0 <= layer <= len(layers):
        raise ValueError(f"Layer id {layer} cannot be tapped; this target has layers 0 to {len(layers)}.")
    if layer == len(layers):
        with output_kept(layers[-1], layer, kept):
            yield
        return

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        kept[layer] = args[0] if args else kwargs["hidden_states"]

    handle = layers[layer].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
