"""Distillation from a server: exact token ids or none, through failures, and the same data as from the target."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from mtp.target import Target
from tests.test_distill import options, prompts_file, shards, target, tokenizer  # noqa: F401  (fixtures)
from train import distill as program
from train.config import TargetConfig
from train.data import DataError
from train.distill import distill, write_answers
from train.distill_options import Options, parse_arguments
from train.endpoint import Endpoint, Server
from train.generation import Sampling
from train.replies import check_text, spelled, token_ids, with_end


class TinyServer(ThreadingHTTPServer):
    """Serves a target over ``/v1/completions``.

    Attributes:
        style: how it tells tokens: ``ids`` (vLLM), ``spelled ids`` (older vLLM), ``texts`` (logprobs) or ``nothing``.
        failures: what goes wrong with a request, by its number.
        seen: bodies of the requests that were answered or refused.
    """

    daemon_threads = True

    def __init__(self, target: Target, tokenizer: PreTrainedTokenizerFast):  # noqa: F811
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.tokenizer = target, tokenizer
        self.style = "ids"
        self.strict = False
        self.extra_prompt_token = False
        self.shift = 0  # between its own token ids and those that it gives: another model's
        self.failures: dict[int, str] = {}
        self.requests = 0
        self.seen: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([body["prompt"]])
        ends = self.target.eos_token_ids
        with self.lock, torch.no_grad():
            ids = self.target.causal_lm.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=body["max_tokens"],
                do_sample=False,
                pad_token_id=0,
            )[0, prompt.shape[1] :].tolist()
        stopped = ids[-1] in ends
        texts = [self.tokenizer.decode([token]) for token in ids]
        choice: dict[str, Any] = {"text": "".join(texts), "finish_reason": "stop" if stopped else "length"}
        if self.style == "ids":
            choice["token_ids"] = [(token + self.shift) % self.target.vocab_size for token in ids]
            choice["prompt_token_ids"] = [1] * self.extra_prompt_token + body["prompt"]
        elif self.style == "spelled ids":
            shifted = [(token + self.shift) % self.target.vocab_size for token in ids]
            choice["logprobs"] = {"tokens": [f"token_id:{token}" for token in shifted]}
        elif self.style == "texts":  # and without the end token, as most do
            kept = texts[:-1] if stopped else texts
            choice |= {"text": "".join(kept), "logprobs": {"tokens": kept}, "stop_reason": ids[-1] if stopped else None}
        return {"choices": [choice]}


class Handler(BaseHTTPRequestHandler):
    server: TinyServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = self.server.requests
            self.server.requests += 1
            self.server.headers.append(self.headers)
        failure = self.server.failures.get(number)
        if failure == "hang up":
            self.connection.close()
        elif failure == "half":
            self.reply(200, b'{"choices": [')
        elif failure in ("abort", "null"):
            reason = None if failure == "null" else failure
            half = {"choices": [{"text": "t1", "token_ids": [1], "finish_reason": reason}]}
            self.reply(200, json.dumps(half).encode())
        elif failure is not None:
            self.reply(int(failure), b"busy")
        elif self.server.strict and "return_token_ids" in body:
            self.reply(400, b"Unrecognized request argument supplied: return_token_ids")
        else:
            self.server.seen.append(body)
            self.reply(200, json.dumps(self.server.answer(body)).encode())

    def reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(target: Target, tokenizer: PreTrainedTokenizerFast) -> Iterator[TinyServer]:  # noqa: F811
    server = TinyServer(target, tokenizer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    paused: list[float] = []
    monkeypatch.setattr("train.endpoint.wait", lambda seconds, stop: paused.append(seconds))
    return paused


@pytest.fixture
def folder(target: Target, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:  # noqa: F811
    """The target on disk, without its weights."""
    target.causal_lm.config.save_pretrained(tmp_path / "target")
    target.causal_lm.generation_config.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def endpoint(server: TinyServer, folder: Path, tokenizer: PreTrainedTokenizerFast) -> Endpoint:  # noqa: F811
    return Endpoint(Server(server.url, "tiny", concurrency=4, retries=3), TargetConfig(path=str(folder)), tokenizer)


TINY = TargetConfig(path="tiny")


@pytest.mark.parametrize("style", ["ids", "spelled ids", "texts"])
def test_answers_of_a_server_are_those_of_the_target_itself(
    style: str,
    server: TinyServer,
    endpoint: Endpoint,
    target: Target,  # noqa: F811
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    options: Options,  # noqa: F811
    tmp_path: Path,
) -> None:
    server.style = style
    distill(target, tokenizer, options, TINY)
    remote = Options(**{**vars(options), "output": tmp_path / "remote"})
    write_answers(endpoint, remote, TINY)
    assert shards(remote.output) == shards(options.output)
    record = json.loads((remote.output / "distill.json").read_text())
    assert record["fingerprint"] is None
    assert record["settings"]["served_as"] == "tiny"
    assert record["counts"]["rows"] == 20


def test_requests_ask_for_ids_and_turn_the_targets_own_penalties_off(
    server: TinyServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    endpoint([[5, 6, 7]], Sampling(4, 0.7, 0.9), seed=3, end_ids=endpoint.end_ids)
    (body,) = server.seen
    assert body["prompt"] == [5, 6, 7]
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (4, 0.7, 0.9)
    assert (body["repetition_penalty"], body["top_k"], body["min_p"]) == (1.0, -1, 0.0)
    assert body["stop_token_ids"] == sorted(endpoint.end_ids)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert 0 <= body["seed"] < 2**31


def test_a_server_that_refuses_extensions_is_asked_without_them(server: TinyServer, endpoint: Endpoint) -> None:
    server.strict, server.style = True, "texts"
    first = endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)
    assert server.requests == 2
    assert endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids) == first
    assert server.requests == 3  # it is remembered


@pytest.mark.parametrize("failure", ["503", "429", "500", "hang up", "half", "abort", "null"])
def test_failures_that_pass_are_lived_through(
    failure: str, server: TinyServer, endpoint: Endpoint, no_pauses: list[float]
) -> None:
    expected = endpoint([[5, 6, 7]] * 6, Sampling(6), seed=0, end_ids=endpoint.end_ids)
    server.failures = dict.fromkeys(range(server.requests, server.requests + 7, 2), failure)
    assert endpoint([[5, 6, 7]] * 6, Sampling(6), seed=0, end_ids=endpoint.end_ids) == expected
    assert len(no_pauses) == 4


def test_half_an_answer_is_no_answer(server: TinyServer, endpoint: Endpoint) -> None:
    server.failures = dict.fromkeys(range(100), "abort")
    with pytest.raises(DataError, match=r"finish_reason 'abort', expected stop or length\).*the same command goes on"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


@pytest.mark.parametrize("style", ["ids", "spelled ids"])
def test_ids_of_another_tokenizer_are_refused(style: str, server: TinyServer, endpoint: Endpoint) -> None:
    server.style, server.shift = style, 1
    with pytest.raises(DataError, match=r"server's text is .* but its token ids read .* by the target's tokenizer"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


def test_texts_are_compared_by_what_all_tokenizers_show_alike(tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    ids = tokenizer("abcd", add_special_tokens=False).input_ids
    end = tokenizer.eos_token_id
    for shown in ("abcd", " abcd\ufffd", "ab cd", "", None):
        check_text(ids, shown, tokenizer)
        check_text([*ids, end], shown, tokenizer)
    for other in ("abce", "ab", "Abcd"):
        with pytest.raises(DataError, match="another one"):
            check_text(ids, other, tokenizer)


@pytest.mark.parametrize("choice", [{"token_ids": ["x"]}, {"token_ids": 3}, {"logprobs": {"tokens": ["token_id:x"]}}])
def test_what_is_no_token_id_is_refused(choice: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:  # noqa: F811
    with pytest.raises(DataError, match="no token ids but"):
        token_ids(choice, tokenizer)


def test_pauses_grow(server: TinyServer, endpoint: Endpoint, no_pauses: list[float]) -> None:
    server.failures = dict.fromkeys(range(100), "503")
    with pytest.raises(DataError, match=r"failed 4 times in a row \(status 503: busy\).*the same command goes on"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)
    assert no_pauses == [0.5, 1.0, 2.0]


def test_a_refusal_is_not_repeated(server: TinyServer, endpoint: Endpoint) -> None:
    server.failures = dict.fromkeys(range(100), "404")
    with pytest.raises(DataError, match="refuses a request, status 404"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)
    assert server.requests == 2  # with vLLM's extensions and without


def test_what_a_server_left_undone_is_done_by_the_same_command(
    server: TinyServer,
    endpoint: Endpoint,
    target: Target,  # noqa: F811
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
    options: Options,  # noqa: F811
    tmp_path: Path,
) -> None:
    remote = Options(**{**vars(options), "output": tmp_path / "remote"})
    server.failures = dict.fromkeys(range(12, 1000), "503")  # down in the middle of the second shard of eight
    with pytest.raises(DataError, match="failed 4 times in a row"):
        write_answers(endpoint, remote, TINY)
    assert list(shards(remote.output)) == ["answers-00000.parquet"]
    server.failures = {}
    server.seen.clear()
    write_answers(endpoint, remote, TINY)
    assert len(server.seen) == 12
    distill(target, tokenizer, options, TINY)
    assert shards(remote.output) == shards(options.output)


def test_requests_run_side_by_side(server: TinyServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4, timeout=20)
    answer = server.answer

    def waiting(body: dict[str, Any]) -> dict[str, Any]:
        together.wait()
        return answer(body)

    monkeypatch.setattr(server, "answer", waiting)
    assert len(endpoint([[5, 6, 7]] * 8, Sampling(3), seed=0, end_ids=endpoint.end_ids)) == 8


def test_text_without_ids_is_refused(server: TinyServer, endpoint: Endpoint) -> None:
    server.style = "nothing"
    with pytest.raises(DataError, match=r"text without token ids.*vLLM 0\.10\.2"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


def test_a_server_that_adds_prompt_tokens_is_refused(server: TinyServer, endpoint: Endpoint) -> None:
    server.extra_prompt_token = True
    with pytest.raises(DataError, match="read 4 other prompt tokens than the 3 that were sent"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


def test_ids_beyond_the_targets_vocabulary_are_refused(server: TinyServer, endpoint: Endpoint) -> None:
    endpoint.vocab_size = 3
    with pytest.raises(DataError, match=r"answered with token id \d+; the target has tokens 0 to 2. Is 'tiny' the"):
        endpoint([[1, 2, 2]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": ["text"]}, {"error": "no"}])
def test_replies_of_another_kind_are_refused(reply: dict[str, Any], server: TinyServer, endpoint: Endpoint) -> None:
    server.answer = lambda body: reply  # type: ignore[method-assign]
    with pytest.raises(DataError, match="A reply has no choices"):
        endpoint([[5, 6, 7]], Sampling(6), seed=0, end_ids=endpoint.end_ids)


def test_token_texts_count_only_when_they_are_what_the_tokenizer_makes_of_the_text(
    tokenizer: PreTrainedTokenizerFast,  # noqa: F811
) -> None:
    ids = tokenizer("abc", add_special_tokens=False).input_ids
    assert spelled(["a", "b", "c"], "abc", tokenizer) == ids
    assert token_ids({"text": "abc", "logprobs": {"tokens": ["a", "b", "c"]}}, tokenizer) == ids
    for tokens, text in ((["ab", "c"], "abc"), (["a", "b"], "abc"), (["a", "\ufffd"], "a\ufffd")):
        with pytest.raises(DataError, match="does not come back as the tokens"):
            spelled(tokens, text, tokenizer)


def test_the_end_token_is_put_back_where_it_is_known() -> None:
    assert with_end([5], {"finish_reason": "length"}, {1, 2}) == [5]
    assert with_end([5, 2], {"finish_reason": "stop"}, {1, 2}) == [5, 2]
    assert with_end([5], {"finish_reason": "stop", "stop_reason": 2}, {1, 2}) == [5, 2]
    assert with_end([], {"finish_reason": "stop", "stop_reason": None}, {1}) == [1]
    with pytest.raises(DataError, match=r"by which of \[1, 2\]"):
        with_end([5], {"finish_reason": "stop", "stop_reason": None}, {1, 2})


def test_the_program_distils_from_a_server_without_the_targets_weights(
    server: TinyServer,
    folder: Path,
    prompts_file: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program.main(
        [
            *("--target", str(folder), "--endpoint", server.url, "--served-as", "tiny", "--concurrency", "4"),
            *("--output", str(tmp_path / "data"), "--prompts", str(prompts_file), "--max-new-tokens", "8"),
        ]
    )
    assert "20 rows" in capsys.readouterr().out
    assert {body["model"] for body in server.seen} == {"tiny"}


def test_a_server_that_is_not_there_is_one_line(folder: Path, prompts_file: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(SystemExit, match=r"error: http://127\.0\.0\.1:9/v1 failed 1 times in a row"):
        program.main(
            [
                *("--target", str(folder), "--endpoint", "http://127.0.0.1:9/v1", "--retries", "0"),
                *("--output", str(tmp_path / "data"), "--prompts", str(prompts_file), "--max-new-tokens", "8"),
            ]
        )
    with pytest.raises(SystemExit, match="error: Cannot load the tokenizer of"):
        program.main(
            ["--target", str(tmp_path / "none"), "--endpoint", "http://127.0.0.1:9/v1", "--output", str(tmp_path / "d")]
        )


def test_the_command_line_names_the_server() -> None:
    arguments = ["--target", "org/model", "--output", "data", "--endpoint", "http://host/v1", "--concurrency", "7"]
    _, _, options = parse_arguments(arguments)  # noqa: F811
    assert options.server == Server("http://host/v1", "org/model", concurrency=7)
    assert parse_arguments(arguments[:4])[2].server is None
