"""The augmented checkpoint: a folder with the head, what it belongs to, and what it was measured to do.

config.json          the head's family and sizes; the target's name, revision and fingerprint; format version
heads.safetensors    the head's weights, the draft vocabulary among them
acceptance.json      what was measured, on what
README.md            a model card written from those numbers
adapter/             a target's PEFT adapter, where it has one: what the heads belong to is the target with it
tokenizer, generation config; with ``bundle_target`` also ``target/``, the target itself
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp.errors import ExplainedError
from mtp.files import whole_folder, write_json
from mtp.fingerprint import fingerprint_mismatch
from mtp.heads import Head, head_class
from mtp.target import Target

FORMAT = 1
CONFIG, WEIGHTS, ACCEPTANCE, CARD = "config.json", "heads.safetensors", "acceptance.json", "README.md"
ADAPTER = "adapter"


class CheckpointError(ExplainedError):
    """A folder that is no usable augmented checkpoint; the message says what was found and what to do."""


@dataclass(frozen=True)
class TargetReference:
    """Which target a head belongs to."""

    name_or_path: str
    revision: str | None
    fingerprint: str
    adapted: bool = False  # whether a PEFT adapter belongs to it, which the checkpoint then holds

    @classmethod
    def of(cls, target: Target) -> TargetReference:
        model = target.causal_lm
        name = getattr(model.config, "name_or_path", "") or getattr(model, "name_or_path", "")
        if Path(name).is_dir():  # the checkpoint may be loaded from another working directory
            name = str(Path(name).resolve())
        adapted = target.model is not model
        return cls(name, getattr(model.config, "_commit_hash", None), target.fingerprint(), adapted)


def save_checkpoint(
    folder: str | Path,
    head: Head,
    *,
    tokenizer: Any = None,
    acceptance: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    bundle_target: bool = False,
    also: Callable[[Path], None] | None = None,
) -> Path:
    """Write an augmented checkpoint, whole or not at all.

    Args:
        head: attached to its target.
        acceptance: measurements, as ``AcceptanceStats.to_dict`` gives them, with what they were made on.
        training: the recipe, for the model card.
        bundle_target: include the target's weights.
        also: writes further files into the folder before it appears under its name.

    Raises:
        ValueError: if a target with an adapter is to be bundled.
        OSError: if the folder holds other things than a checkpoint, or cannot be written.
    """
    folder = Path(folder)
    reference = TargetReference.of(head.target)
    if bundle_target and reference.adapted:
        raise ValueError(
            "bundle_target: the target has a PEFT adapter on it, and the checkpoint holds that already. Leave "
            "bundle_target off, or merge the adapter into the target first (merge_and_unload)."
        )
    with whole_folder(folder, is_checkpoint) as staged:
        write_json(
            staged / CONFIG,
            {
                "format": FORMAT,
                "model_type": "mtp",
                "head": {"family": head.family, **head.config.to_dict()},
                "target": {**reference.__dict__, "bundled": bundle_target},
            },
        )
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
        save_file(tensors, staged / WEIGHTS, metadata={"format": "pt"})
        write_json(staged / ACCEPTANCE, acceptance or {})
        (staged / CARD).write_text(model_card(head, reference, acceptance or {}, training or {}), encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(staged)
        if head.target.model.generation_config is not None:
            # As its owner has it: save_pretrained refuses what generate only warns about.
            write_json(staged / "generation_config.json", head.target.model.generation_config.to_diff_dict())
        if reference.adapted:
            head.target.model.save_pretrained(str(staged / ADAPTER), save_embedding_layers=False)
        if bundle_target:
            head.target.causal_lm.save_pretrained(staged / "target")
        if also is not None:
            also(staged)
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a head of ours."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def read_config(folder: str | Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``, checked to be one of ours."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"No {CONFIG} in {folder}; expected an augmented checkpoint, as train/heads.py writes into RUN/best."
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again.") from error
    if "head" not in config or "target" not in config:
        raise CheckpointError(f"{path} describes no head; found keys {', '.join(sorted(config))}.")
    if config.get("format", 0) > FORMAT:
        raise CheckpointError(f"{path} has format {config['format']}; this version of mtp reads up to {FORMAT}.")
    return config


def read_acceptance(folder: str | Path) -> float | None:
    """The mean accepted length that the checkpoint's head was measured to have; None where it was not calibrated."""
    try:
        measured = json.loads((Path(folder) / ACCEPTANCE).read_text(encoding="utf-8"))
        return float(measured["mean_accepted_length"]) if "calibration" in measured else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def load_head(
    folder: str | Path, target: Target, *, dtype: torch.dtype | None = None, check_fingerprint: bool = True
) -> Head:
    """The checkpoint's head, attached to ``target``.

    Args:
        dtype: of its weights; as they were trained by default.

    Raises:
        CheckpointError: if the folder is incomplete or the target is not the one the head was trained on.
    """
    folder = Path(folder)
    config = read_config(folder)
    expected, found = config["target"]["fingerprint"], target.fingerprint()
    if check_fingerprint and (difference := fingerprint_mismatch(found, expected)) is not None:
        raise CheckpointError(
            f"{folder} was trained on {config['target']['name_or_path']} (fingerprint {expected}); the target at hand "
            f"has fingerprint {found}: its {difference} differ. Load the target that the checkpoint names"
            + (f", with the adapter in {folder / ADAPTER} on it." if config["target"].get("adapted") else ".")
        )
    sizes = dict(config["head"])
    try:
        family = head_class(sizes.pop("family"))
        head = family.of_sizes(family.config_class.from_dict(sizes), target)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no head that this version knows: {error}") from error
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"No {WEIGHTS} in {folder}: the checkpoint is incomplete; copy it again.")
    try:
        head.load_state_dict(load_file(path))
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged ({error}); copy the checkpoint again.") from error
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its {CONFIG}: {error}") from error
    if dtype is not None:
        head.cast(dtype)
    return head.to(target.device).attach(target).eval()


def load_target(
    folder: str | Path,
    path: str | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Target:
    """The target at ``path``; by default the one that the checkpoint in ``folder`` names or carries.

    Raises:
        CheckpointError: if it cannot be loaded.
    """
    reference = read_config(folder)["target"]
    revision = kwargs.pop("revision", None)
    if path is None and reference["bundled"]:
        path = str(Path(folder) / "target")
    elif path is None:
        path, revision = reference["name_or_path"], revision or reference["revision"]
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code, **kwargs
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"The target {path!r} of {folder} cannot be loaded: {' '.join(str(error).split())} "
            "Pass the target yourself: mtp.load(folder, target=model_or_path)."
        ) from error
    return Target(_with_adapter(model, Path(folder) / ADAPTER) if reference.get("adapted") else model)


def _with_adapter(model: Any, folder: Path) -> Any:
    """``model`` with the PEFT adapter in ``folder`` on it."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise CheckpointError(
            f"{folder.parent} belongs to a target with an adapter, which takes the package peft: "
            "pip install 'mtp[peft]'."
        ) from error
    try:
        return PeftModel.from_pretrained(model, str(folder))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The adapter in {folder} cannot be loaded ({error}); copy the checkpoint again."
        ) from error


def load_tokenizer(folder: str | Path, target: Target, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer kept in the checkpoint, or None when it holds none."""
    if not (Path(folder) / "tokenizer_config.json").exists():
        return None
    # The folder's config.json is ours; Transformers is to look into the target's for the model type.
    return AutoTokenizer.from_pretrained(folder, config=target.causal_lm.config, trust_remote_code=trust_remote_code)


def _what_is_exact(reference: TargetReference) -> str:
    """Whose text the output is."""
    whose = "the target's own."
    if reference.adapted:
        whose = (
            f"that of the **adapted** target: {reference.name_or_path} with the adapter in `{ADAPTER}/` on it, not "
            "what it says without."
        )
    return f"A drafter for exact speculative decoding: with an exact acceptance rule the output is {whose}"


def model_card(head: Head, reference: TargetReference, acceptance: dict[str, Any], training: dict[str, Any]) -> str:
    """A Hub model card in Markdown that states only what was measured."""
    lines = [
        "---",
        "library_name: mtp",
        f"base_model: {reference.name_or_path}",
        "tags: [speculative-decoding, " + head.family + "]",
        "---",
        f"# {head.family} head for {reference.name_or_path}",
        "",
        _what_is_exact(reference),
        "",
        f"- family `{head.family}`, {head.num_trainable_parameters():,} parameters, {head.config.steps} steps, "
        f"draft vocabulary of {head.config.draft_vocab_size:,} of {head.config.vocab_size:,} tokens",
        f"- target fingerprint `{reference.fingerprint}`",
    ]
    if acceptance:
        lines += ["", "## Measured acceptance", "", "| what | mean accepted length | rounds |", "|---|---|---|"]
        for name, values in acceptance.get("categories", {}).items():
            lines.append(f"| {name} | {values['mean_accepted_length']:.2f} | {values['target_passes']} |")
        if "mean_accepted_length" in acceptance:
            lines.append(
                f"| **all** | **{acceptance['mean_accepted_length']:.2f}** | {acceptance.get('target_passes', '')} |"
            )
        lines += ["", f"On {acceptance.get('data', 'held-out rows')}; {acceptance.get('settings', 'greedy')}."]
    if training:
        lines += ["", "## Training recipe", "", "```json", json.dumps(training, indent=2), "```"]
    lines += ["", "## Use", "", "```python", "import mtp", 'model = mtp.load("this-folder")', "```", ""]
    return "\n".join(lines)
