"""serve/generate.py: text as it grows, which of it is coloured, and what the program prints."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from talking import byte_tokenizer, knowing, plain_answer, save_talking_checkpoint
from tiny import random_prompts, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import mtp
import serve.generate
from mtp.model import _listener
from mtp.target import Target
from mtp.traffic import TrafficLog, read_traffic
from serve.generate import Generated, comparison_table, counters, main
from serve.terminal import KEPT_STYLE, Piece, Printer, TokenText, pieces_of, styled, visible

TOKENIZER = byte_tokenizer()
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_checkpoint(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> mtp.SpeculativeModel:
    return mtp.load(checkpoint)


def encode(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


# Text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
def test_pieces_add_up_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    ids = encode(text)
    pieces = pieces_of(TOKENIZER, encode("the 猫"), ids, [False] * len(ids))
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(ids)
    assert all("\ufffd" not in piece.text for piece in pieces)


def test_a_character_of_several_tokens_comes_whole() -> None:
    ids = encode("a猫b")
    assert len(ids) == 5
    text = TokenText(TOKENIZER)
    assert [text.push(token) for token in ids] == [("a", False), None, None, ("猫", False), ("b", False)]


def test_an_answer_cut_inside_a_character_is_flushed() -> None:
    ids = encode("ok 猫")[:-1]
    pieces = pieces_of(TOKENIZER, [], ids, [False] * len(ids))
    assert "".join(piece.text for piece in pieces) == TOKENIZER.decode(ids) == "ok \ufffd"


def test_special_tokens_have_no_text() -> None:
    ids = [*encode("the end"), TOKENIZER.eos_token_id]
    pieces = pieces_of(TOKENIZER, [TOKENIZER.pad_token_id], ids, [False] * len(ids))
    assert "".join(piece.text for piece in pieces) == "the end"


def test_spaces_survive_a_tokenizer_that_drops_the_first_one() -> None:
    words = {"▁the": 0, "▁cat": 1, "s": 2, "?": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1]) == "cat"
    text = TokenText(tokenizer, prompt=[0])
    assert [piece.text for token in (1, 2, 1) if (piece := text.push(token))] == [" cat", "s", " cat"]


def test_a_piece_counts_as_guessed_only_if_all_its_tokens_were() -> None:
    ids = encode("a猫b猫")
    kept = [True, True, True, True, False, True, False, True]
    assert pieces_of(TOKENIZER, [], ids, kept) == [("a", True), ("猫", True), ("b", False), ("猫", False)]


def test_guessed_text_stands_out() -> None:
    text = styled([Piece("the ", False), Piece("cat", True), Piece(" sat", False)])
    assert text.plain == "the cat sat"
    coloured = {text.plain[span.start : span.end] for span in text.spans if span.style == KEPT_STYLE}
    assert coloured == {"cat"}


def test_a_model_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b[2Jb\r\x07\x9b\n\tc é👩‍💻") == "a␛[2Jb␍␇\ufffd\n\tc é👩‍💻"


def printed(console: Console, kept: bool = True) -> str:
    printer = Printer(TOKENIZER, [], console)
    for token in encode("[red]the cat"):
        printer.on_token(0, token, kept)
    printer.end()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_colour_goes_to_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"force_terminal": True, "color_system": "standard"}
    coloured = printed(Console(file=io.StringIO(), **terminal))
    assert "\x1b[1;32m" in coloured
    assert ANSI.sub("", coloured) == "[red]the cat\n"
    assert not ANSI.search(printed(Console(file=io.StringIO(), **terminal), kept=False))
    assert "32m" not in printed(Console(file=io.StringIO(), no_color=True, **terminal))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(Console(file=io.StringIO(), **terminal))
    assert printed(Console(file=io.StringIO())) == "[red]the cat\n"


# The listener


def test_the_listener_hears_what_the_result_says(model: mtp.SpeculativeModel) -> None:
    prompts = random_prompts([5, 8, 3], vocab=250)
    knower = knowing(model, prompts, 11)
    for batch in ([prompts[0]], prompts):
        heard: list[list[tuple[int, bool]]] = [[] for _ in batch]
        longest = max(map(len, batch))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        out = knower.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=11,
            do_sample=False,
            return_dict_in_generate=True,
            on_token=lambda row, token, kept, heard=heard: heard[row].append((token, kept)),
        )
        for row, pairs in enumerate(heard):
            new = out.sequences[row, longest:].tolist()
            assert [token for token, _ in pairs] == new[: len(pairs)]
            assert [kept for _, kept in pairs] == out.kept[row]
            assert any(kept for _, kept in pairs)


def test_listener_and_streamer_go_together() -> None:
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.tolist()

        def end(self) -> None:
            pass

    streamer, heard = Streamer(), []
    listen = _listener(streamer, lambda *what: heard.append(what), batch_size=1)
    assert listen is not None
    listen(0, 5, False)
    listen(0, 6, True)
    assert streamer.tokens == [5, 6]
    assert heard == [(0, 5, False), (0, 6, True)]


# The program


def test_the_answer_is_the_targets_and_goes_to_standard_output(
    checkpoint: Path, model: mtp.SpeculativeModel, capsys: Any
) -> None:
    assert main([str(checkpoint), "--prompt", "the cat", "--max-new-tokens", "12"]) == 0
    prompt = model.tokenizer("<|user|>the cat<end><|assistant|>")["input_ids"]
    expected = model.tokenizer.decode(plain_answer(model, prompt, 12), skip_special_tokens=True)
    captured = capsys.readouterr()
    assert captured.out == expected + "\n"
    for words in ("12 tokens", "passes of the", "mean accepted length", "tokens/s", "verify"):
        assert words in captured.err


@pytest.mark.parametrize("drafter", [[], ["--drafter", "none"]])
def test_raw_prompts_from_a_file_have_no_template(
    checkpoint: Path, model: mtp.SpeculativeModel, tmp_path: Path, capsys: Any, drafter: list[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("café", encoding="utf-8")
    arguments = [str(checkpoint), "--prompt-file", str(tmp_path / "prompt.txt"), "--raw", "--max-new-tokens", "5"]
    assert main([*arguments, *drafter]) == 0
    expected = plain_answer(model, model.tokenizer("café")["input_ids"], 5)
    assert capsys.readouterr().out == model.tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_sampled_answers_repeat_with_the_seed(checkpoint: Path, capsys: Any) -> None:
    def once(seed: int) -> str:
        options = ["--temperature", "1.5", "--top-k", "0", "--top-p", "0.95", "--seed", str(seed)]
        assert main([str(checkpoint), "--prompt", "the", "--max-new-tokens", "12", *options]) == 0
        return capsys.readouterr().out

    assert once(1) == once(1) != once(2)


def test_both_ways_side_by_side(checkpoint: Path, capsys: Any) -> None:
    assert main([str(checkpoint), "--prompt", "the cat", "--max-new-tokens", "6", "--compare"]) == 0
    out = capsys.readouterr().out
    for words in ("with drafting", "without", "the same token ids", "tokens/s"):
        assert words in out


def test_a_difference_is_said() -> None:
    stats = mtp.AcceptanceStats()
    plain = Generated(encode("the cat"), [False] * len(encode("the cat")), stats, 1.0)
    drafted = Generated(encode("the hat"), [False] * len(encode("the hat")), stats, 1.0)
    caption = str(comparison_table(TOKENIZER, [], drafted, plain).caption)
    assert "token ids differ from new token 1 on" in caption
    assert "other draws" not in caption
    assert "other draws" in str(comparison_table(TOKENIZER, [], drafted, plain, greedy=False).caption)


def test_counters_show_what_is_seen_of_late_beside_what_was_measured() -> None:
    shown = {"measured": 2.9, "recent": 2.25, "promised": 2.4, "rounds": 100, "fallen": False}
    stats = mtp.AcceptanceStats(committed_tokens=9, target_passes=4, drift=shown)
    text = counters(Generated([1, 2], [False, True], stats, 1.0))
    assert "over the last 100 drafted rounds 2.25; measured on held-out text 2.90" in text
    assert "held-out" not in counters(
        Generated([1], [False], mtp.AcceptanceStats(drift={**shown, "recent": None}), 1.0)
    )


def test_a_chat_remembers_until_it_is_told_to_forget(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    said = iter(["hat", "cat", "/clear", "tale", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    seen: list[list[tuple[str, str]]] = []
    real = serve.generate.render

    def render(tokenizer: Any, messages: list[dict[str, str]], raw: bool) -> list[int]:
        seen.append([(message["role"], message["content"]) for message in messages])
        return real(tokenizer, messages, raw)

    monkeypatch.setattr(serve.generate, "render", render)
    assert main([str(checkpoint), "--chat", "--max-new-tokens", "4", "--system", "be"]) == 0
    answers = capsys.readouterr().out
    assert [len(messages) for messages in seen] == [2, 4, 2]
    assert seen[1][:2] == [("system", "be"), ("user", "hat")]
    assert seen[1][2][0] == "assistant"
    assert answers.startswith(seen[1][2][1])
    assert seen[2] == [("system", "be"), ("user", "tale")]


def test_a_chat_survives_a_message_that_is_too_long(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    said = iter(["z" * 200, "cat", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(said))
    assert main([str(checkpoint), "--chat", "--max-new-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert "/clear makes room" in captured.err
    assert "4 tokens" in captured.err


def test_an_answer_ends_at_the_targets_last_position(checkpoint: Path, capsys: Any) -> None:
    assert main([str(checkpoint), "--prompt", "z" * 80, "--raw", "--max-new-tokens", "500"]) == 0
    assert re.search(r"\b(\d+) tokens", capsys.readouterr().err)[1] == "16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "", "--raw"], "The prompt has 0 tokens"),
        (["--prompt", "z" * 200], "fewer than 96"),
        (["--prompt", "a", "--drafter", "nonsense"], "No drafter 'nonsense'"),
        (["--prompt-file", "/nowhere/at/all"], "cannot be read"),
    ],
)
def test_errors_are_said_without_a_traceback(checkpoint: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([str(checkpoint), *options])
    assert str(stopped.value.code).startswith("error: ")
    assert message in str(stopped.value.code)


@pytest.mark.parametrize(
    "options",
    [
        ["--top-k", "5"],
        ["--temperature", "-1"],
        ["--chat", "--compare"],
        ["--compare", "--drafter", "none"],
        ["--compare", "--log", "folder"],
        ["--log-prompts", "5"],
        ["--log", "folder", "--log-prompts", "some"],
        ["--log", "folder", "--log-bytes", "0"],
    ],
)
def test_contradictions_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["folder", *([] if "--chat" in options else ["--prompt", "a"]), *options])
    assert stopped.value.code == 2


def test_answers_are_logged_where_one_asks_for_it(
    checkpoint: Path, model: mtp.SpeculativeModel, tmp_path: Path
) -> None:
    arguments = [str(checkpoint), "--prompt", "the cat", "--max-new-tokens", "6", "--log", str(tmp_path / "log")]
    assert main(arguments) == 0
    assert main([*arguments, "--log-prompts", "all"]) == 0
    without, whole = read_traffic(tmp_path / "log", model.target)
    assert without.answer == whole.answer
    assert (without.context, without.whole) == ((), False)
    assert "the cat" in TOKENIZER.decode(whole.context)


def test_a_log_of_another_target_is_refused_before_anything_is_decoded(checkpoint: Path, tmp_path: Path) -> None:
    with TrafficLog(tmp_path, Target(tiny_model(seed=1))) as log:
        log.add([[1]], [[2]], [[False]], {})
    with pytest.raises(SystemExit, match=r"error: --log: .* fingerprint .* differ"):
        main([str(checkpoint), "--prompt", "the cat", "--log", str(tmp_path)])
