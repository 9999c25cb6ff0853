"""Ask the model something, and see which of its tokens the drafter had guessed.

    python serve/generate.py runs/smollm2-eagle3/best --prompt "Why is the sky blue?"
    python serve/generate.py runs/smollm2-eagle3/best --chat
    python serve/generate.py runs/smollm2-eagle3/best --prompt "..." --compare

The answer goes to standard output as it grows (in colour: guessed by the drafter and kept), counters to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mtp.errors import command_line
from mtp.model import SpeculativeModel
from mtp.past import Past
from mtp.stats import AcceptanceStats
from mtp.traffic import TrafficLog
from serve.divergence import first_divergence
from serve.loading import UsageError, add_model_arguments, load_model, load_tokenizer, pad_token_id, positive
from serve.loading import temperature as temperature_argument
from serve.questions import Message, render
from serve.terminal import Printer, pieces_of, styled
from serve.traffic import add_log_arguments, check_log_arguments, open_log

WARM_UP_TOKENS = 8
CHAT_HELP = "an empty line or /quit ends, /clear forgets the conversation, Ctrl-C stops an answer"


@dataclass(frozen=True)
class Generated:
    """One answer.

    Attributes:
        ids: new tokens, the end token included.
        kept: for each, whether the drafter had guessed it.
        seconds: wall time, reading the prompt included.
    """

    ids: list[int]
    kept: list[bool]
    stats: AcceptanceStats
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds if self.seconds else 0.0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="what to ask")
    prompt.add_argument("--prompt-file", type=Path, help="a text file with what to ask; - is standard input")
    prompt.add_argument("--chat", action="store_true", help=f"a conversation: {CHAT_HELP}")
    parser.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")
    parser.add_argument("--system", help="a system message before the conversation")
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=temperature_argument, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="when sampling (default: the target's own)")
    parser.add_argument("--top-k", type=int, metavar="K", help="when sampling; 0 is all (default: the target's own)")
    parser.add_argument("--seed", type=int, help="of the draws when sampling")
    parser.add_argument("--compare", action="store_true", help="with and without drafting, side by side")
    add_log_arguments(parser)
    parser.add_argument("--no-color", action="store_true", help="no colours (NO_COLOR is honoured too)")
    options = parser.parse_args(arguments)
    if options.temperature == 0 and (options.top_p is not None or options.top_k is not None):
        parser.error("--top-p and --top-k go with sampling; name a --temperature above 0")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        parser.error(f"--top-p {options.top_p:g}: expected a number above 0, at most 1")
    if options.top_k is not None and options.top_k < 0:
        parser.error(f"--top-k {options.top_k}: expected 0 (all) or more")
    check_log_arguments(parser, options)
    if options.compare and options.log is not None:
        parser.error("--compare answers one prompt twice; it does not go with --log")
    if options.compare and options.chat:
        parser.error("--compare answers one prompt twice; it does not go with --chat")
    if options.compare and options.drafter == "none":
        parser.error("--compare is against no drafting already; name a drafter or leave --drafter out")
    return options


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``generate`` that choose tokens."""
    if options.temperature == 0:
        return {"do_sample": False}
    chosen = {"top_p": options.top_p, "top_k": options.top_k}
    return {
        "do_sample": True,
        "temperature": options.temperature,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def answer(
    model: SpeculativeModel,
    prompt: Sequence[int],
    options: argparse.Namespace,
    on_token: Callable[[int, int, bool], None] | None = None,
    **changed: Any,
) -> Generated:
    """Answer one prompt of token ids.

    Args:
        changed: arguments of ``generate`` that are not to be as the options say.

    Raises:
        UsageError: for a prompt that is empty or leaves no room for an answer.
    """
    limit = model.target.max_positions
    if not prompt or (limit is not None and len(prompt) >= limit):
        raise UsageError(f"The prompt has {len(prompt)} tokens; expected at least 1 and fewer than {limit or 'any'}.")
    room = options.max_new_tokens if limit is None else min(options.max_new_tokens, limit - len(prompt))
    tokens = torch.tensor([list(prompt)], device=model.target.device)
    arguments: dict[str, Any] = {
        "attention_mask": torch.ones_like(tokens),
        "pad_token_id": pad_token_id(model),
        "max_new_tokens": room,
        "nodes": options.nodes,
        "drafter": options.drafter,
        "on_token": on_token,
        **sampling_options(options),
        **changed,
    }
    start = time.perf_counter()
    output = model.generate(tokens, return_dict_in_generate=True, **arguments)
    seconds = time.perf_counter() - start
    return Generated(output.sequences[0, len(prompt) :].tolist(), output.kept[0], output.acceptance, seconds)


def counters(generated: Generated) -> str:
    """What an answer took, in one or two lines."""
    stats = generated.stats
    stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stats.seconds.items())
    lines = [
        f"{len(generated.ids)} tokens, {sum(generated.kept)} of them guessed; {stats.target_passes} passes of the "
        f"target behind the prompt's; mean accepted length {stats.mean_accepted_length:.2f}; "
        f"{generated.speed:.1f} tokens/s",
        f"{generated.seconds:.2f} s: {stages}",
    ]
    if stats.drift is not None and stats.drift["recent"] is not None:
        lines.append(
            f"mean accepted length over the last {stats.drift['rounds']} drafted rounds {stats.drift['recent']:.2f}; "
            f"measured on held-out text {stats.drift['measured']:.2f}"
        )
    return "\n".join([*lines, *stats.notes])


def say(
    model: SpeculativeModel,
    tokenizer: Any,
    prompt: list[int],
    options: argparse.Namespace,
    past: Past | None = None,
    traffic: TrafficLog | None = None,
) -> str:
    """Stream one answer and print its counters; returns its text, which is shorter after an interrupt."""
    printer = Printer(tokenizer, prompt, Console(no_color=options.no_color or None, highlight=False))
    ids: list[int] = []

    def on_token(row: int, token: int, kept: bool) -> None:
        ids.append(token)
        printer.on_token(row, token, kept)

    try:
        generated = answer(model, prompt, options, on_token, past=past, traffic=traffic)
    except KeyboardInterrupt:
        if not options.chat:
            raise
        generated = None
    printer.end()
    report(counters(generated) if generated else "stopped", options)
    return tokenizer.decode(ids, skip_special_tokens=True)


def report(text: str, options: argparse.Namespace) -> None:
    console = Console(stderr=True, no_color=options.no_color or None, highlight=False)
    console.print(text, style="dim", markup=False, soft_wrap=True)


def chat(
    model: SpeculativeModel, tokenizer: Any, options: argparse.Namespace, traffic: TrafficLog | None = None
) -> None:
    """Take turns until the person ends it."""
    opening: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    past = Past(model.target)
    report(CHAT_HELP, options)
    while True:
        try:
            said = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if said in ("", "/quit"):
            return
        if said == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": said})
        try:
            reply = say(model, tokenizer, render(tokenizer, messages, options.raw), options, past, traffic)
        except UsageError as error:
            messages.pop()
            report(f"{error} /clear makes room.", options)
            continue
        messages.append({"role": "assistant", "content": reply})


def compare(model: SpeculativeModel, prompt: list[int], options: argparse.Namespace) -> tuple[Generated, Generated]:
    """The same prompt with drafting and without, each warmed up."""
    results = []
    for drafter in (options.drafter, "none"):
        answer(model, prompt, options, drafter=drafter, max_new_tokens=WARM_UP_TOKENS)
        seed(options)
        results.append(answer(model, prompt, options, drafter=drafter))
    return results[0], results[1]


def comparison_table(
    tokenizer: Any, prompt: list[int], drafted: Generated, plain: Generated, greedy: bool = True
) -> Table:
    """Both answers side by side, with what they took and whether they are the same."""
    at = first_divergence(plain.ids, drafted.ids)
    verdict = "the same token ids" if at is None else f"token ids differ from new token {at} on"
    if at is not None and not greedy:
        verdict += " (other draws of the same distribution)"
    table = Table(caption=f"{verdict}; in colour: guessed by the drafter and kept", show_lines=True)
    for name in ("with drafting", "without"):
        table.add_column(name, ratio=1)
    both = (drafted, plain)
    table.add_row(*(styled(pieces_of(tokenizer, prompt, each.ids, each.kept)) for each in both))
    table.add_row(
        *(
            f"{len(each.ids)} tokens in {each.seconds:.2f} s, {each.speed:.1f} tokens/s, "
            f"{each.stats.target_passes} passes, {each.stats.mean_accepted_length:.2f} tokens a pass"
            for each in both
        )
    )
    return table


def seed(options: argparse.Namespace) -> None:
    torch.manual_seed(torch.seed() if options.seed is None else options.seed)


def read_prompt(options: argparse.Namespace) -> str:
    """The text to ask, from wherever it is."""
    if options.prompt is not None:
        return options.prompt
    try:
        if str(options.prompt_file) == "-":
            return sys.stdin.read()
        return options.prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The prompt cannot be read from {options.prompt_file}: {error}") from error


def run(options: argparse.Namespace) -> None:
    text = None if options.chat else read_prompt(options)
    model = load_model(options)
    tokenizer = load_tokenizer(model, options)
    seed(options)
    with open_log(model, options) as traffic:
        if text is None:
            chat(model, tokenizer, options, traffic)
        else:
            answer_once(model, tokenizer, text, options, traffic)


def answer_once(
    model: SpeculativeModel, tokenizer: Any, text: str, options: argparse.Namespace, traffic: TrafficLog | None
) -> None:
    """Answer one prompt, or compare its two answers."""
    messages = [{"role": "system", "content": options.system}] if options.system else []
    prompt = render(tokenizer, [*messages, {"role": "user", "content": text}], options.raw)
    if not options.compare:
        say(model, tokenizer, prompt, options, traffic=traffic)
        return
    drafted, plain = compare(model, prompt, options)
    console = Console(no_color=options.no_color or None)
    console.print(comparison_table(tokenizer, prompt, drafted, plain, options.temperature == 0))


@command_line
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    run(parse_arguments(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
