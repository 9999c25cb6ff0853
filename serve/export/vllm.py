"""Export an EAGLE-3 head as the draft model that vLLM loads.

    python serve/export/vllm.py RUN/best DRAFT

Written for vLLM 0.32: ``config.json`` and ``model.safetensors``, to be named in
``speculative_config={"method": "eagle3", "model": DRAFT, "num_speculative_tokens": 3}`` beside the head's own target.
The exported layer computes what the head computes; a head that vLLM's layer cannot express is refused.  vLLM guesses
from one vocabulary for all texts: the tokens of the text at hand that a head takes up beside its own are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtp.checkpoint import CONFIG, load_head, load_target
from mtp.errors import ExplainedError, command_line
from mtp.files import read_json, whole_folder, write_json
from mtp.heads import Head
from mtp.heads.eagle3 import Eagle3Config, Eagle3Head

# Under these, angles do not depend on how long the text is, and both sides compute the same ones.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ARCHITECTURE = "LlamaForCausalLMEagle3"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
AS_THEY_ARE = (
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
)
FOLDED = ("fc.weight", "tap_scale", "lm_head.weight", "draft_ids")
CONTEXT = ("context_scale", "context_bias")  # engines that take up no tokens of the text do without


class ExportError(ExplainedError):
    """A head that the engine would compute otherwise; the message says what in it."""


def vllm_config(config: Eagle3Config) -> dict[str, Any]:
    """The ``config.json`` beside the tensors.

    Raises:
        ExportError: for settings under which vLLM computes something else.
    """
    rope = {"rope_type": "default", **config.rope_parameters}
    if rope["rope_type"] not in ROPE_TYPES:
        raise ExportError(
            f"The head's rotary positions are of type {rope['rope_type']!r}, whose angles change with the length of "
            f"the text and in vLLM at another length; expected one of {', '.join(ROPE_TYPES)}. Train the head with "
            "other rope_parameters."
        )
    if "rope_theta" not in rope:
        raise ExportError("The head's rope_parameters name no rope_theta; vLLM would take a base of its own.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": sorted(set(config.taps)),
        "num_aux_hidden_states": len(set(config.taps)),
        "norm_before_residual": False,
        "norm_output": False,
        "dtype": "float32",
    }


def vllm_tensors(state: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
    """The head's ``state_dict`` under vLLM's names.

    ``fc`` takes in the scale of its inputs, and reads the tapped layers as vLLM collects them: in their order in the
    target, each once.  ``d2t`` holds, for each output row, the distance from its index to the target token it stands
    for; where the draft vocabulary is the target's own, vLLM has no such map, and rows are brought into tokens' order.

    Raises:
        ExportError: if the head holds a tensor that has no place there, or lacks one.
    """
    state = {name: tensor for name, tensor in state.items() if name not in CONTEXT}
    expected = {*AS_THEY_ARE, *FOLDED, *(f"midlayer.{name}.weight" for name in PROJECTIONS)}
    if difference := sorted(expected.symmetric_difference(state)):
        raise ExportError(
            "vLLM's EAGLE-3 layer is made of other tensors than this head: "
            + ", ".join(f"{name} ({'found' if name in state else 'missing'})" for name in difference)
            + ". It cannot be exported."
        )
    tensors = {name: state[name].float() for name in AS_THEY_ARE}
    for name in PROJECTIONS:
        tensors[f"midlayer.self_attn.{name}.weight"] = state[f"midlayer.{name}.weight"].float()
    blocks = (state["fc.weight"].float() / state["tap_scale"].float()).chunk(len(config.taps), dim=1)
    layers = sorted(set(config.taps))
    of_layer = [
        torch.stack([block for block, tap in zip(blocks, config.taps, strict=True) if tap == layer]).sum(0)
        for layer in layers
    ]
    tensors["fc.weight"] = torch.cat(of_layer, dim=1)
    ids, order = state["draft_ids"].long().sort()
    tensors["lm_head.weight"] = state["lm_head.weight"].float()[order]
    if ids.numel() < config.vocab_size:
        tensors["d2t"] = ids - torch.arange(ids.numel(), device=ids.device)
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def embeddings_apart(head: Head) -> Tensor | None:
    """``[V, H]`` embeddings as the head reads them, where these are not the rows that vLLM reads of the target.

    Some targets scale their embeddings (Gemma).  vLLM's draft layer looks rows up as they are stored.
    """
    target = head.target
    stored = target.causal_lm.get_input_embeddings().weight
    some = torch.arange(min(8, head.config.vocab_size), device=target.device)
    if torch.equal(target.embed(some), stored[some]):
        return None
    return target.embed(torch.arange(head.config.vocab_size, device=target.device)).float().cpu()


def is_draft_model(folder: Path) -> bool:
    """Whether a folder holds what ``export`` writes."""
    path = folder / CONFIG
    return path.is_file() and read_json(path).get("architectures") == [ARCHITECTURE]


def export(head: Head, folder: str | Path) -> Path:
    """Write ``head``, attached to its target, into ``folder``, whole or not at all.

    Raises:
        ExportError: if vLLM's layer would compute something else.
    """
    if not isinstance(head, Eagle3Head):
        raise ExportError(
            f"This head is of the family {head.family!r}; only EAGLE-3 heads (head.family=eagle3) have an export for "
            "vLLM so far."
        )
    config = vllm_config(head.config)
    tensors = vllm_tensors(head.state_dict(), head.config)
    if (embeddings := embeddings_apart(head)) is not None:
        tensors["embed_tokens.weight"] = embeddings
    with whole_folder(folder, is_draft_model) as staged:
        write_json(staged / CONFIG, config)
        save_file(tensors, staged / "model.safetensors", metadata={"format": "pt"})
    return Path(folder)


@command_line
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", help="the augmented checkpoint (RUN/best of train/heads.py)")
    parser.add_argument("output", type=Path, help="folder for the draft model")
    parser.add_argument("--target", help="load the target from here instead of from where the checkpoint says")
    options = parser.parse_args(arguments)
    head = load_head(options.head, load_target(options.head, options.target, dtype="auto"))
    export(head, options.output)
    print(f"written to {options.output}; num_speculative_tokens up to {head.config.steps} were trained")


if __name__ == "__main__":
    main()
