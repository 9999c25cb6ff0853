"""What a person can mend is one line on every command line: what was found, what was expected, what to do."""

from __future__ import annotations

import ast
import errno
import gzip
import importlib
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from mtp.errors import INTERRUPTED, ExplainedError, command_line, explain
from mtp.files import whole_file, whole_folder
from tests.workshop import make_workshop, recipe
from train import heads

ROOT = Path(__file__).parents[1]
RUN_BY_OTHERS = {"scripts/training_contenders/__main__.py"}  # speaks to the program that started it


def programs() -> list[str]:
    """Everything that is started by a person."""
    files = [path for folder in ("train", "serve", "scripts") for path in (ROOT / folder).rglob("*.py")]
    names = {
        str(path.relative_to(ROOT)) for path in files if "__main__" in path.read_text() and "peers" not in path.parts
    }
    return sorted(names - RUN_BY_OTHERS)


@pytest.mark.parametrize("name", programs())
def test_every_program_leaves_its_errors_to_the_one_place(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    if name == "scripts/scaling.py":  # prints, and reads and writes nothing
        assert not mains
        return
    (main,) = mains
    assert [ast.unparse(decorator) for decorator in main.decorator_list] == ["command_line"]
    others = [
        node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and 'f"error: ' in ast.unparse(node)
    ]
    assert not others


# ---- the one place -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ExplainedError("optim.lr: found -1"), "error: optim.lr: found -1"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x/y"),
            "error: /x/y: Permission denied. Expected to be all",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "error: /x/y: No space left on device. Expected room",
        ),
        (
            IsADirectoryError(errno.EISDIR, "Is a directory", "/x/.y.partial", None, "/x/y"),
            "error: /x/y: Is a directory.",
        ),
        (OSError(errno.EIO, "Input/output error"), "error: Input/output error."),
        (OSError("repo is not\n  a model"), "error: repo is not a model"),
    ],
)
def test_errors_that_can_be_mended_are_a_line(error: Exception, line: str) -> None:
    @command_line
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value.code).startswith(line)
    assert "\n" not in str(ended.value.code)


def test_faults_of_the_program_keep_their_traceback_and_interrupts_their_exit_code() -> None:
    def main(error: BaseException | None) -> int:
        if error is not None:
            raise error
        return 3

    assert command_line(main)(None) == 3
    with pytest.raises(ValueError, match="a fault"):
        command_line(main)(ValueError("a fault"))
    with pytest.raises(SystemExit) as ended:
        command_line(main)(KeyboardInterrupt())
    assert ended.value.code == INTERRUPTED


def test_every_error_of_the_system_that_has_advice_says_what_to_do() -> None:
    for number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EDQUOT):
        said = explain(OSError(number, os.strerror(number), "/x"))
        assert said.startswith(f"/x: {os.strerror(number)}. ")
        assert ":" in said.removeprefix("/x: ")


# ---- real faults ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workshop with a trained ``head``, and everything that may be in the way."""
    folder = make_workshop(tmp_path_factory.mktemp("place"))
    heads.main(recipe(folder, folder / "run", "optim.epochs=1"))
    (folder / "head").symlink_to(folder / "run" / "best")
    (folder / "empty").mkdir()
    (folder / "file").write_bytes(b"\xff\xfe\x00")
    whole = gzip.compress((folder / "rows.jsonl").read_bytes())
    (folder / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "renamed.jsonl.gz").write_bytes((folder / "rows.jsonl").read_bytes())
    for name in ("damaged", "undescribed"):
        (folder / name).mkdir()
    (folder / "damaged" / "answers-00000.parquet").write_bytes(b"PAR1 and nothing else")
    (folder / "undescribed" / "answers-00000.parquet").write_bytes(b"")
    (folder / "undescribed" / "distill.json").write_text("{")
    shutil.copytree(folder / "target", folder / "cut-target")
    os.truncate(folder / "cut-target" / "model.safetensors", 100)
    (folder / "prompts.jsonl").write_text('{"prompt": "t1 t2"}\n')
    return folder


TRAIN, DISTILL, GENERATE, MEASURE, EXPORT = (
    "train.heads",
    "train.distill",
    "serve.generate",
    "serve.measure",
    "serve.export.vllm",
)
ANSWER = "--target {place}/target --raw --max-new-tokens 4"
FAULTS = [
    (TRAIN, "{place}/empty", "No recipe at"),
    (TRAIN, "{place}/file", "is no text .* expected a YAML file"),
    (TRAIN, "data.path={place}/empty", "holds no .parquet files"),
    (TRAIN, "data.path={place}/file", "is not UTF-8 text"),
    (TRAIN, "data.path={place}/cut.jsonl.gz", "is damaged"),
    (TRAIN, "data.path={place}/renamed.jsonl.gz", "is damaged"),
    (TRAIN, "data.path={place}/damaged", "a .parquet file cannot be read"),
    (TRAIN, "output={place}/file", "file: File exists. Expected a folder"),
    (TRAIN, "output={place}/file/run", "file/run: Not a directory. A part of this path is a file"),
    (TRAIN, "dry_run=true output={place}/file", "file: File exists. Expected a folder"),
    (TRAIN, "features.mode=cached features.folder={place}/file", "Not a directory. A part of this path is a file"),
    (TRAIN, "target.path={place}/nowhere", "Cannot load the target .*nowhere"),
    (TRAIN, "target.path={place}/empty", "Cannot load the target .*empty"),
    (TRAIN, "target.path={place}/file", "Cannot load the target .*file"),
    (TRAIN, "target.path={place}/cut-target", "Cannot load the target .*cut-target"),
    (TRAIN, "start.head={place}/file", "No config.json in"),
    (TRAIN, "start.traffic={place}/file", "start.traffic: No logged answers in"),
    (DISTILL, "{answer} --prompts {place}/prompts.jsonl --output {place}/file", "file: (File exists|Not a directory)"),
    (DISTILL, "{answer} --prompts {place}/empty --output {place}/new", "No file at"),
    (DISTILL, "{answer} --dataset {place}/damaged --output {place}/new", "Cannot load split"),
    (DISTILL, "--target {place}/empty --prompts {place}/prompts.jsonl --output {place}/new", "Cannot load the target"),
    (GENERATE, "{place}/head --prompt-file {place}/empty", "The prompt cannot be read from"),
    (GENERATE, "{place}/head --prompt-file {place}/file", "The prompt cannot be read from"),
    (GENERATE, "{place}/head --raw --prompt t1 --log {place}/file", "--log: .*[Ff]ile"),
    (GENERATE, "{place}/empty --prompt t1", "No config.json in"),
    (GENERATE, "{place}/head --prompt t1 --target {place}/empty", "The target .* cannot be loaded"),
    (MEASURE, "{place}/head --data {place}/empty", "holds no .parquet files"),
    (MEASURE, "{place}/head --data {place}/undescribed", "cannot be read|is damaged"),
    (MEASURE, "{place}/head --data {place}/rows.jsonl --output {place}/empty", "is a folder; expected a file"),
    (MEASURE, "{place}/head --data {place}/rows.jsonl --output {place}/file/x.json", "file: .*File exists"),
    (EXPORT, "{place}/head {place}/file", "file: Not a directory"),
    (EXPORT, "{place}/head {place}/target", "target: Directory not empty. It holds other things"),
    (EXPORT, "{place}/head {place}/file/draft", "file: File exists|file/draft: Not a directory"),
    (EXPORT, "{place}/empty {place}/new", "No config.json in"),
]  # fmt: skip


def arguments_of(program: str, words: str, place: Path, output: Path) -> list[str]:
    given = words.replace("{answer}", ANSWER).replace("{place}", str(place)).split()
    if program == TRAIN and "=" in given[0]:
        return recipe(place, output, *given)
    return given


@pytest.mark.parametrize(("program", "words", "message"), FAULTS)
def test_what_is_in_the_way_is_said_in_a_line(
    program: str, words: str, message: str, place: Path, tmp_path: Path
) -> None:
    main = importlib.import_module(program).main
    with pytest.raises(SystemExit, match=f"^error: .*{message}") as ended:
        main(arguments_of(program, words, place, tmp_path / "run"))
    assert "\n" not in str(ended.value.code)


@pytest.mark.parametrize("program", [TRAIN, DISTILL, GENERATE, MEASURE, EXPORT])
def test_help_is_an_answer_and_no_error(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(program).main(["--help"])
    assert ended.value.code == 0
    assert f"{program.split('.')[-1]}.py" in capsys.readouterr().out


def test_no_program_of_train_and_serve_goes_without_a_fault() -> None:
    names = {program.replace(".", "/") + ".py" for program, _, _ in FAULTS}
    assert names == {name for name in programs() if not name.startswith("scripts/")}


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The system refuses to write more than ``size`` bytes to a file: as on a full disk, a write ends half way."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(run: Callable[[], object], size: int) -> str | None:
    """The line that ends a program when no file may have more than ``size`` bytes; None if it ends well."""
    try:
        with no_file_above(size):
            run()
    except SystemExit as ended:
        return str(ended.code)
    return None


@pytest.mark.usefixtures("capsys")  # what is printed goes to memory, not to a file, which would be refused as well
def test_a_disk_that_is_full_at_any_moment_of_training_is_a_line(place: Path, tmp_path: Path) -> None:
    """Whichever library writes: Python the log, safetensors states and weights, torch the optimiser."""
    told = set()
    for size, mode in ((100, "cached"), (100, "online"), *((1000 * 2**at, "online") for at in range(10))):
        run = tmp_path / f"{size}-{mode}"
        arguments = recipe(place, run, "optim.epochs=1", f"features.mode={mode}")
        line = refused(partial(heads.main, arguments), size)
        if line is None:
            break
        assert line.startswith(f"error: {run}/")
        assert ": File too large. Expected" in line or ": No space left on device. Expected" in line
        assert not list(run.rglob("*.partial"))
        told.add(re.split("[/:]", line.removeprefix(f"error: {run}/"))[0])
    assert line is None  # there was room at last
    assert told == {"features", "log.jsonl", "checkpoints"}


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    (tmp_path / "folder").mkdir()
    with no_file_above(10), pytest.raises(OSError, match=r"file'$"), whole_file(tmp_path / "file") as staged:
        staged.write_text("longer than ten bytes")
    with (
        no_file_above(10),
        pytest.raises(OSError, match=r"new'$|folder'$"),
        whole_folder(tmp_path / "folder", Path.is_dir) as staged,
    ):
        (staged / "new").write_text("longer than ten bytes")
    assert (tmp_path / "file").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_file_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(NotADirectoryError, match=r"file'$"), whole_folder(tmp_path / "file", Path.is_dir):
        pass
    assert (tmp_path / "file").read_text() == "before"
