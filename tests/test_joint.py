"""Medusa-2: heads and an adapter of the target trained together; the checkpoint holds the adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mtp
from serve import measure
from tests.tiny import padded, random_prompts
from tests.workshop import make_workshop, recipe
from train import heads as program
from train.batches import training_batch
from train.config import ConfigError
from train.joint import JointTrainer
from train.recipe import load_config

JOINT = ("target.adapter.rank=2", "target.adapter.lr=1e-2", "target.adapter.heads_first=0.25", "head.family=medusa")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


def trainer_of(workshop: Path, output: Path, *overrides: str) -> JointTrainer:
    trainer = program.build_trainer(load_config(recipe(workshop, output, *JOINT, *overrides)))
    assert isinstance(trainer, JointTrainer)
    return trainer


def adapter_weights(trainer: JointTrainer, part: str) -> list[torch.Tensor]:
    return [p.detach().clone() for name, p in trainer.target.model.named_parameters() if part in name]


@pytest.fixture(scope="module")
def trained(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> JointTrainer:
    trainer = trainer_of(workshop, tmp_path_factory.mktemp("joint") / "run")
    trainer.run()
    return trainer


def test_the_output_is_the_adapted_targets_own(trained: JointTrainer, workshop: Path) -> None:
    folder = trained.output / "last"
    model = mtp.load(folder)
    plain = AutoModelForCausalLM.from_pretrained(workshop / "target")
    inputs = padded(random_prompts([5, 9, 2], seed=1))
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    unadapted = plain.generate(**inputs, **settings)
    adapted = PeftModel.from_pretrained(plain, folder / "adapter").merge_and_unload().generate(**inputs, **settings)
    assert torch.equal(model.generate(**inputs, **settings), adapted)
    assert not torch.equal(adapted, unadapted)


def test_an_adapted_target_is_measured_against_itself(trained: JointTrainer, tmp_path: Path) -> None:
    """All systems that are compared have the adapter."""
    data, output = tmp_path / "asked.jsonl", tmp_path / "measured.json"
    prompts = random_prompts([5, 9, 2], seed=1)
    data.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
    asked = [str(trained.output / "last"), "--data", str(data), "--output", str(output), "--max-new-tokens", "20"]
    assert measure.main([*asked, "--compare"]) == 0
    assert len(json.loads(output.read_text())["answers"]) == 2 * len(prompts)
    assert measure.main([*asked, "--drafter", "head+ngram", "--nodes", "8"]) == 0
    (result,) = json.loads(output.read_text())["results"]
    assert result["equality"]["drafted"]["equal"] == result["equality"]["plain"]["equal"] == len(prompts)


def test_the_adapter_was_trained_and_nothing_else_of_the_target(trained: JointTrainer, workshop: Path) -> None:
    assert any(weight.abs().max() > 0 for weight in adapter_weights(trained, "lora_B"))
    before = load_file(workshop / "target" / "model.safetensors")
    after = {
        name.replace(".base_layer", ""): weight
        for name, weight in trained.target.causal_lm.state_dict().items()
        if "lora" not in name
    }
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def test_the_card_says_whose_text_it_is(trained: JointTrainer) -> None:
    card = (trained.output / "best" / "README.md").read_text()
    assert "that of the **adapted** target" in card
    assert "the output is the target's own" not in card


def test_the_target_without_its_adapter_is_refused(trained: JointTrainer, workshop: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(workshop / "target")
    with pytest.raises(mtp.CheckpointError, match=r"weight matrices differ.*with the adapter in .*adapter on it"):
        mtp.load(trained.output / "last", target=plain)
    by_name = mtp.load(trained.output / "last", target=str(workshop / "target"))
    assert by_name.target.model is not by_name.target.causal_lm


def test_a_head_for_a_target_with_an_adapter_loads_by_the_targets_name(trained: JointTrainer, tmp_path: Path) -> None:
    """Whoever trained the adapter, and whatever for."""
    mtp.save_checkpoint(tmp_path / "head", trained.head)
    assert mtp.load(tmp_path / "head").target.fingerprint() == trained.target.fingerprint()
    with pytest.raises(ValueError, match="bundle_target: the target has a PEFT adapter"):
        mtp.save_checkpoint(tmp_path / "bundled", trained.head, bundle_target=True)


def test_heads_are_trained_alone_first(workshop: Path, tmp_path: Path) -> None:
    trainer = trainer_of(workshop, tmp_path / "run", "target.adapter.heads_first=0.5")
    step, moved = trainer._step, []

    def watched(batches: list[list[int]]) -> dict[str, Any]:
        before = [p.detach().clone() for p in trainer.head.parameters()]
        metrics = step(batches)
        moved.append(
            (
                any(not torch.equal(p, q) for p, q in zip(before, trainer.head.parameters(), strict=True)),
                any(weight.abs().max() > 0 for weight in adapter_weights(trainer, "lora_B")),
            )
        )
        return metrics

    trainer._step = watched  # type: ignore[method-assign]
    trainer.run()
    alone = trainer.heads_first
    assert 1 < alone < len(moved) - 1
    assert moved == [(True, False)] * alone + [(True, True)] * (len(moved) - alone)


def test_the_target_is_kept_the_nearer_the_more_that_counts(workshop: Path, tmp_path: Path) -> None:
    divergences = []
    for weight in (0.0, 30.0):
        output = tmp_path / str(weight)
        trainer_of(workshop, output, f"target.adapter.keep_weight={weight}", "optim.epochs=4").run()
        log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
        divergences.append([entry["divergence"] for entry in log if entry["event"] == "step"])
    for run in divergences:
        assert run[0] == pytest.approx(0.0, abs=1e-4)  # an adapter that changes nothing yet
    assert 0 < divergences[1][-1] < 0.5 * divergences[0][-1]


def test_a_checkpoint_of_training_holds_the_adapter(workshop: Path, tmp_path: Path) -> None:
    first = trainer_of(workshop, tmp_path / "run")
    first.run()
    again = trainer_of(workshop, tmp_path / "run")
    again.begin()
    assert again.progress.step == again.total_steps
    for ours, theirs in zip(adapter_weights(again, "lora"), adapter_weights(first, "lora"), strict=True):
        assert torch.equal(ours, theirs)


def test_the_target_reads_whole_prompts_even_under_heads_that_do_not(workshop: Path, tmp_path: Path) -> None:
    trainer = trainer_of(workshop, tmp_path / "run")
    longest = max(range(len(trainer.train.rows)), key=lambda at: len(trainer.train.rows[at].prompt_ids))
    batch = training_batch(trainer.train, [longest])
    adapted, _ = trainer._trained()(batch, 3, heads_alone=True)
    torch.testing.assert_close(adapted.states.hidden, batch.states.hidden, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("features.mode=cached", r"features\.mode=cached: .*set features\.mode=online"),
        ("features.prompt_positions=4", r"features\.prompt_positions=4: .*reads whole prompts"),
        ("bundle_target=true", r"bundle_target=true: "),
        ("target.adapter.heads_first=1.0", r"heads_first: found 1\.0, expected 0 to below 1"),
        ("target.adapter.modules=[nothing_of_the_kind]", r"target\.adapter\.modules: .*nothing_of_the_kind"),
        ("target.adapter.modules=[lm_head]", r"names the output embeddings"),
    ],
)
def test_an_adapter_that_cannot_be_trained_is_refused_before_training(
    override: str, message: str, workshop: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(workshop, tmp_path / "run", override)
    assert not (tmp_path / "run" / "features").exists()
