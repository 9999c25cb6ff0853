"""What W&B and TensorBoard are shown: the numbers of the log, and sample answers with the kept tokens marked."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mtp.heads import Head
from mtp.model import SpeculativeModel
from train.config import ConfigError, RunConfig, to_dict
from train.data import Row
from train.generation import left_padded, up_to_end

TRACKERS = {"wandb": "wandb", "tensorboard": "tensorboard"}
KEPT = "«{}»"


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a tracker that is unknown, or not installed: accelerate leaves it out in silence."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"report_to: found {name!r}; expected any of {', '.join(TRACKERS)}.")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise ConfigError(f"report_to: {name} is not installed; pip install 'mtp[{name}]', or take it out.")


def start_tracking(accelerator: Accelerator, config: RunConfig) -> None:
    """Begin a run in each tracker that the recipe names, its files in the run's folder.

    W&B works offline unless there is an account on this machine or ``WANDB_MODE`` says otherwise; ``wandb sync`` sends
    such a run later.
    """
    if not config.report_to:
        return
    options = {}
    if "wandb" in config.report_to:
        os.makedirs(config.output, exist_ok=True)
        options["wandb"] = {"dir": config.output, "mode": os.environ.get("WANDB_MODE") or _wandb_mode()}
    accelerator.init_trackers("mtp", config=flatten(to_dict(config), keep_text=True), init_kwargs=options)


def _wandb_mode() -> str:
    """``online`` where W&B would find a key: in its variable, or among the logins of this machine."""
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        logins = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (FileNotFoundError, netrc.NetrcParseError):
        return "offline"
    return "online" if any("wandb" in host for host in logins) else "offline"


def log_samples(accelerator: Accelerator, samples: Sequence[dict[str, str]], step: int) -> None:
    """Show ``samples`` in every tracker: as a table where there are tables, else as texts."""
    if not samples:
        return
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_table"):
            columns = list(samples[0])
            tracker.log_table(
                "samples", columns, [[sample[column] for column in columns] for sample in samples], step=step
            )
        else:
            tracker.log({f"samples/{at}": "\n\n".join(each.values()) for at, each in enumerate(samples)}, step=step)


def sample_answers(head: Head, rows: Sequence[Row], tokenizer: Any, max_new_tokens: int) -> list[dict[str, str]]:
    """Greedy answers to the prompts of ``rows``; what was drafted and kept stands in «guillemets».

    Returns:
        For each row its category, prompt and answer.
    """
    if not rows:
        return []
    tokens, mask = left_padded([row.prompt_ids for row in rows], head.target.device)
    committed: list[list[tuple[int, bool]]] = [[] for _ in rows]
    SpeculativeModel(head.target, head).generate(
        tokens,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        nodes=head.config.nodes,
        pad_token_id=0,
        on_token=lambda row, token, kept: committed[row].append((token, kept)),
    )
    ends = set(head.target.eos_token_ids)
    answers = []
    for row, pairs in zip(rows, committed, strict=True):
        count = len(up_to_end([token for token, _ in pairs], ends))
        answers.append(
            {
                "category": row.category,
                "prompt": str(tokenizer.decode(row.prompt_ids, skip_special_tokens=True)),
                "answer": marked(pairs[:count], tokenizer),
            }
        )
    return answers


def marked(committed: Sequence[tuple[int, bool]], tokenizer: Any) -> str:
    """The text of ``(token, kept)`` pairs, each run of kept tokens in guillemets."""
    text, out, ids = "", "", []
    for at, (token, kept) in enumerate(committed):
        ids.append(token)
        last = at + 1 == len(committed) or committed[at + 1][1] != kept
        if last:  # decoding whole beginnings: a token's text may depend on those before it
            whole = str(tokenizer.decode(ids))
            piece, text = whole[len(text) :], whole
            out += KEPT.format(piece) if kept and piece else piece
    return out


def flatten(values: dict[str, Any], prefix: str = "", keep_text: bool = False) -> dict[str, Any]:
    """Nested numbers as ``a/b/0``, as trackers take them.

    Args:
        keep_text: texts, truth values and what is not set as well; they are left out otherwise.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(at): item for at, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}/", keep_text)
        elif keep_text or (isinstance(value, int | float) and not isinstance(value, bool)):
            flat[prefix + key] = str(value) if value is None else value
    return flat
