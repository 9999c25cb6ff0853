"""Augmented checkpoints: whole or not at all, and only with the target they belong to."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import padded, random_prompts, tiny_head, tiny_model, tiny_target

import mtp
from mtp.checkpoint import CheckpointError, load_head, save_checkpoint
from mtp.files import restore_folder, whole_file, whole_folder, write_json
from mtp.heads import HEADS, Head, HeadConfig
from mtp.model import SpeculativeModel
from mtp.target import Target

FAMILIES = sorted(HEADS)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


def saved(folder: Path, target: Target, family: str = FAMILIES[0], **sizes: Any) -> Head:
    head = tiny_head(family, target, **sizes)
    save_checkpoint(folder, head)
    return head


def change_config(folder: Path, **head: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["head"].update(head)
    path.write_text(json.dumps(config))


def proposals(head: Head, target: Target) -> list[list[int]]:
    """Kept tokens and counters of a generation: equal only if the head guesses the same."""
    model = SpeculativeModel(target, head)
    out = model.generate(
        **padded(random_prompts([6, 9], 2)), max_new_tokens=10, do_sample=False, return_dict_in_generate=True
    )
    return [out.sequences.tolist(), out.kept, [out.acceptance.target_passes]]


def strays(folder: Path) -> list[str]:
    """Whatever a failed write may have left beside ``folder``."""
    return sorted(path.name for path in folder.parent.iterdir() if path.name != folder.name)


@pytest.mark.parametrize("draft_vocab", [None, 13])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_head_comes_back_the_same(tmp_path: Path, target: Target, family: str, draft_vocab: int | None) -> None:
    head = saved(tmp_path / "best", target, family, draft_vocab=draft_vocab)
    again = load_head(tmp_path / "best", target)
    assert type(again) is type(head)
    assert again.config == head.config
    assert set(again.state_dict()) == set(head.state_dict())
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert proposals(again, target) == proposals(head, target)
    assert not again.training
    assert strays(tmp_path / "best") == []


def test_measured_rank_accuracies_come_back(tmp_path: Path, target: Target) -> None:
    head = tiny_head("medusa", target)
    head.set_rank_accuracy(((0.5, 0.2), (0.4, 0.1), (0.1, 0.1)))
    save_checkpoint(tmp_path / "best", head)
    again = load_head(tmp_path / "best", target)
    assert again.config.accuracies() == head.config.accuracies()
    assert proposals(again, target) == proposals(head, target)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_takes_a_bundled_target_from_the_folder(tmp_path: Path, target: Target, family: str) -> None:
    head = tiny_head(family, target)
    save_checkpoint(tmp_path / "best", head, bundle_target=True)
    model = mtp.load(tmp_path / "best")
    assert proposals(model.drafter, model.target) == proposals(head, target)


def test_load_finds_the_target_that_the_checkpoint_names(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model("llama").save_pretrained(tmp_path / "target")
    named = Target(AutoModelForCausalLM.from_pretrained(tmp_path / "target"))
    head = tiny_head(FAMILIES[0], named)
    save_checkpoint(tmp_path / "best", head)
    for model in (mtp.load(tmp_path / "best"), mtp.load(tmp_path / "best", str(tmp_path / "target"))):
        assert proposals(model.drafter, model.target) == proposals(head, named)


def test_a_target_that_is_gone_is_named_in_the_error(tmp_path: Path, target: Target) -> None:
    target.causal_lm.config.name_or_path = str(tmp_path / "moved away")
    try:
        saved(tmp_path / "best", target)
    finally:
        target.causal_lm.config.name_or_path = ""
    with pytest.raises(CheckpointError, match="moved away"):
        mtp.load(tmp_path / "best")


def test_a_target_loaded_already_can_be_handed_over(tmp_path: Path, target: Target) -> None:
    head = saved(tmp_path / "best", target)
    model = mtp.load(tmp_path / "best", target=target.causal_lm)
    assert proposals(model.drafter, model.target) == proposals(head, target)


def test_the_wrong_target_is_refused_by_fingerprint(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    other = tiny_target("llama", seed=1)
    with pytest.raises(CheckpointError, match=r"fingerprint.*differ"):
        load_head(tmp_path / "best", other)
    assert load_head(tmp_path / "best", other, check_fingerprint=False)


def test_a_target_of_other_sizes_is_refused(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    with pytest.raises(CheckpointError, match="architecture"):
        load_head(tmp_path / "best", tiny_target("llama", vocab=30))
    with pytest.raises(ValueError, match="vocab_size"):
        load_head(tmp_path / "best", tiny_target("llama", vocab=30), check_fingerprint=False)


@pytest.mark.parametrize("name", ["config.json", "heads.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, target: Target, name: str) -> None:
    saved(tmp_path / "best", target)
    (tmp_path / "best" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_head(tmp_path / "best", target)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        mtp.load(tmp_path / "nowhere")


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, target: Target) -> None:
    target.causal_lm.save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="describes no head"):
        load_head(tmp_path / "plain", target)


def test_a_truncated_weight_file_is_refused_with_its_name(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    path = tmp_path / "best" / "heads.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"heads\.safetensors"):
        load_head(tmp_path / "best", target)


def test_a_damaged_config_is_refused_with_its_name(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    path = tmp_path / "best" / "config.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_head(tmp_path / "best", target)


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target, "medusa")
    change_config(tmp_path / "best", layers=2)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_head(tmp_path / "best", target)


def test_an_unknown_family_is_refused_with_those_there_are(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    change_config(tmp_path / "best", family="crystal ball")
    with pytest.raises(ValueError, match=r"crystal ball.*" + FAMILIES[0]):
        load_head(tmp_path / "best", target)


def test_an_unknown_size_is_refused_by_name(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    change_config(tmp_path / "best", colour="blue")
    with pytest.raises(ValueError, match="colour"):
        load_head(tmp_path / "best", target)


def test_a_newer_format_is_refused(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)
    path = tmp_path / "best" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_head(tmp_path / "best", target)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(tmp_path: Path, target: Target) -> None:
    with pytest.raises(ValueError, match="draft vocabulary"):
        HeadConfig(hidden_size=8, vocab_size=10, draft_vocab_size=11)
    saved(tmp_path / "best", target)
    change_config(tmp_path / "best", draft_vocab_size=target.vocab_size + 1)
    with pytest.raises(ValueError, match="draft vocabulary"):
        load_head(tmp_path / "best", target)


@pytest.mark.parametrize("ids", [[1, 1, 2], [1, 2], [1, 2, 99]])
def test_draft_ids_that_name_no_vocabulary_are_refused(target: Target, ids: list[int]) -> None:
    head = tiny_head(FAMILIES[0], target, draft_vocab=3)
    with pytest.raises(ValueError):
        head.set_draft_vocabulary(torch.tensor(ids))


# ---- writing ------------------------------------------------------------------------------------------------------


def fail_to_write(*args: Any, **kwargs: Any) -> None:
    Path(args[1]).write_bytes(b"half of it")
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = saved(tmp_path / "best", target)
    before = {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()}
    monkeypatch.setattr("mtp.checkpoint.save_file", fail_to_write)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path / "best", tiny_head(FAMILIES[0], target, seed=7))
    assert {path.name: path.read_bytes() for path in (tmp_path / "best").iterdir()} == before
    assert strays(tmp_path / "best") == []
    assert proposals(load_head(tmp_path / "best", target), target) == proposals(head, target)


def test_a_first_checkpoint_that_fails_leaves_nothing(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp.checkpoint.save_file", fail_to_write)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path / "best", target)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_the_callers_own_files_leaves_the_last_good_checkpoint(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target)

    def interrupted(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path / "best", tiny_head(FAMILIES[0], target, seed=7), also=interrupted)
    assert strays(tmp_path / "best") == []
    assert load_head(tmp_path / "best", target)


def test_a_checkpoint_replaces_the_one_before_it(tmp_path: Path, target: Target) -> None:
    saved(tmp_path / "best", target, FAMILIES[0])
    (tmp_path / "best" / "left over").write_text("old")
    head = tiny_head(FAMILIES[-1], target, seed=9)
    save_checkpoint(tmp_path / "best", head)
    assert not (tmp_path / "best" / "left over").exists()
    assert proposals(load_head(tmp_path / "best", target), target) == proposals(head, target)
    assert strays(tmp_path / "best") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path, target: Target, family: str) -> None:
    save_checkpoint(tmp_path / "best", tiny_head(family, target), bundle_target=True, acceptance={})
    files = [path for path in (tmp_path / "best").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md", ".jinja", ".txt"}
    assert not any(path.read_bytes()[:2] in (b"\x80\x02", b"PK") for path in files)


def test_a_head_trained_on_one_target_does_not_carry_the_targets_weights(tmp_path: Path, target: Target) -> None:
    head = saved(tmp_path / "best", target)
    assert not any("target" in name for name in head.state_dict())


def test_the_model_card_states_what_was_measured(tmp_path: Path, target: Target) -> None:
    measured = {
        "mean_accepted_length": 2.345,
        "target_passes": 100,
        "categories": {"code": {"mean_accepted_length": 3.0, "target_passes": 40}},
        "data": "held-out answers",
    }
    save_checkpoint(tmp_path / "best", tiny_head(FAMILIES[0], target), acceptance=measured, training={"lr": 0.1})
    card = (tmp_path / "best" / "README.md").read_text()
    for words in ("2.35", "| code | 3.00 | 40 |", "held-out answers", '"lr": 0.1', target.fingerprint()):
        assert words in card or words.replace("2.35", "2.34") in card
    assert json.loads((tmp_path / "best" / "acceptance.json").read_text()) == measured


# ---- files and folders --------------------------------------------------------------------------------------------


def test_whole_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError), whole_file(path) as staged:
        staged.write_text(None)
    assert json.loads(path.read_text()) == {"a": 1}
    assert strays(path) == []


def test_whole_folder_survives_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    (tmp_path / f".best.{os.getpid()}.partial").mkdir()
    (tmp_path / f".best.{os.getpid()}.partial" / "old").write_text("x")
    with whole_folder(tmp_path / "best", Path.is_dir) as staged:
        (staged / "new").write_text("y")
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["new"]
    assert strays(tmp_path / "best") == []


@pytest.mark.parametrize("moment", ["before the old one is moved", "before the new one is", "behind it"])
def test_a_folder_that_was_being_replaced_when_its_writer_was_killed_is_whole_again(
    moment: str, tmp_path: Path
) -> None:
    folder = tmp_path / "best"
    folder.mkdir()
    (folder / "state").write_text("old")
    if (writer := os.fork()) == 0:
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        replace, calls = os.replace, itertools.count()

        def cut_short(*arguments: Any) -> None:
            if next(calls) == ["before the old one is moved", "before the new one is"].index(moment):
                kill()
            replace(*arguments)

        os.replace = cut_short if moment != "behind it" else replace
        with whole_folder(folder, Path.is_dir) as staged:
            (staged / "state").write_text("new")
            shutil.rmtree = lambda *arguments, **options: kill()
        os._exit(1)  # it should have been killed
    assert os.WTERMSIG(os.waitpid(writer, 0)[1]) == signal.SIGKILL
    restore_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert (folder / "state").read_text() == ("new" if moment == "behind it" else "old")


def test_what_a_living_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / f".best.{os.getppid()}.partial"
    other.mkdir()
    restore_folder(tmp_path / "best")
    assert other.is_dir()


def test_a_folder_of_other_things_is_not_replaced(target: Target, tmp_path: Path) -> None:
    """A checkpoint takes the place of a folder, which must not be somebody's home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(OSError, match=r"not empty: .*home'$"):
        saved(tmp_path / "home", target)
    assert (tmp_path / "home" / "letters.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # into an empty folder, and in the place of a checkpoint
        saved(tmp_path / "empty", target)
