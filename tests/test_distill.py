"""Distillation: what is recorded is what the target generated, and an interrupted run loses no whole shard."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mtp import SpeculativeModel
from mtp.target import Target
from serve.questions import read_questions as questions_to_measure_on
from train import distill as program
from train.config import TargetConfig
from train.data import DataError, is_held_out, load_rows, split_rows
from train.distill import distill
from train.distill_options import Options, parse_arguments
from train.generation import Generator, Progress, Sampling
from train.prompts import Question, check_messages, prompt_ids, read_dataset, read_questions, tokenise
from train.self_prompts import UserTurn, user_text

SPECIAL = ["<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TINY = TargetConfig(path="tiny")


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a character, ASCII only."""
    characters = [*sorted(c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii()), "Ġ", "Ċ"]
    vocabulary = {token: at for at, token in enumerate(SPECIAL + characters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        extra_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerFast) -> Target:
    """A random chat model whose greedy answers are varied, and sometimes end."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.6,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    lm = LlamaForCausalLM(config).eval()
    lm.generation_config.eos_token_id = [tokenizer.eos_token_id, 40, 60, 75]  # often enough for tests
    return Target(lm)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"question {at} " + "x" * (at % 7)} for at in range(20)])


@pytest.fixture
def options(tmp_path: Path, prompts_file: Path) -> Options:
    return Options(tmp_path / "data", prompts=prompts_file, max_new_tokens=16, batch_size=4, shard_size=8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of every call of ``generate``."""
    seen: list[int] = []
    generate = SpeculativeModel.generate

    def counting(self: SpeculativeModel, *args: Any, **kwargs: Any) -> Any:
        seen.append(len(kwargs["input_ids"]))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeModel, "generate", counting)
    return seen


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def shards(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: pyarrow.parquet.read_table(path).to_pylist() for path in sorted(folder.glob("*.parquet"))}


def changed(options: Options, **changes: Any) -> Options:
    return Options(**{**vars(options), **changes})


def test_recorded_ids_are_what_transformers_generates_greedily(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    rows = [row for shard in shards(options.output).values() for row in shard]
    assert len(rows) == 20
    for row in rows:
        prompt = torch.tensor([row["prompt_ids"]])
        alone = target.causal_lm.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        assert row["response_ids"] == alone[0, prompt.shape[1] :].tolist()


def test_end_token_is_recorded_and_decides_the_finish_reason(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    ends = set(target.eos_token_ids)
    reasons = set()
    for row in (row for shard in shards(options.output).values() for row in shard):
        reasons.add(row["finish_reason"])
        assert not ends.intersection(row["response_ids"][:-1])
        assert (row["response_ids"][-1] in ends) == (row["finish_reason"] == "stop")
        assert row["finish_reason"] == "stop" or len(row["response_ids"]) == 16
    assert reasons == {"stop", "length"}


def test_prompts_go_through_the_chat_template_and_keep_their_order(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    rows = load_rows(options.output)
    first = tokenizer.decode(rows[0].prompt_ids)
    assert first == "<|user|>question 0 <|end|>\n<|assistant|>"
    assert [tokenizer.decode(row.prompt_ids).split()[1] for row in rows] == [str(at) for at in range(20)]


def test_penalties_of_the_generation_config_are_left_out_and_the_config_is_unchanged(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    config = target.causal_lm.generation_config
    config.repetition_penalty = 5.0
    try:
        distill(target, tokenizer, changed(options, output=options.output / "other"), TINY)
        assert target.causal_lm.generation_config is config
    finally:
        config.repetition_penalty = None
    assert shards(options.output) == shards(options.output / "other")


def test_a_finished_folder_is_not_answered_again(target, tokenizer, options, calls):
    distill(target, tokenizer, options, TINY)
    assert calls == [4, 4, 4, 4, 4]
    assert "nothing was left to answer" in distill(target, tokenizer, options, TINY)
    assert len(calls) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lost_shard_is_answered_again_with_the_same_result(target, tokenizer, options, calls, temperature):
    options = changed(options, temperature=temperature)
    distill(target, tokenizer, options, TINY)
    before = shards(options.output)
    calls.clear()
    (options.output / "answers-00001.parquet").unlink()
    distill(target, tokenizer, options, TINY)
    assert calls == [4, 4]
    assert shards(options.output) == before


def test_sampled_answers_follow_the_seed(target, tokenizer, options):
    sampled = changed(options, temperature=1.0)
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        distill(target, tokenizer, changed(sampled, output=options.output / name, seed=seed), TINY)
    first, other, again = (shards(options.output / name) for name in "abc")
    assert first == again
    assert first != other


def test_an_interrupt_keeps_whole_shards_and_the_same_command_resumes(
    target, tokenizer, options, monkeypatch, capsys, prompts_file
):
    distill(target, tokenizer, changed(options, output=options.output / "whole"), TINY)
    generate, calls = SpeculativeModel.generate, []

    def interrupted(self: SpeculativeModel, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(program, "load", lambda config, device: (target, tokenizer))
    monkeypatch.setattr(SpeculativeModel, "generate", interrupted)
    folder = options.output / "cut"
    command = ["--target", "tiny", "--output", str(folder), "--prompts", str(prompts_file)]
    command += ["--max-new-tokens", "16", "--batch-size", "4", "--shard-size", "8"]
    with pytest.raises(SystemExit) as stopped:
        program.main(command)
    assert stopped.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["answers-00000.parquet", "distill.json"]
    program.main(command)
    assert len(calls) == 4 + 3
    assert "20 rows" in capsys.readouterr().out
    assert shards(folder) == shards(options.output / "whole")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.7}, "settings.answers.temperature: 0.0 there, 0.7 now"),
        ({"max_new_tokens": 8}, "settings.answers.max_new_tokens: 16 there, 8 now"),
        ({"seed": 1}, "settings.seed"),
        ({"num_prompts": 5}, "settings.prompts.count: 20 there, 5 now"),
        ({"held_out_fraction": 0.5}, "settings.held_out.fraction"),
    ],
)
def test_other_settings_are_refused_saying_what_differs(target, tokenizer, options, changes, named):
    distill(target, tokenizer, options, TINY)
    with pytest.raises(DataError) as refusal:
        distill(target, tokenizer, changed(options, **changes), TINY)
    assert named in str(refusal.value)


def test_another_target_is_refused(target, tokenizer, options, monkeypatch):
    distill(target, tokenizer, options, TINY)
    monkeypatch.setattr(Target, "fingerprint", lambda self: "another")
    with pytest.raises(DataError, match=r"fingerprint: .* there, 'another' now"):
        distill(target, tokenizer, options, TINY)


def test_a_smaller_batch_may_resume(target, tokenizer, options, calls):
    distill(target, tokenizer, options, TINY)
    (options.output / "answers-00002.parquet").unlink()
    calls.clear()
    distill(target, tokenizer, changed(options, batch_size=2), TINY)
    assert calls == [2, 2]


def test_a_folder_of_unknown_origin_is_refused(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    (options.output / "distill.json").unlink()
    with pytest.raises(DataError, match=r"no distill\.json"):
        distill(target, tokenizer, options, TINY)


def test_held_out_rows_follow_from_the_prompt_alone(target, tokenizer, options):
    options = changed(options, held_out_fraction=0.3)
    line = distill(target, tokenizer, options, TINY)
    record = json.loads((options.output / "distill.json").read_text())
    rows = load_rows(options.output)
    _, held_out = split_rows(rows, 0.3)
    assert record["counts"]["held_out"] == len(held_out) > 0
    assert f"{len(held_out)} held out" in line
    assert record["settings"]["held_out"]["fraction"] == 0.3
    assert [is_held_out(row.prompt_ids, 0.3) for row in reversed(rows)] == [row in held_out for row in reversed(rows)]
    measured_on = questions_to_measure_on(options.output)  # by the folder's own record
    assert [question.prompt_ids for question in measured_on] == [row.prompt_ids for row in held_out]
    assert is_held_out((1, 2, 3), 0.887)  # pinned: the split of data on disk must not move
    assert not is_held_out((1, 2, 3), 0.886)


def test_record_names_target_settings_and_counts(target, tokenizer, options):
    distill(target, tokenizer, options, TINY)
    record = json.loads((options.output / "distill.json").read_text())
    rows = load_rows(options.output)
    assert record["name"] == "tiny"
    assert record["fingerprint"] == target.fingerprint()
    assert record["settings"]["answers"] == {"max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0}
    assert record["counts"]["rows"] == 20
    assert record["counts"]["response_tokens"] == sum(len(row.response_ids) for row in rows)


def test_repeated_prompts_are_answered_once(target, tokenizer, options, calls):
    write_jsonl(options.prompts, [{"prompt": "one"}, {"prompt": "two"}, {"prompt": "one"}])
    distill(target, tokenizer, options, TINY)
    assert calls == [2]


def test_prompts_without_room_for_an_answer_are_skipped_and_counted(target, tokenizer, options, caplog):
    write_jsonl(options.prompts, [{"prompt": "x" * 200}, {"prompt": "short"}])
    with caplog.at_level("WARNING"):
        distill(target, tokenizer, options, TINY)
    assert "1 prompts skipped: too long (more than 112 tokens)" in caplog.text
    assert len(load_rows(options.output)) == 1


def test_no_prompt_left_is_an_error(target, tokenizer, options):
    write_jsonl(options.prompts, [{"prompt": "x" * 200}])
    with pytest.raises(DataError, match="No prompts are left to answer \\(1 too long\\)"):
        distill(target, tokenizer, options, TINY)


def test_answers_longer_than_the_target_are_refused(target, tokenizer, options):
    with pytest.raises(DataError, match="leaves no room"):
        distill(target, tokenizer, changed(options, max_new_tokens=128), TINY)


def test_category_and_source_are_kept(target, tokenizer, options):
    write_jsonl(options.prompts, [{"prompt": "one", "category": "code", "source": "me"}, {"prompt": "two"}])
    distill(target, tokenizer, options, TINY)
    (rows,) = shards(options.output).values()
    assert [(row["category"], row["source"]) for row in rows] == [("code", "me"), ("all", "prompts.jsonl")]


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1]", "line 2: found a list"),
        ("{}", "line 2: found the keys nothing"),
        ('{"text": "a"}', "line 2: found the keys 'text'"),
        ('{"prompt": "a", "messages": []}', "line 2: found both"),
        ('{"prompt": 3}', "line 2: 'prompt' is 3; expected a string"),
        ('{"prompt": "  "}', "line 2: the prompt is empty"),
        ('{"prompt": "a", "category": 3}', "line 2: 'category' is 3"),
        ('{"messages": "a"}', "line 2: 'messages' is 'a'; expected a list"),
        ('{"messages": []}', "line 2: there are no messages"),
        ('{"messages": ["a"]}', "line 2: message 1 is 'a'"),
        ('{"messages": [{"role": "user"}]}', "line 2: message 1"),
        (
            json.dumps({"messages": [USER, {"role": "assistant", "content": "a"}]}),
            "line 2: the last message is of role",
        ),
    ],
)
def test_bad_lines_are_refused_with_file_and_line(tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as refusal:
        list(read_questions(path))
    assert f"{path}, {complaint}" in str(refusal.value)


def test_missing_empty_and_binary_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="No file at"):
        list(read_questions(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="is empty"):
        list(read_questions(tmp_path / "empty.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_questions(tmp_path / "binary.jsonl"))


def test_compressed_prompts_are_read(tmp_path):
    with gzip.open(tmp_path / "prompts.jsonl.gz", "wt") as file:
        file.write('{"messages": [{"role": "user", "content": "hello"}]}\n')
    assert [question.content for question in read_questions(tmp_path / "prompts.jsonl.gz")] == [[USER]]


def test_a_target_without_chat_template_needs_raw_prompts(target, options):
    plain = tiny_tokenizer(template=None)
    for without in (options, changed(options, prompts=None)):
        with pytest.raises(DataError, match=r"no chat template.*--raw"):
            distill(target, plain, without, TINY)
    assert not options.output.exists()
    distill(target, plain, changed(options, raw=True), TINY)
    assert plain.decode(load_rows(options.output)[1].prompt_ids) == "question 1 x"


def test_raw_refuses_messages(tokenizer):
    with pytest.raises(DataError, match=r"file, line 1: .*--raw takes plain texts"):
        tokenise([Question([USER], "file, line 1", "all", "file")], tokenizer, raw=True, longest=None)


def test_what_the_template_refuses_is_refused_with_its_place():
    strict = tiny_tokenizer("{{ raise_exception('no system role here') }}")
    with pytest.raises(DataError, match=r"file, line 1: the chat template refuses .*no system role here"):
        tokenise([Question([USER], "file, line 1", "all", "file")], strict, raw=False, longest=None)


def test_data_set_folder_is_read_and_foreign_answers_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    answered = {"conversation": [USER, {"role": "assistant", "content": "foreign"}], "category": "chat"}
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "train.jsonl", [answered])
    name = str(tmp_path / "folder")
    (question,) = read_dataset(name, None, "train", "conversation")
    assert question.content == [USER]
    assert question.category == "chat"
    with pytest.raises(DataError, match="no column 'messages'; it has conversation, category"):
        list(read_dataset(name, None, "train", "messages"))
    with pytest.raises(DataError, match="Cannot load split 'test'"):
        list(read_dataset(name, None, "test", "conversation"))


def test_user_turn_is_read_off_the_template(tokenizer):
    turn = UserTurn.of(tokenizer)
    assert tokenizer.decode(turn.header) == "<|user|>"
    assert tokenizer.decode([turn.end_id]) == turn.end_text == "<|end|>"


def test_user_turn_closed_by_plain_words_is_cut_there():
    words = tiny_tokenizer("<s>{% for m in messages %}{{ '[U] ' + m['content'] + ' [/U]' }}{% endfor %}")
    turn = UserTurn.of(words)
    assert words.decode(turn.header) == "<s>[U]"
    assert turn.end_id is None
    sampled = words(" what? [/U] because", add_special_tokens=False).input_ids
    assert user_text(sampled, words, turn, {4}) == ("what?", "ok")
    assert user_text(sampled[:5], words, turn, {4})[1] == "cut off"


def test_templates_without_a_user_turn_are_refused():
    with pytest.raises(DataError, match="does not show the user's words"):
        UserTurn.of(tiny_tokenizer("<|user|>"))
    with pytest.raises(DataError, match="nothing before the user's words"):
        UserTurn.of(tiny_tokenizer("{{ messages[0]['content'] }}<|end|>"))


@pytest.mark.parametrize(("text", "verdict"), [("hi<|end|>", "ok"), (" \n<|end|>", "empty"), ("hi", "cut off")])
def test_sampled_turns_are_judged(tokenizer, text, verdict):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert user_text(ids, tokenizer, UserTurn.of(tokenizer), {4})[1] == verdict


def test_control_tokens_inside_a_sampled_turn_make_it_malformed(tokenizer):
    ids = tokenizer("hi<|assistant|>you<|end|>", add_special_tokens=False).input_ids
    assert user_text(ids, tokenizer, UserTurn.of(tokenizer), {4})[1] == "malformed"


def own(options: Options, folder: str) -> Options:
    return changed(options, prompts=None, num_prompts=12, output=options.output / folder, max_prompt_tokens=24)


def test_target_writes_its_own_prompts_and_answers_them(target, tokenizer, options):
    options = own(options, "own")
    distill(target, tokenizer, options, TINY)
    texts = [json.loads(line)["prompt"] for line in (options.output / "prompts.jsonl").read_text().splitlines()]
    rows = load_rows(options.output)
    assert len(set(texts)) == len(texts) == len(rows) == 12
    assert [row.prompt_ids for row in rows] == [prompt_ids(tokenizer, text) for text in texts]
    assert {row["source"] for shard in shards(options.output).values() for row in shard} == {"self-written"}


def test_prompt_writing_resumes_with_the_same_prompts(target, tokenizer, options, monkeypatch, calls):
    distill(target, tokenizer, own(options, "whole"), TINY)
    whole = (options.output / "whole" / "prompts.jsonl").read_text().splitlines()
    cut = own(options, "cut")
    cut.output.mkdir(parents=True)
    record = json.loads((options.output / "whole" / "distill.json").read_text())
    (cut.output / "distill.json").write_text(json.dumps(record))
    rounds = [json.loads(line)["round"] for line in whole]
    assert rounds[0] != rounds[-1]
    kept = [line for line, at in zip(whole, rounds, strict=True) if at == rounds[0]]
    (cut.output / "prompts.jsonl").write_text("".join(line + "\n" for line in kept))
    distill(target, tokenizer, cut, TINY)
    assert (cut.output / "prompts.jsonl").read_text().splitlines() == whole
    assert shards(cut.output) == shards(options.output / "whole")


def test_a_target_that_writes_nothing_usable_is_an_error(target, tokenizer, options, calls):
    with pytest.raises(DataError, match="nothing new in 5 rounds"):
        distill(target, tokenizer, changed(own(options, "own"), max_prompt_tokens=1), TINY)


def test_generator_returns_rows_in_the_callers_order(target, tokenizer):
    prompts = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]
    together = Generator(target, tokenizer, batch_size=2)(prompts, Sampling(6), 0, {4})
    alone = [Generator(target, tokenizer, batch_size=1)([prompt], Sampling(6), 0, {4})[0] for prompt in prompts]
    assert together == alone


def test_progress_counts_every_token_and_every_row(target, tokenizer):
    progress = Progress(3, 0, "answers")
    prompts, ends = [[5, 6, 7, 8, 9], [10], [11, 12, 13]], set(target.eos_token_ids)
    rows = Generator(target, tokenizer, batch_size=2)(prompts, Sampling(6), 0, ends, progress)
    assert progress.tokens == sum(len(row) for row in rows)
    assert progress.bar.n == 3


def test_messages_of_any_roles_may_precede_the_users_turn():
    check_messages([{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"}, USER], "here")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--raw"], "--raw answers plain prompts"),
        (["--top-p", "0.5"], "--top-p has no effect"),
        (["--shard-size", "0"], "expected 1 or more"),
        (["--shard-size", "many"], "invalid whole number value"),
        (["--prompts", "a", "--dataset", "b"], "not allowed with"),
    ],
)
def test_contradictory_arguments_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--target", "t", "--output", "o", *arguments])
    assert complaint in capsys.readouterr().err


def test_command_line_reaches_the_options(tmp_path):
    config, device, options = parse_arguments(
        ["--target", "t", "--output", str(tmp_path), "--num-prompts", "7", "--dtype", "bfloat16", "--device", "cpu"]
    )
    assert (config.path, config.dtype, config.trust_remote_code, device) == ("t", "bfloat16", False, "cpu")
    assert options == Options(tmp_path, num_prompts=7)


def test_a_target_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="Cannot load the target"):
        program.main(["--target", str(tmp_path / "none"), "--output", str(tmp_path)])
