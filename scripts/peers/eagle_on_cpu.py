"""EAGLE's public decoder (github.com/SafeAILab/EAGLE) as a peer of scripts/bench.py, with an EAGLE-3 head of ours.

Runs under a Python in which its package ``eagle`` can be imported (commit cb7e084, with torch, transformers 4.53.1 and
safetensors) and knows nothing of this project but the protocol of ``serve/peers.py``.  Greedy.  The draft model is what
``serve/export/vllm.py`` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

WEIGHTS = "model.safetensors"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the draft model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-length", type=int, default=2048, help="most tokens of a prompt and its answer")
    parser.add_argument("--eos", type=int, nargs="*", default=[], help="tokens that end an answer")
    parser.add_argument("--nodes", type=int, default=60, help="of a tree; its own default is %(default)s")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--width", type=int, default=10)
    return parser.parse_args()


def readable(model: Path, folder: Path) -> Path:
    """The target as this program reads it: the rotary base where Transformers 4 looks for it, and an index of weights,
    which it takes the embeddings from."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", None)
    if rope is not None:
        if rope.get("rope_type", "default") != "default":
            raise SystemExit(f"Found rotary positions of type {rope['rope_type']!r}; only 'default' is handled here.")
        config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype", config.get("torch_dtype"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = model / f"{WEIGHTS}.index.json"
    for path in [*model.glob("*.safetensors"), *([index] if index.exists() else [])]:
        (folder / path.name).symlink_to(path.resolve())
    if not index.exists():
        mapping = {"weight_map": {"model.embed_tokens.weight": WEIGHTS}}
        (folder / index.name).write_text(json.dumps(mapping), encoding="utf-8")
    return folder


def serve(options: argparse.Namespace, folder: Path, answers: Any) -> None:
    from eagle.model import ea_model

    # All that it asks of a tokenizer is the token that ends a text.
    ends = SimpleNamespace(eos_token_id=options.eos[0] if options.eos else -1)
    ea_model.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: ends)
    engine = ea_model.EaModel.from_pretrained(
        use_eagle3=True,
        base_model_path=str(readable(options.model, folder)),
        ea_model_path=options.draft,
        total_token=options.nodes,
        depth=options.depth,
        top_k=options.width,
        torch_dtype=getattr(torch, options.dtype),
    )
    engine.eval()
    # Loading leaves the tables of angles unset, which no checkpoint holds.
    for layer in engine.base_model.model.layers:
        old = layer.self_attn.rotary_emb
        layer.self_attn.rotary_emb = type(old)(old.dim, old.max_position_embeddings, old.base)
    length = options.max_length + 2 * options.nodes + 10  # it keeps room for a tree
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompt = torch.tensor([request["prompt_ids"]])
        start = time.perf_counter()
        # It stops once its rounds gave more than it was asked for; the first token comes before them.
        output, count, last = engine.eagenerate(
            prompt, temperature=0.0, max_new_tokens=request["max_new_tokens"] - 2, max_length=length, log=True
        )
        seconds = time.perf_counter() - start
        ids = output[0, prompt.shape[1] :].tolist()
        rounds = int(last) + 1
        answer = {
            "ids": ids[: request["max_new_tokens"]],
            "seconds": seconds,
            "rounds": rounds,
            "drafted": rounds * (options.nodes - 1),
            "accepted": max(int(count) - rounds, 0),
        }
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    answers = os.fdopen(os.dup(1), "w")  # what is printed on the way must not end up between the answers
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        serve(options, Path(folder), answers)


if __name__ == "__main__":
    main()
