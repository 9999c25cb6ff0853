"""MTP modules that targets ship in their checkpoints, under the names that they have there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor

from mtp.support import UnsupportedTargetError
from mtp.target import Target

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class ShippedStyle:
    """How a family of models names the tensors of its module.

    Attributes:
        name: of the models.
        prefix: of all its tensors; ``{layers}`` is the number of the target's layers.
        parts: their names for our ``enorm``, ``hnorm``, ``eh_proj`` and ``norm``.
        layer: where, below the prefix, the decoder layer's tensors are.
        chain_normed: see ``MtpModuleConfig``, and ``hidden_first`` too.
    """

    name: str
    prefix: str
    parts: Mapping[str, str]
    layer: str
    chain_normed: bool
    hidden_first: bool


STYLES = (
    ShippedStyle(
        "DeepSeek-V3 and GLM-4.5",
        "model.layers.{layers}.",
        {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
        layer="",
        chain_normed=False,
        hidden_first=False,
    ),
    ShippedStyle(
        "Qwen3-Next",
        "mtp.",
        {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"},
        layer="layers.0.",
        chain_normed=True,
        hidden_first=False,
    ),
    ShippedStyle(
        "MiMo",
        "model.mtp_layers.0.",
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "eh_proj",
            "final_layernorm": "norm",
        },
        layer="",
        chain_normed=True,
        hidden_first=True,
    ),
)


@dataclass(frozen=True)
class ShippedModule:
    """A module's tensors under our names, and the style that they were found in."""

    style: ShippedStyle
    tensors: dict[str, Tensor]


def checkpoint_folder(target: Target) -> Path:
    """Where the files that ``target`` was loaded from lie on this machine.

    Raises:
        UnsupportedTargetError: if they cannot be found.
    """
    config = target.causal_lm.config
    name, revision = getattr(config, "name_or_path", ""), getattr(config, "_commit_hash", None)
    if name and Path(name).is_dir():
        return Path(name)
    if name and isinstance(found := try_to_load_from_cache(name, "config.json", revision=revision), str):
        return Path(found).parent
    raise UnsupportedTargetError(
        f"The files of the target ({name!r}) are not on this machine, so that no MTP module can be read from them. "
        "Expected a target that was loaded from a folder or from the Hub."
    )


def shipped_module(target: Target, folder: str | Path) -> ShippedModule:
    """The first MTP module in the safetensors files of ``folder``.

    Raises:
        UnsupportedTargetError: if there is none, its weights are quantised, or it brings an embedding or output matrix
            other than the target's.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    for style in STYLES:
        prefix = style.prefix.format(layers=target.num_layers)
        found = _read(files, prefix)
        if any(name.startswith(tuple(f"{part}." for part in style.parts)) for name in found):
            return ShippedModule(style, _renamed(_without_shared(found, target, folder), style))
    expected = "; ".join(f"{style.prefix.format(layers=target.num_layers)}* ({style.name})" for style in STYLES)
    raise UnsupportedTargetError(
        f"No MTP module in {folder}: among the tensors of {len(files)} safetensors files none is called as expected: "
        f"{expected}. Train one: head.family=mtp."
    )


def _read(files: list[Path], prefix: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 - not a dict
            tensors |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    return tensors


def _without_shared(tensors: dict[str, Tensor], target: Target, folder: str | Path) -> dict[str, Tensor]:
    """Leave out copies of the target's embedding and output matrix, which the module uses as they are."""
    shared = {
        "embed_tokens.weight": target.causal_lm.get_input_embeddings().weight,
        "shared_head.head.weight": target.output.weight,
    }
    for name, weight in shared.items():
        if name in tensors and not torch.equal(tensors[name].to(weight), weight):
            raise UnsupportedTargetError(
                f"The MTP module in {folder} brings a {name} of its own, which differs from the target's; expected a "
                "module that shares it. Is the target loaded from this folder?"
            )
    kept = {name: tensor for name, tensor in tensors.items() if name not in shared}
    for name, tensor in kept.items():
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedTargetError(
                f"{name} of the MTP module in {folder} is quantised ({tensor.dtype}); expected bfloat16 or wider. "
                "Convert the checkpoint first."
            )
    return kept


def _renamed(tensors: dict[str, Tensor], style: ShippedStyle) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        part = next((part for part in style.parts if name.startswith(f"{part}.")), None)
        if part is not None:
            renamed[style.parts[part] + name.removeprefix(part)] = tensor
            continue
        name = "layer.block." + name.removeprefix(style.layer)
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            renamed[name] = tensor
    for name, members in experts.items():  # checkpoints hold experts one by one, Transformers 5 all in one tensor
        ordered = [members[index] for index in sorted(members)]
        renamed[f"{name}.gate_up_proj"] = torch.stack([torch.cat([m["gate"], m["up"]]) for m in ordered])
        renamed[f"{name}.down_proj"] = torch.stack([m["down"] for m in ordered])
    return renamed
