"""A model made of some layers of another."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mtp.anatomy import find_decoder, text_config
from mtp.offload import is_offloaded
from mtp.support import UnsupportedTargetError


def keep_layers(lm: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A causal LM of the same class with only these of ``lm``'s decoder layers, in their order.

    All its weights are ``lm``'s own tensors: embeddings, norms and output matrix as well as the layers.  Its config
    says what it is, so that it can be saved and loaded like any other.

    Raises:
        UnsupportedTargetError: if there are no such layers, if a layer would be another one at its new place (some
            architectures treat the first or every other layer differently), or if the weights are not at hand as plain
            tensors.
    """
    name, count = type(lm).__name__, text_config(lm.config).num_hidden_layers
    if not layers or list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] < count:
        raise UnsupportedTargetError(
            f"Found layers {tuple(layers)}; expected some of 0 to {count - 1} of {name}, in rising order."
        )
    _, stack = find_decoder(lm, count)
    if getattr(lm.config, "quantization_config", None) is not None or any(map(is_offloaded, lm.parameters())):
        raise UnsupportedTargetError(
            f"The weights of this {name} are quantised or offloaded, and no model can be made of some of them. "
            "Load it in plain precision, or let it draft for itself: drafter=mtp.EarlyExit(skip)."
        )
    prefix = next(path for path, module in lm.named_modules() if module is stack)
    try:
        with torch.device("meta"):  # no memory: every tensor is replaced below
            model = type(lm)(_config_of(lm.config, layers, count))
    except ValueError as error:  # Gemma 4: later layers need the keys and values of one that does not stay
        raise UnsupportedTargetError(f"{name} cannot be made of layers {tuple(layers)}: {error}") from error
    _, kept = find_decoder(model, len(layers))
    _refuse_other_layers(name, [stack[at] for at in layers], list(kept))
    moved = {f"{prefix}.{at}.": f"{prefix}.{layer}." for at, layer in enumerate(layers)}
    weights, buffers = lm.state_dict(), dict(lm.named_buffers())
    try:
        model.load_state_dict({key: weights[_origin(key, moved)] for key in model.state_dict()}, assign=True)
    except (KeyError, RuntimeError) as error:  # layers that are built differently at their new place
        raise UnsupportedTargetError(f"{name} cannot be made of layers {tuple(layers)}: {error}") from error
    for path, owner, leaf in _buffers(model):  # those that no state dict holds, such as rotary frequencies
        owner._buffers[leaf] = buffers[_origin(path, moved)]
    model.tie_weights()
    model.generation_config = copy.deepcopy(lm.generation_config)
    return model.eval()


def _config_of(config: Any, layers: Sequence[int], count: int) -> Any:
    """The config of the smaller model: what it lists by layer (kinds of attention, say) is cut likewise."""
    config = copy.deepcopy(config)
    text = text_config(config)
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, type(value)(value[at] for at in layers))
    text.num_hidden_layers = len(layers)
    return config


def _refuse_other_layers(name: str, theirs: Sequence[nn.Module], ours: Sequence[nn.Module]) -> None:
    """Raise unless each layer is at its new place what it was at its old one."""
    for at, (their_layer, our_layer) in enumerate(zip(theirs, ours, strict=True)):
        if (different := sorted(_traits(their_layer) ^ _traits(our_layer))) != []:
            raise UnsupportedTargetError(
                f"{name} would build layer {at} of the smaller model in another way than the layer that belongs there "
                f"({different[0][0]}). Keep other layers: the first ones, or the same kinds in the same order."
            )


def _traits(layer: nn.Module) -> set[tuple[str, str]]:
    """Shapes and plain settings of a layer's modules, but for its number."""
    shapes = {(path, str(tuple(weight.shape))) for path, weight in layer.named_parameters()}
    settings = {
        (f"{path}.{name}".lstrip("."), repr(value))
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None)
        and not name.startswith("_")
        and name not in ("layer_idx", "layer_id", "training")
    }
    return shapes | settings


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Path, owner and name of every buffer that is not there yet."""
    for path, module in list(model.named_modules()):
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device.type == "meta":
                yield f"{path}.{name}".lstrip("."), module, name


def _origin(path: str, moved: dict[str, str]) -> str:
    """The path of a tensor in the model that it comes from."""
    return next((old + path.removeprefix(new) for new, old in moved.items() if path.startswith(new)), path)
