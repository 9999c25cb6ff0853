"""A tiny target on disk with answers of its own of many lengths, and recipes to train heads on them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB, padded, random_prompts, tiny_model


def make_workshop(
    folder: Path, rows: int = 60, seed: int = 9, ragged: bool = True, architecture: str = "llama"
) -> Path:
    """Write ``target`` and ``rows.jsonl`` into ``folder``.

    Args:
        ragged: prompts begin anywhere, and answers end anywhere between 2 and 16 tokens; else they have 6 and 16.
    """
    model = tiny_model(architecture, seed=seed)
    model.save_pretrained(folder / "target")
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0").save_pretrained(folder / "target")
    rng = random.Random(seed)
    prompts = random_prompts([6] * rows, seed=seed)
    answers = model.generate(**padded(prompts), max_new_tokens=16, do_sample=False)[:, 6:].tolist()
    with (folder / "rows.jsonl").open("w") as file:
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            start, end = (rng.randrange(0, 5), rng.randrange(2, 17)) if ragged else (0, 16)
            row = {
                "prompt_ids": prompt[start:],
                "response_ids": answer[:end],
                "category": "even" if number % 2 == 0 else "odd",
            }
            file.write(json.dumps(row) + "\n")
    return folder


def recipe(workshop: Path, output: Path, *overrides: str) -> list[str]:
    """Arguments of ``train/heads.py`` for a run of seconds; later ones win."""
    return [
        f"target.path={workshop / 'target'}",
        f"data.path={workshop / 'rows.jsonl'}",
        "data.held_out_fraction=0.2",
        f"output={output}",
        "features.dtype=float32",
        "head.draft_vocab_size=20",
        "head.steps=3",
        "head.nodes=8",
        "optim.epochs=2",
        "optim.batch_positions=80",
        "optim.lr=3e-3",
        "eval.rows=7",
        "eval.batch_size=2",
        "eval.max_new_tokens=10",
        "checkpoint_every=3",
        "log_every=1",
        *overrides,
    ]
