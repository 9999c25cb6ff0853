"""Which model is this?  A short text that is the same for the same weights, however they were loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from mtp.offload import stored_weight


def fingerprint(causal_lm: Any, config: Any) -> str:
    """Identify a model by its architecture and a sample of its weights.

    ``architecture-embeddings-matrices``: three short hashes.  Of the weights the *signs* are taken: unlike the values
    they are the same in whatever precision a checkpoint is loaded, while training turns some.  ``matrices`` is
    ``quantised`` where the matrices are not floating point, and then does not count.
    """
    fields = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    shape = [getattr(config, name, None) for name in fields]
    vectors, matrices = hashlib.sha256(), hashlib.sha256()
    quantised = getattr(config, "quantization_config", None) is not None
    embedding = causal_lm.get_input_embeddings()
    for name, module, weight in sorted(_stored_weights(causal_lm), key=lambda entry: entry[0]):
        if not _is_plain(weight):
            quantised = True
            continue
        digest = matrices if weight.dim() > 1 and module is not embedding else vectors
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)][:256].float().cpu()
        digest.update(name.replace(".base_layer", "").encode())
        # What is next to nothing may be rounded to nothing: it counts as positive.
        digest.update(np.packbits((sample < -1e-6).numpy()).tobytes())
    architecture = hashlib.sha256(repr(shape).encode()).hexdigest()[:8]
    last = "quantised" if quantised else matrices.hexdigest()[:12]
    return f"{architecture}-{vectors.hexdigest()[:12]}-{last}"


def fingerprint_mismatch(found: str, expected: str) -> str | None:
    """What differs between two fingerprints, in words; None when they belong to the same target."""
    names = ("architecture", "embeddings and biases", "weight matrices")
    for name, ours, theirs in zip(names, found.split("-"), expected.split("-"), strict=True):
        if ours != theirs and "quantised" not in (ours, theirs):
            return name
    return None


def _stored_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every parameter once, with its name and its module."""
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        yield name, modules[owner], stored_weight(modules[owner], leaf)


def _is_plain(weight: Tensor) -> bool:
    """Whether the values are floating point numbers of torch's own (quantised tensors are classes of their library)."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()
