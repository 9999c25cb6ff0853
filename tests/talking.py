"""A tiny model that has a tokenizer with a chat template, and a drafter that knows its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import VOCAB, OracleDrafter, tiny_head, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import mtp
from mtp.drafters import TargetStates
from mtp.target import Target

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
END, PAD = "<end>", "<pad>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, so that most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [PAD, END, "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat, the end of the tale; naïve café"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer for ``tiny_model``'s vocabulary whose token i is the i-th letter."""
    vocab = {chr(ord("a") + index): index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_talking_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A tiny target in ``folder/target`` and an augmented checkpoint for it in ``folder/heads``."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab=len(tokenizer), seed=seed)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder / "target")
    target = Target(AutoModelForCausalLM.from_pretrained(folder / "target"))
    mtp.save_checkpoint(folder / "heads", tiny_head("eagle3", target, draft_vocab=64), tokenizer=tokenizer)
    return folder / "heads"


def plain_answer(model: mtp.SpeculativeModel, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """What Transformers says, greedily."""
    tokens = torch.tensor([list(prompt)])
    output = model.target.causal_lm.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_new_tokens
    )
    return output[0, len(prompt) :].tolist()


class KnowingDrafter(OracleDrafter):
    """Knows the answer to each of some prompts."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], lengths: Sequence[int]):
        super().__init__([], lengths=lengths)
        self.answers = answers

    def start(self, states: TargetStates, capacity: int) -> None:
        super().start(states, capacity)
        rows = zip(states.tokens.tolist(), states.counts.tolist(), strict=True)
        self.truths = [self.answers[tuple(tokens[:count])] for tokens, count in rows]


def knowing(
    model: mtp.SpeculativeModel,
    prompts: Iterable[Sequence[int]],
    max_new_tokens: int,
    lengths: Sequence[int] = (2, 0, 3),
) -> mtp.SpeculativeModel:
    """The same target with a drafter that guesses right ``lengths`` tokens at a time."""
    answers = {tuple(prompt): plain_answer(model, prompt, max_new_tokens) for prompt in prompts}
    return mtp.SpeculativeModel(model.target, KnowingDrafter(answers, lengths), model.tokenizer)


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
