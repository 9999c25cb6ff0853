"""Check and time the engine on an accelerator, in less than five minutes.

    python scripts/gpu_check.py [--target FOLDER] [--acceptance 0.8] [--nodes 32]

First correctness: drafted greedy text of tiny fp32 models equals that of ``transformers``, for every head family, at
batch 1 and 4.  Then speed in bfloat16, of the target in FOLDER (by default the one that
``scripts/fetch_default_target.py`` writes, where it is) and of a Llama with the sizes of the 8B model and weights that
make it count: its text is known beforehand, with margins that no rounding overturns, so that a drafter can be right
with just the probability that is asked for.  Printed are tokens a second of ``transformers``, of ``transformers`` with
a static cache and ``torch.compile``, and of this engine plainly and drafting, its passes replayed from graphs, all as
shares of what the memory's bandwidth allows; and what verifying a tree takes, in plain steps.

Without an accelerator it runs over tiny sizes on the CPU, which checks the script.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from bench_passes import measure, table_of, variants
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mtp import merged_attention
from mtp.attention import AttentionPass, attend, mask_bias
from mtp.cost import synchronise
from mtp.drafters import Budget, Drafter, Draw, TargetStates
from mtp.drafters.plain import PlainDrafter
from mtp.errors import command_line
from mtp.heads import HEADS
from mtp.model import SpeculativeModel
from mtp.target import Target
from mtp.tree import TokenTree

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
LARGE = {  # Llama 3.1 8B
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
DEFAULT_TARGET = Path.home() / ".cache" / "mtp" / "smollm2-135m-instruct"
REPEATS = 3


class KnowingDrafter(Drafter):
    """Knows the text and is right about each next token with a set probability.

    A tree is one path of ``depth`` guesses; the other nodes hang below its first ones and are wrong, so that
    verification has as much to do as with a head's tree.

    Args:
        text: ``[n]`` what follows the prompt.
        probability: of being right about a token behind right ones.
        depth: of a tree.
    """

    def __init__(self, text: Tensor, probability: float, depth: int = 8, seed: int = 0):
        self.text, self.probability, self.depth = text, probability, depth
        self.generator = torch.Generator(text.device).manual_seed(seed)

    def start(self, states: TargetStates, capacity: int) -> None:
        self.known = 1  # the pending token

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        depth = min(self.depth, budget.nodes - 1, len(self.text) - self.known)
        if depth < 1:
            return TokenTree.root_only(pending)
        right = self.text[self.known : self.known + depth]
        draws = torch.rand(depth, generator=self.generator, device=right.device)
        spine = torch.where(draws < self.probability, right, (right + 1) % self.vocab_size)
        place = torch.arange(budget.nodes - 1 - depth, device=right.device)
        parent, nth = place % depth, place // depth
        tokens = torch.cat([pending, spine, (right[parent] + 2 + nth) % self.vocab_size])[None]
        parents = torch.cat([torch.arange(-1, depth, device=right.device), parent])[None]
        depths = torch.cat([torch.arange(depth + 1, device=right.device), parent + 1])[None]
        return TokenTree(tokens, parents, depths, torch.ones_like(tokens, dtype=torch.bool))

    def attach(self, target: Target) -> KnowingDrafter:
        self.vocab_size = target.vocab_size
        return self

    def observe(self, states: TargetStates) -> None:
        self.known += states.tokens.shape[1]

    def select_rows(self, rows: Tensor) -> None:
        pass


def recorded(model: PreTrainedModel) -> Target:
    """The model as a target whose passes are replayed from graphs, where there are graphs."""
    target = Target(model)
    if model.device.type != "cpu":
        target.compile()
    return target


def random_llama(sizes: dict[str, int], dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(pad_token_id=0, eos_token_id=None, bos_token_id=None, **sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def make_it_count(model: LlamaForCausalLM) -> None:
    """Let t + 1 follow token t: the layers add little to t's embedding, which is row t + 1 of the output matrix.

    What a pass takes does not depend on what the weights are.
    """
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(1e-3)
        layer.mlp.down_proj.weight.mul_(1e-3)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, dims=0))


def check_equality(device: torch.device, console: Console, new_tokens: int) -> None:
    """Raise unless drafted greedy text equals that of ``transformers``."""
    model = random_llama(SMALL, torch.float32, device)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # larger weights, more varied text
    target = recorded(model)
    for batch in (1, 4):
        ids = torch.randint(1, 512, (batch, 24), device=device)
        mask = torch.ones_like(ids)
        mask[1:, :5] = 0
        settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": new_tokens}
        expected = model.generate(ids, **settings)
        for family, head_type in HEADS.items():
            head = head_type.from_target(target, torch.arange(512, device=device), steps=3, nodes=16)
            found = SpeculativeModel(target, head).generate(ids, nodes=16, **settings)
            if not torch.equal(expected, found):
                raise SystemExit(f"{family}, batch {batch}: drafted text differs from that of transformers on {device}")
    if device.type == "cuda" and not target.is_replayed:
        raise SystemExit(f"passes of a Llama are not replayed from graphs on {device}: {target.replays}")
    console.print(f"batch 1 and 4: drafted text equals that of transformers ({', '.join(HEADS)}); {target.replays}")


@torch.no_grad()
def check_attention(device: torch.device, console: Console, context: int) -> None:
    """Print what the fast kernel over the prefix gives and takes beside the masked one, at the 8B model's heads."""
    dtype = torch.bfloat16
    query = torch.randn(1, 32, 32, 128, device=device, dtype=dtype)
    key, value = (torch.randn(1, 8, context + 32, 128, device=device, dtype=dtype) for _ in range(2))
    if not merged_attention.is_possible(query, value):
        console.print("attention to the prefix: masked, the fast kernel did not prove right on this device")
        return
    tree = TokenTree.chain(torch.zeros(1, dtype=torch.long), torch.zeros(1, 31, dtype=torch.long))
    attention = AttentionPass.over_tree(tree, torch.tensor([context]), context)
    own, bias = attention.own_bias(4, device), mask_bias(attention.mask(None, device), 4, dtype)
    ways: dict[str, Callable[[], Tensor]] = {
        "merged": lambda: merged_attention.attend_merged(query, key, value, own, 128**-0.5),
        "masked": lambda: attend(query, key, value, bias, 128**-0.5),
    }
    difference = (ways["merged"]().float() - ways["masked"]().float()).abs().max()
    took = {name: min(seconds_of(way, device) for _ in range(20)) * 1e6 for name, way in ways.items()}
    console.print(
        f"attention of 32 nodes to {context} tokens: merged {took['merged']:.0f} us, masked {took['masked']:.0f} us a "
        f"layer; largest difference {difference:.1e}"
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes; the best of several."""
    source = torch.empty(1 << (30 if device.type != "cpu" else 25), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        best = min(best, seconds_of(lambda: destination.copy_(source), device))
    return 2 * source.numel() / best


def bytes_read(model: PreTrainedModel) -> int:
    """Of the weights that a decode step reads: all but an input embedding that is not the output matrix as well."""
    embedding = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    total = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return total - (0 if tied else embedding.numel() * embedding.element_size())


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    action()
    synchronise(device)
    return time.perf_counter() - start


def time_generation(
    model: PreTrainedModel, counts: bool, options: argparse.Namespace, bandwidth: float, name: str
) -> Table:
    """Tokens a second of each system, in turn; the first call of each, which compiles and packs, is not counted.

    Args:
        counts: whether ``make_it_count`` was applied, so that the text is known and must be the same in every way.
    """
    target, device, new = recorded(model), model.device, options.new_tokens
    prompt = options.context
    ids = torch.arange(1, prompt + 1, device=device)[None] % target.vocab_size
    settings = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
    plain = SpeculativeModel(target, PlainDrafter())
    text = plain.generate(ids, **settings)[0, prompt:]
    if counts and not torch.equal(text, torch.arange(prompt + 1, prompt + new + 1, device=device) % target.vocab_size):
        raise SystemExit(f"{name}: the model that counts does not count on {device}: {text[:20].tolist()} ...")
    knowing = SpeculativeModel(target, KnowingDrafter(text, options.acceptance))
    drafting = {"nodes": options.nodes, "return_dict_in_generate": True}
    systems: dict[str, Callable[[], object]] = {
        "transformers": lambda: model.generate(ids, **settings),
        "transformers, static cache and compiled": lambda: model.generate(
            ids, cache_implementation="static", **settings
        ),
        "mtp, plain": lambda: plain.generate(ids, **settings),
        "mtp, drafting": lambda: knowing.generate(ids, **settings, **drafting),
    }
    drafted = knowing.generate(ids, **settings, **drafting)
    if counts and not torch.equal(drafted.sequences[0, prompt:], text):
        raise SystemExit(f"{name}: drafted text differs from the plain one on {device}")
    tau = drafted.acceptance.mean_accepted_length
    del drafted  # and with it its hold on the cache whose passes are recorded
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for repeat in range(REPEATS + 1):
        for system, run in systems.items():
            took = seconds_of(run, device)
            if repeat > 0:
                seconds[system].append(took)
    limit = bandwidth / bytes_read(model)
    title = (
        f"{name}: {prompt} + {new} tokens, at most {limit:.0f} plain tokens/s at {bandwidth / 1e9:.0f} GB/s; drafting: "
        f"{options.nodes} nodes, right with {options.acceptance}, mean accepted length {tau:.2f}"
    )
    table = Table("system", "tokens/s", "of the limit", title=title)
    for system, values in seconds.items():
        rate = new / median(values)
        table.add_row(system, f"{rate:.1f}", f"{rate / limit:.0%}")
    return table


@command_line
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="folder or Hub name of a target to time beside the random one")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability of a right guess (%(default)s)")
    parser.add_argument("--nodes", type=int, default=32, help="of a tree (%(default)s)")
    parser.add_argument("--new-tokens", type=int, help="to generate (128; 16 on a CPU)")
    parser.add_argument("--context", type=int, help="tokens of the prompt (1024; 64 on a CPU)")
    parser.add_argument("--rounds", type=int, default=10, help="passes of each kind that are timed (%(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    torch.manual_seed(0)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert device is not None
    on_cpu = device.type == "cpu"
    options.new_tokens = options.new_tokens or (16 if on_cpu else 128)
    options.context = options.context or (64 if on_cpu else 1024)
    console.print(f"device: {device}, torch {torch.__version__}")
    check_equality(device, console, new_tokens=12 if on_cpu else 64)
    for context in (128,) if on_cpu else (512, 1024, 2048, 8192):
        check_attention(device, console, context)
    bandwidth = copy_bandwidth(device)
    name = options.target or (str(DEFAULT_TARGET) if not on_cpu and DEFAULT_TARGET.is_dir() else None)
    if name is not None:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device)
        time_target(model, False, options, bandwidth, name, console)
    counting = random_llama(SMALL if on_cpu else LARGE, torch.bfloat16, device)
    make_it_count(counting)
    time_target(counting, True, options, bandwidth, "random weights", console)


def time_target(
    model: PreTrainedModel, counts: bool, options: argparse.Namespace, bandwidth: float, name: str, console: Console
) -> None:
    """Print both tables of one target."""
    target = recorded(model)
    passes = variants(target, None, options.context, [1, 8, 16, 32, 64])
    title = f"{name}: bfloat16, context {options.context}, batch 1"
    console.print(table_of(measure(passes, options.rounds, model.device), title, base="plain step"))
    console.print(f"passes: {target.replays}")
    console.print(time_generation(model, counts, options, bandwidth, name))


if __name__ == "__main__":
    main()
