"""Check and time the engine on an accelerator, in less than five minutes.

    python scripts/gpu_check.py [--target FOLDER]

First correctness: drafted greedy text of tiny fp32 models equals that of ``transformers``, for every head family, at
batch 1 and 4.  Then speed: passes of a target in bfloat16 beside a decode step of ``transformers``; without
``--target`` a Llama of about one billion random weights stands in.  Without an accelerator it runs on the CPU, which
checks the script.
"""

from __future__ import annotations

import argparse

import torch
from bench_passes import measure, table_of, variants
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256}


def random_llama(sizes: dict[str, int], heads: int, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        num_attention_heads=heads, num_key_value_heads=heads // 4, pad_token_id=0, eos_token_id=None, **sizes
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.pad_token_id = 0
    return model


def check_equality(device: torch.device, console: Console) -> None:
    """Raise unless drafted greedy text equals that of ``transformers``."""
    model = random_llama(SMALL, heads=4, dtype=torch.float32, device=device)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # larger weights, more varied text
    target = Target(model)
    for family, head_type in HEADS.items():
        head = head_type.from_target(target, torch.arange(512, device=device), steps=3, nodes=16)
        for batch in (1, 4):
            ids = torch.randint(1, 512, (batch, 24), device=device)
            mask = torch.ones_like(ids)
            mask[1:, :5] = 0
            settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 64}
            expected = model.generate(ids, **settings)
            found = SpeculativeModel(target, head).generate(ids, nodes=16, **settings)
            if not torch.equal(expected, found):
                raise SystemExit(f"{family}, batch {batch}: drafted text differs from that of transformers on {device}")
            console.print(f"{family}, batch {batch}: equal to transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name of the target to time")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    console = Console()
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    console.print(f"device: {device}, torch {torch.__version__}")
    check_equality(device, console)
    if options.target:
        model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.bfloat16).to(device)
    else:
        sizes = LARGE if device.type != "cpu" else SMALL
        model = random_llama(sizes, heads=32 if sizes is LARGE else 4, dtype=torch.bfloat16, device=device)
    target = Target(model)
    timed = variants(target, None, options.context, [1, 8, 16, 32, 64])
    console.print(table_of(measure(timed, options.rounds, device), f"bfloat16, context {options.context}, batch 1"))


if __name__ == "__main__":
    main()
