"""What all contenders are given: rows, and the target's states for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mtp.target import Target
from train.data import Row
from train.features import pad_rows


def device_at_hand() -> torch.device:
    """The accelerator if there is one."""
    return torch.device(torch.accelerator.current_accelerator() or "cpu" if torch.accelerator.is_available() else "cpu")


class Shop:
    """Rows and the target's states, as bench_training.py wrote them.

    Attributes:
        settings: of the run.
        rows: prompts and answers, to train on.
        held_out: others.
        hidden: of each row, ``[T, H]``.
        taps: of each row, ``[T, 3 * H]``.
        draft_ids: ``[Vd]``.
    """

    def __init__(self, folder: Path):
        self.settings: dict[str, Any] = json.loads((folder / "settings.json").read_text())
        tensors = load_file(folder / "states.safetensors")
        self.draft_ids = tensors["draft_ids"]
        prompts = self.settings["prompts"]
        ids = [tuple(tensors[f"tokens.{at}"].tolist()) for at in range(len(prompts))]
        self.rows = [Row(each[:start], each[start:]) for each, start in zip(ids, prompts, strict=True)]
        self.held_out = [Row(tuple(row["prompt_ids"]), tuple(row["response_ids"])) for row in self.settings["held_out"]]
        self.hidden = [tensors[f"hidden.{at}"] for at in range(len(prompts))]
        self.taps = [tensors[f"taps.{at}"] for at in range(len(prompts))]

    def target(self) -> Target:
        model = AutoModelForCausalLM.from_pretrained(self.settings["target"], dtype=torch.float32)
        return Target(model.eval().requires_grad_(False))

    def padded(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens ``[B, T]``, hidden ``[B, T, H]``, taps ``[B, T, 3 * H]``, and which tokens are an answer's."""
        tokens, _ = pad_rows([self.rows[at].ids for at in indices], "cpu")
        hidden = torch.nn.utils.rnn.pad_sequence([self.hidden[at] for at in indices], batch_first=True)
        taps = torch.nn.utils.rnn.pad_sequence([self.taps[at] for at in indices], batch_first=True)
        answer = torch.zeros_like(tokens, dtype=torch.bool)
        for row, at in enumerate(indices):
            answer[row, len(self.rows[at].prompt_ids) : len(self.rows[at])] = True
        return tokens, hidden, taps, answer

    def in_order(self, padding: bool) -> list[list[int]]:
        """Batches of rows as they come, of at most so many positions as a step may have."""
        batches: list[list[int]] = [[]]
        for at in range(len(self.rows)):
            grown = [*batches[-1], at]
            lengths = [len(self.rows[index]) for index in grown]
            size = len(grown) * max(lengths) if padding else sum(lengths)
            if size > self.settings["positions"] and batches[-1]:
                batches.append([at])
            else:
                batches[-1] = grown
        return batches
