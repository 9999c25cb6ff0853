"""The folder of answers: parquet shards, each whole or not there, and the record that says whose they are."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet

from mtp.files import read_json, whole_file, write_json
from train.checks import template_digest
from train.config import TargetConfig
from train.data import DataError, is_held_out
from train.distill_options import Options
from train.generation import Progress, Writer, derived_seed
from train.prompts import Prompt

logger = logging.getLogger("train.distill")

HELD_OUT_RULE = "sha256 of prompt_ids below the fraction (train.data.is_held_out)"
TOKEN_IDS = datasets.List(datasets.Value("int32"))
TEXT = datasets.Value("string")
FEATURES = datasets.Features(
    {"prompt_ids": TOKEN_IDS, "response_ids": TOKEN_IDS, "category": TEXT, "source": TEXT, "finish_reason": TEXT}
)


def describe(
    writer: Writer, options: Options, origin: TargetConfig, prompts: Sequence[Prompt] | None
) -> dict[str, Any]:
    """What goes into ``distill.json``; everything under ``settings`` has to be the same when a run is resumed."""
    identity = writer.identity()
    asked: dict[str, Any]
    if prompts is None:
        asked = {"from": "the target", "count": options.own_count, **asdict(options.own_prompts)}
    else:
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(np.asarray([*prompt.ids, -1], dtype=np.int64).tobytes())
        asked = {"from": str(options.prompts or options.dataset), "count": len(prompts), "sha256": digest.hexdigest()}
    return {
        "name": origin.path,
        "revision": origin.revision,
        "fingerprint": identity.pop("fingerprint"),
        "chat_template": None if options.raw else template_digest(writer.tokenizer),
        "settings": {
            **identity,
            "prompts": asked,
            "answers": asdict(options.answers),
            "seed": options.seed,
            "shard_size": options.shard_size,
            "held_out": {"fraction": options.held_out_fraction, "rule": HELD_OUT_RULE},
        },
    }


def claim_output(output: Path, record: dict[str, Any]) -> None:
    """Start ``output``, or make sure that it was started with the same target and settings.

    Raises:
        DataError: saying what differs; or if the folder holds data of unknown origin.
    """
    path = output / "distill.json"
    data = [*output.glob("*.parquet"), *output.glob("prompts.jsonl")]
    if not data:
        write_json(path, record)
        return
    if not path.exists():
        raise DataError(f"{output} holds {data[0].name} but no distill.json that says whose; choose an empty --output.")
    before = read_json(path)
    ours, theirs = (flatten({k: r.get(k) for k in ("fingerprint", "settings")}) for r in (record, before))
    differences = [
        f"{key}: {theirs.get(key)!r} there, {ours.get(key)!r} now"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key) and key != "settings.prompts.from"
    ]
    if differences:
        raise DataError(
            f"{output} was started with other settings; mixing them would give data that nobody can describe.\n  "
            + "\n  ".join(differences)
            + "\nRepeat the settings of then to go on with it, or choose another --output."
        )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``{"answers.temperature": 0.0, ...}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def answer_prompts(writer: Writer, prompts: Sequence[Prompt], options: Options) -> Progress:
    """Write the shards that are not there yet, each whole."""
    size = options.shard_size
    paths = [options.output / f"answers-{at:05d}.parquet" for at in range(-(-len(prompts) // size))]
    missing = [at for at, path in enumerate(paths) if not path.exists()]
    left = sum(len(prompts[at * size : (at + 1) * size]) for at in missing)
    if left < len(prompts):
        logger.info("%d of %d prompts are answered already", len(prompts) - left, len(prompts))
    progress = Progress(len(prompts), len(prompts) - left, "answers")
    end_ids = writer.end_ids
    for at in missing:
        shard = prompts[at * size : (at + 1) * size]
        seed = derived_seed(options.seed, "answers", at)
        responses = writer([prompt.ids for prompt in shard], options.answers, seed, end_ids, progress)
        rows = [answer_row(prompt, ids, end_ids) for prompt, ids in zip(shard, responses, strict=True)]
        # In memory first: on a full disk Arrow may abort the process instead of raising an error.
        shard_file = io.BytesIO()
        datasets.Dataset.from_list(rows, features=FEATURES).to_parquet(shard_file)
        with whole_file(paths[at]) as staged:
            staged.write_bytes(shard_file.getvalue())
    progress.bar.close()
    return progress


def answer_row(prompt: Prompt, response: list[int], end_ids: set[int]) -> dict[str, Any]:
    """One row of a shard."""
    return {
        "prompt_ids": list(prompt.ids),
        "response_ids": response,
        "category": prompt.category,
        "source": prompt.source,
        "finish_reason": "stop" if response[-1] in end_ids else "length",
    }


def count_rows(output: Path, prompts: Sequence[Prompt], fraction: float) -> dict[str, int]:
    """Counts over all shards of a complete folder."""
    counts = {"rows": 0, "response_tokens": 0, "finished_by_stop": 0}
    for path in sorted(output.glob("answers-*.parquet")):
        table = pyarrow.parquet.read_table(path, columns=["response_ids", "finish_reason"])
        counts["rows"] += table.num_rows
        counts["response_tokens"] += sum(len(ids) for ids in table["response_ids"])
        counts["finished_by_stop"] += table["finish_reason"].to_pylist().count("stop")
    counts["held_out"] = sum(is_held_out(prompt.ids, fraction) for prompt in prompts)
    return counts
