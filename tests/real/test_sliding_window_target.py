"""On the real Gemma 3 270M, whose layers look back 512 tokens: drafted text over longer prompts is ``transformers``'.

``scripts/fetch_default_target.py --model gemma3-270m`` fetches it (under Gemma's terms); without it these are skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tiny import OracleDrafter
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp.model import SpeculativeModel
from mtp.target import Target

pytestmark = pytest.mark.real_model

FOLDER = Path(os.environ.get("MTP_CACHE", Path.home() / ".cache" / "mtp")) / "gemma3-270m"
NEW = 24
TEXT = " ".join(
    f"On day {day} the keeper of lighthouse number {day * 7 % 31} wrote that the wind came from the "
    f"{('north', 'east', 'south', 'west')[day % 4]} and that {day * 3 % 17} ships had passed before noon."
    for day in range(1, 31)
)


@pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason=f"no Gemma 3 270M in {FOLDER}")
def test_greedy_text_over_a_prompt_longer_than_the_window_equals_transformers() -> None:
    """A drafter that replays the plain answer piece by piece, among wrong tokens; one answer crosses the window."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    target = Target(AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32))
    ids = tokenizer(TEXT)["input_ids"]
    window = target.config.sliding_window
    assert len(ids) > window + 200
    for prompt in (ids, ids[: window - 9]):
        batch = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = target.causal_lm.generate(**batch, max_new_tokens=NEW + 6, **settings)[0, len(prompt) :].tolist()
        model = SpeculativeModel(target, OracleDrafter([expected], lengths=[4, 0, 6, 2], clutter=6))
        out = model.generate(**batch, max_new_tokens=NEW, **settings, return_dict_in_generate=True)
        assert out.sequences[0, len(prompt) :].tolist() == expected[:NEW]
        assert out.acceptance.mean_accepted_length > 2
