"""An assistant that begins as a smaller model of the target's vocabulary: trained and kept, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import VOCAB, padded, random_prompts, tiny_head, tiny_model, tiny_target
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from workshop import make_workshop, recipe

import mtp
from mtp.heads import HEADS
from mtp.target import Target
from train import heads as program
from train.assembly import build_trainer
from train.config import ConfigError
from train.recipe import load_config

PROMPTS = random_prompts([5, 9, 2], seed=1)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


def narrow_model(vocab: int = VOCAB, tied: bool = True, **sizes: Any) -> PreTrainedModel:
    """Half as wide as the tiny target, and of fewer layers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        given = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, tie_word_embeddings=tied, pad_token_id=None, **given))


def recurrent_model() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4))


def sibling(folder: Path, model: PreTrainedModel, words: list[str] | None = None) -> Path:
    """A model on disk; ``words`` are the tokens that it calls 0, 1, 2 ..., and by default those of the workshop."""
    model.save_pretrained(folder)
    names = [f"t{at}" for at in range(VOCAB)] if words is None else words
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token=names[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def assistant(workshop: Path, output: Path, *overrides: str) -> list[str]:
    return recipe(workshop, output, "head.family=assistant", "head.steps=1", *overrides)


def test_a_sibling_is_trained_by_a_recipe_and_its_folder_is_not_needed_afterwards(
    workshop: Path, tmp_path: Path
) -> None:
    folder = sibling(tmp_path / "sibling", narrow_model())
    program.main(assistant(workshop, tmp_path / "run", f"head.sizes.sibling={folder}", "optim.epochs=6"))
    shutil.rmtree(folder)
    model = mtp.load(tmp_path / "run" / "best")
    assert model.drafter.config.sibling == str(folder)
    assert model.drafter.lm.config.hidden_size == 16
    settings = {"max_new_tokens": 20, "pad_token_id": 0}
    plain = AutoModelForCausalLM.from_pretrained(workshop / "target")
    expected = plain.generate(**padded(PROMPTS), do_sample=False, **settings)
    out = model.generate(**padded(PROMPTS), do_sample=False, nodes=8, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, expected)
    assert out.acceptance.mean_accepted_length > 1
    for rule in ("walk", "rejection", "traversal"):
        assert model.generate(**padded(PROMPTS), do_sample=True, nodes=8, rule=rule, **settings).shape == expected.shape


def test_training_begins_with_what_the_sibling_says(workshop: Path, tmp_path: Path) -> None:
    """The least-squares start would replace an output matrix that was trained for the sibling's states."""
    model = narrow_model()
    folder = sibling(tmp_path / "sibling", model)
    trainer = build_trainer(load_config(assistant(workshop, tmp_path / "run", f"head.sizes.sibling={folder}")))
    trainer.begin()
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        torch.testing.assert_close(trainer.head.lm(ids).logits, model(ids).logits)
    assert torch.equal(trainer.head.lm.lm_head.weight, model.lm_head.weight)
    assert trainer.head.lm.lm_head.weight is not trainer.head.lm.model.embed_tokens.weight


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3", "qwen3", "mixtral"])
def test_a_sibling_may_be_of_another_architecture(architecture: str, tmp_path: Path) -> None:
    model = tiny_model(architecture, seed=1, layers=2)
    folder = sibling(tmp_path / "sibling", model)
    head = tiny_head("assistant", tiny_target("llama"), sibling=str(folder))
    mtp.save_checkpoint(tmp_path / "head", head)
    again = mtp.load_head(tmp_path / "head", head.target)
    for name, weight in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize("rows", [VOCAB - 4, VOCAB + 8])
@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_is_padded_to_another_size_is_brought_to_the_targets(
    rows: int, tied: bool, workshop: Path, tmp_path: Path
) -> None:
    model = narrow_model(rows, tied)
    folder = sibling(tmp_path / "sibling", model, [f"t{at}" for at in range(min(rows, VOCAB))])
    target = Target(AutoModelForCausalLM.from_pretrained(workshop / "target"))
    head = HEADS["assistant"].from_target(target, torch.arange(VOCAB), sibling=str(folder))
    known, ids = min(rows, VOCAB), torch.tensor([[3, 7, 5]])
    with torch.no_grad():
        ours, theirs = (lm(ids).logits[..., :known] for lm in (head.lm, model))
    torch.testing.assert_close(ours, theirs)
    assert head.lm.lm_head.weight.shape[0] == target.vocab_size
    out = mtp.SpeculativeModel(target, head).generate(**padded(PROMPTS), max_new_tokens=8, do_sample=False, nodes=8)
    assert torch.equal(out, target.causal_lm.generate(**padded(PROMPTS), max_new_tokens=8, do_sample=False))


WORDS = [f"t{at}" for at in range(VOCAB)]


@pytest.mark.parametrize(
    ("make", "words", "reason"),
    [
        (narrow_model, [*WORDS[:5], *WORDS[6:], WORDS[5]], r"another vocabulary: token id 5 is 't6' to it and 't5' to"),
        (recurrent_model, WORDS, r"sibling='.*' drafts trees, .*recurrent state"),
        (lambda: narrow_model(max_position_embeddings=16), WORDS, r"data\.max_length: .*set data\.max_length=16"),
    ],
    ids=["other tokens", "no trees", "too short"],
)
def test_a_sibling_that_cannot_draft_for_the_target_is_refused_before_anything_is_computed(
    make: Any, words: list[str], reason: str, workshop: Path, tmp_path: Path
) -> None:
    folder = sibling(tmp_path / "sibling", make(), words)
    with pytest.raises(SystemExit, match=rf"error: .*{reason}"):
        program.main(assistant(workshop, tmp_path / "run", f"head.sizes.sibling={folder}"))
    assert not (tmp_path / "run" / "features").exists()


def test_a_sibling_without_a_tokenizer_has_to_have_as_many_tokens(workshop: Path, tmp_path: Path) -> None:
    narrow_model(VOCAB + 8).save_pretrained(tmp_path / "sibling")
    with pytest.raises(ConfigError, match=r"32 tokens and the target 24"):
        build_trainer(load_config(assistant(workshop, tmp_path / "run", f"head.sizes.sibling={tmp_path / 'sibling'}")))


def test_a_sibling_that_cannot_be_read_or_trained_is_refused_by_its_name(workshop: Path, tmp_path: Path) -> None:
    def start(path: str, *more: str) -> None:
        build_trainer(load_config(assistant(workshop, tmp_path / "run", f"head.sizes.sibling={path}", *more)))

    with pytest.raises(ConfigError, match=r"sibling='nowhere/at/all' is no model that an assistant can be made of"):
        start("nowhere/at/all")
    folder = sibling(tmp_path / "sibling", narrow_model())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"sibling='.*sibling' .*: its weights are quantised, and an"):
        start(str(folder))
    with pytest.raises(ConfigError, match=r"layers=\(0, 1\) and sibling='x'; an assistant begins from one of the two"):
        start("x", "head.sizes.layers=[0,1]")


def test_an_assistant_is_trained_further_by_the_recipe_that_it_was_made_by(workshop: Path, tmp_path: Path) -> None:
    folder = sibling(tmp_path / "sibling", narrow_model())
    for at, sizes in enumerate((f"head.sizes.sibling={folder}", "head.sizes.layers=[0,2]")):
        first, second = tmp_path / f"first{at}", tmp_path / f"second{at}"
        program.main(assistant(workshop, first, sizes, "optim.epochs=1"))
        program.main(assistant(workshop, second, sizes, "optim.epochs=1", f"start.head={first / 'best'}"))
        with pytest.raises(SystemExit, match=r"another head than the recipe's: layers \(.*\) there, \(0, 1\) here"):
            program.main(assistant(workshop, second, "head.sizes.layers=[0,1]", f"start.head={first / 'best'}"))
