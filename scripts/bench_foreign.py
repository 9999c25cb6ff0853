"""Is drafting ever slower than not drafting?  Text that heads were not trained for, beside plain decoding.

    python scripts/bench_foreign.py RUN/best [--data questions.jsonl --categories translation summarization]

Four kinds of prompt, with trees as large as pays (the default): random tokens, questions in other languages, ordinary
questions at temperature 2, and, with ``--data``, the categories that are named.  Drafting and plain decoding take turns
on each prompt; the ratio of their tokens per second is printed with its standard error over the prompts.  The exit
status is 1 if a kind falls behind by more than ``--tolerance`` and twice that error.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mtp.errors import command_line
from mtp.files import write_json
from mtp.model import SpeculativeModel
from serve.comparison import Comparison
from serve.loading import add_model_arguments, load_model, load_tokenizer, positive
from serve.questions import Question, first_of_each, read_questions
from serve.systems import DRAFTED, PLAIN, Decoding

OTHER_LANGUAGES = (
    "Warum ist der Himmel am Abend rot? Bitte antworte auf Deutsch.",
    "Napisz krótkie opowiadanie o psie, który nauczył się pływać.",
    "Explique-moi en français comment fonctionne une machine à vapeur.",
    "Eleza kwa Kiswahili jinsi ya kupika wali.",
    "Расскажи по-русски, как живут пчёлы зимой.",
    "¿Cuáles son las ventajas de aprender a tocar un instrumento?",
)
ORDINARY = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "What should I pack for a week in the mountains?",
    "Write a Python function that finds the longest word in a text.",
    "Describe the taste of an orange to somebody who never had one.",
    "How do I ask my neighbour to turn the music down?",
)
RANDOM_LENGTH = 64


@dataclass(frozen=True)
class Result:
    """Drafting against plain decoding on prompts of one kind.

    Attributes:
        ratios: of tokens per second, one a prompt.
        tau: mean accepted length of the rounds, plain ones included.
        plain_share: of the rounds, those that were decoded plainly.
    """

    kind: str
    ratios: list[float]
    tau: float
    plain_share: float

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.ratios)

    @property
    def error(self) -> float:
        return statistics.stdev(self.ratios) / len(self.ratios) ** 0.5 if len(self.ratios) > 1 else float("inf")


def random_prompts(count: int, vocab_size: int, seed: int) -> list[Question]:
    """Prompts of tokens drawn evenly from the vocabulary."""
    draw = random.Random(seed)
    ids = [tuple(draw.randrange(vocab_size) for _ in range(RANDOM_LENGTH)) for _ in range(count)]
    return [Question(f"random {at}", "random tokens", prompt_ids=each) for at, each in enumerate(ids)]


def asked(kind: str, texts: Sequence[str]) -> list[Question]:
    return [Question(f"{kind} {at}", kind, (text,)) for at, text in enumerate(texts)]


def compare(model: SpeculativeModel, questions: list[Question], decoding: Decoding, tokenizer: object) -> list[Result]:
    """One result a category of ``questions``."""
    comparison = Comparison(model, decoding, (DRAFTED, PLAIN))
    comparison.run(questions, tokenizer)
    results = []
    for kind, tally in comparison.categories.items():
        records = [record for record in comparison.records if record["category"] == kind]
        speeds = [{s: r["new_tokens"][s] / r["seconds"][s] for s in (DRAFTED, PLAIN)} for r in records]
        ratios = [speed[DRAFTED] / speed[PLAIN] for speed in speeds]
        stats = tally.stats
        results.append(Result(kind, ratios, stats.mean_accepted_length, stats.plain_rounds / stats.target_passes))
    return results


@command_line
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--data", type=Path, help="questions to take categories from")
    parser.add_argument("--categories", nargs="+", default=[], help="of --data")
    parser.add_argument("--prompts", type=positive, default=6, help="of each kind (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--tolerance", type=float, default=0.03, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON of the results")
    options = parser.parse_args()
    model = load_model(options)
    tokenizer = load_tokenizer(model, options)
    greedy = Decoding(options.max_new_tokens, nodes=options.nodes)
    hot = Decoding(options.max_new_tokens, temperature=2.0, nodes=options.nodes)
    questions = random_prompts(options.prompts, model.target.vocab_size, seed=0)
    questions += asked("another language", OTHER_LANGUAGES[: options.prompts])
    if options.data:
        named = [question for question in read_questions(options.data) if question.category in options.categories]
        questions += first_of_each(named, options.prompts, None)
    results = compare(model, questions, greedy, tokenizer)
    results += compare(model, asked("temperature 2", ORDINARY[: options.prompts]), hot, tokenizer)
    table = Table("text", "prompts", "tau", "rounds decoded plainly", "speed over plain", "standard error")
    for result in results:
        table.add_row(
            result.kind,
            str(len(result.ratios)),
            f"{result.tau:.2f}",
            f"{result.plain_share:.0%}",
            f"{result.mean:.3f}",
            f"{result.error:.3f}",
        )
    Console().print(table)
    if options.output:
        write_json(options.output, [{**vars(result), "mean": result.mean} for result in results])
    return int(any(result.mean + 2 * result.error < 1 - options.tolerance for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
