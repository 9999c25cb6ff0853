"""scripts/bench_training.py: what is compared does the same work, and every contender speaks its part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from workshop import make_workshop

from mtp.target import Target
from scripts import bench_training
from scripts.training_contenders.ours import FromMemory, Ours
from scripts.training_contenders.plain import Plain, PlainOverDraftVocabulary
from scripts.training_contenders.shop import Shop
from scripts.training_contenders.theirs import Speculators
from train.batches import training_batch
from train.data import load_rows


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workshop(tmp_path_factory.mktemp("workshop"), rows=12)


def shop(workshop: Path, folder: Path, **options: object) -> Shop:
    """All rows in one step, and the whole vocabulary."""
    arguments = ["--target", str(workshop / "target"), "--data", str(workshop / "rows.jsonl")]
    chosen = bench_training.parse_arguments(arguments)
    vars(chosen).update({"positions": 10_000, "draft_vocab": 24, "lr": 1e-2, "held_out": 2, **options})
    bench_training.write_states(chosen, folder)
    return Shop(folder)


@pytest.mark.parametrize(("simple", "vocabulary"), [(Plain, 24), (PlainOverDraftVocabulary, 15)])
def test_ours_and_the_plain_step_are_the_same_step(
    simple: type[Plain], vocabulary: int, workshop: Path, tmp_path: Path
) -> None:
    made = shop(workshop, tmp_path, draft_vocab=vocabulary)
    ours, plain = Ours(made), simple(made)
    head = ours.trainer.head
    start = [weight.detach().clone() for weight in head.parameters()]
    assert all(map(torch.equal, start, plain.head.parameters()))
    assert len(ours.batches) == len(plain.batches) == 1
    tokens, accuracy = ours.step(ours.batches[0])
    assert plain.step(plain.batches[0]) == (tokens, pytest.approx(accuracy, abs=1e-4))
    # AdamW's first step is the gradient's sign: what matters is the gradient, up to where it is next to nothing.
    moved = [(one.detach() - before).flatten() for one, before in zip(head.parameters(), start, strict=True)]
    other = [(one.detach() - before).flatten() for one, before in zip(plain.head.parameters(), start, strict=True)]
    assert torch.cosine_similarity(torch.cat(moved), torch.cat(other), dim=0) > 0.99


def test_every_row_is_in_one_batch_of_a_pass_within_the_budget(workshop: Path, tmp_path: Path) -> None:
    rows = load_rows(workshop / "rows.jsonl")[2:]
    made = shop(workshop, tmp_path, positions=40)
    for padding in (True, False):
        batches = made.in_order(padding)
        assert sorted(at for batch in batches for at in batch) == list(range(len(rows)))
        for batch in batches:
            lengths = [len(rows[at]) for at in batch]
            assert (len(batch) * max(lengths) if padding else sum(lengths)) <= 40 or len(batch) == 1


def test_contenders_take_turns_in_processes_of_their_own(
    workshop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(workshop / "target"), "--data", str(workshop / "rows.jsonl"), "--draft-vocab", "20"]
    bench_training.main(
        [*arguments, "--passes", "2", "--positions", "60", "--threads", "1", "--output", str(tmp_path / "out.json")]
    )
    printed = capsys.readouterr().out
    figures = json.loads((tmp_path / "out.json").read_text())
    assert set(figures) == {"ours", "ours+start", "plain", "plain+draft"}
    assert all(name in printed for name in figures)
    trained = {name: sum(step["tokens"] for step in figure["steps"]) for name, figure in figures.items()}
    assert len(set(trained.values())) == 1
    for name, figure in figures.items():
        assert figure["tokens_per_second"] > 0
        assert figure["peak_bytes"] > 0
        assert figure["held_out"]["mean_accepted_length"] >= 1
        assert (figure["start_seconds"] > 0) == name.startswith("ours")


def test_speculators_wants_to_know_where_it_is(workshop: Path) -> None:
    with pytest.raises(SystemExit, match="name the folder in which speculators is installed"):
        bench_training.main(["--target", "t", "--data", "d", "--only", "speculators"])


def test_no_contender_trains_the_target(workshop: Path, tmp_path: Path) -> None:
    made = shop(workshop, tmp_path)
    for contender in (Ours(made), Plain(made)):
        contender.step(contender.batches[0])
        assert not any(weight.requires_grad for weight in contender.target.causal_lm.parameters())


def test_what_speculators_trains_guesses_here_as_it_does_there(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its likeliest tokens at every step of a packed batch are those of its weights in this library's head."""
    pytest.importorskip("speculators", reason="speculators is not installed (see scripts/bench_training.py)")
    monkeypatch.setattr(Target, "default_taps", lambda target: (1, 2, 3))  # it wants three different ones
    made = shop(workshop, tmp_path, draft_vocab=15, attention="eager")
    theirs = Speculators(made)
    batch = theirs.batches[0]
    theirs.step(batch)
    guesses, _, _ = theirs.model(**theirs.packed(batch), **theirs.options)
    head = theirs.trained()
    starts = torch.tensor([0, *(len(made.rows[at]) - 1 for at in batch)]).cumsum(0)
    for step, prediction in enumerate(
        head.unroll(training_batch(FromMemory(made, theirs.target), batch), made.settings["steps"])
    ):
        base = prediction.positions - 1 - step
        assert torch.equal(prediction.logits.argmax(-1), guesses[step][0, starts[prediction.rows] + base])
