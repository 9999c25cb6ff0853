"""Toy targets: a distribution over a tiny vocabulary after every short text, given, mixed, certain or processed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

V = 4
LENGTH = 3
PROMPT, ROOT = (1, 2), 0

Tokens = tuple[int, ...]


class Table:
    """A random distribution over the vocabulary after every short sequence; ``zeros`` of the tokens are ruled out."""

    def __init__(self, seed: int, vocab: int = V, zeros: int = 0, sharpness: float = 1.0):
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab, self.zeros, self.sharpness = vocab, zeros, sharpness
        self.rows: dict[Tokens, Tensor] = {}

    def __call__(self, context: Tokens) -> Tensor:
        if context not in self.rows:
            self.rows[context] = self.row(context)
        return self.rows[context]

    def row(self, context: Tokens) -> Tensor:
        logits = torch.randn(self.vocab, generator=self.generator, dtype=torch.float64) * self.sharpness
        if self.zeros:
            logits[torch.randperm(self.vocab, generator=self.generator)[: self.zeros]] = float("-inf")
        return logits.softmax(-1)

    def sequences(self, start: Tokens = (), length: int = LENGTH, end: int | None = None) -> dict[Tokens, float]:
        """Probability of every continuation of ``start`` up to ``length`` tokens, or up to the end token."""
        found = {start: 1.0}
        for _ in range(length - len(start)):
            longer: dict[Tokens, float] = {}
            for context, weight in found.items():
                if end in context:
                    longer[context] = weight
                    continue
                for token, chance in enumerate(self(context).tolist()):
                    longer[*context, token] = weight * chance
            found = longer
        return found


class Mixture(Table):
    """A drafter's table that is near the target's: ``share`` of it, and for the rest one of its own."""

    def __init__(self, table: Table, seed: int, share: float):
        super().__init__(seed, table.vocab)
        self.table, self.other, self.share = table, Table(seed, table.vocab), share

    def row(self, context: Tokens) -> Tensor:
        return self.share * self.table(context) + (1 - self.share) * self.other(context)


class Certain(Table):
    """A target without doubt, as greedy decoding is."""

    def row(self, context: Tokens) -> Tensor:
        return torch.nn.functional.one_hot(super().row(context).argmax(), self.vocab).double()


class Processed(Table):
    """A table's distribution after logits processors, which see the text before each token."""

    def __init__(self, raw: Table, processors: LogitsProcessorList):
        super().__init__(0, raw.vocab)
        self.raw, self.processors = raw, processors

    def row(self, context: Tokens) -> Tensor:
        ids = torch.tensor([[*PROMPT, ROOT, *context]])
        return self.processors(ids, self.raw(context).log()[None].clone()).softmax(-1)[0]


class ToyGrammar(LogitsProcessor):
    """Forbids a token that depends on all the text before it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forbidden = (input_ids.sum(1, keepdim=True) + input_ids[:, -1:]) % scores.shape[1]
        return scores.scatter(1, forbidden, float("-inf"))
