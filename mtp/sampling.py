"""The target's distribution at the nodes of a tree, after everything the caller asked for.

Transformers' logits processors see the tokens before a position.  In a tree each node has its own: the row's prefix and
the node's path.  Processors that look only at the logits run once over all nodes; as soon as one looks at the tokens,
distributions are computed node by node, and only at nodes that the verifier reaches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from mtp.tree import TokenTree
from mtp.verify import Randomness, Verdict, reject_row, verdict_of, walk, walk_row

# Processors whose result depends on the logits alone.  Only these exact classes: a subclass may look at the tokens.
LOGITS_ONLY = tuple(
    getattr(logits_process, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TopHLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(logits_process, name)
)


# Processors that remember their earlier calls: asked about several branches, they would mix them up.
STATEFUL = ("SynthIDTextWatermarkLogitsProcessor",)


def refuse_stateful(processors: LogitsProcessorList) -> None:
    """Raise for processors that expect to be called once a token, in order."""
    for processor in processors:
        if type(processor).__name__ in STATEFUL:
            raise ValueError(
                f"{type(processor).__name__} keeps a state from token to token and cannot be asked about the branches "
                "of a tree; generate with the target alone."
            )


def looks_at_tokens(processors: LogitsProcessorList) -> list[str]:
    """Names of the processors whose result depends on the tokens before a position."""
    return [type(p).__name__ for p in processors if type(p) not in LOGITS_ONLY]


class TargetSampler:
    """Chooses tokens as the target would under ``generate``'s settings.

    Args:
        processors: Transformers' prepared logits processors and warpers, in order.
        do_sample: draw from the processed distribution instead of taking its mode.
        batch_size: rows of the caller's batch.
        randomness: the source of draws.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        batch_size: int = 1,
        randomness: Randomness | None = None,
    ):
        refuse_stateful(processors)
        self.processors = processors
        self.batch_size = batch_size
        self.do_sample = do_sample
        self.randomness = randomness or Randomness()
        self.token_processors = looks_at_tokens(processors)

    def process(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores ``[M, V]`` in float32; ``ids [M, T]`` are the tokens before each."""
        # A copy: processors may write in place, and Transformers hands them float32 too.
        copy = logits.to(dtype=torch.float32, copy=True)
        return self.processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, copy))

    def choose(self, scores: Tensor) -> Tensor:
        """A token for each row of processed ``scores [M, V]``."""
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.randomness.generator)[:, 0]

    def process_row(self, index: int, ids: Tensor, logits: Tensor) -> Tensor:
        """Processed scores ``[1, V]`` of one row, which has place ``index`` in the caller's batch.

        Processors may keep something for each row of the batch (padding lengths, a grammar for each), so they are shown
        a batch of the size they were made for, with this row at its own place.
        """
        if self.batch_size == 1:
            return self.process(ids, logits)
        scores = self.process(ids.expand(self.batch_size, -1), logits.expand(self.batch_size, -1))
        return scores[index : index + 1]

    def verify(self, tree: TokenTree, logits: Tensor, prefixes: list[list[int]], places: list[int]) -> Verdict:
        """Apply the exact rule that fits the tree and the settings.

        Args:
            logits: ``[B, N, V]`` of the target at every node.
            prefixes: each row's tokens before its root.
            places: each row's place in the caller's batch (other rows may have ended).
        """
        by_node = self.token_processors or (tree.is_drawn and self.do_sample)
        if not by_node:
            flat = logits.flatten(0, 1)
            scores = self.process(tree.tokens.new_zeros(flat.shape[0], 1), flat) if self.processors else flat
            return walk(tree, self.choose(scores.float()).view(tree.tokens.shape))
        rows = [self._verify_row(tree, row, logits[row], prefixes[row], places[row]) for row in range(tree.batch_size)]
        return verdict_of(rows, tree.tokens.device)

    def _verify_row(
        self, tree: TokenTree, row: int, logits: Tensor, prefix: list[int], place: int
    ) -> tuple[list[int], int]:
        tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()

        def scores_at(node: int) -> Tensor:
            path = []
            at = node
            while at >= 0:
                path.append(tokens[at])
                at = parents[at]
            ids = torch.tensor([prefix + path[::-1]], device=logits.device)
            return self.process_row(place, ids, logits[node : node + 1])

        children = tree.children(row)
        if tree.is_drawn and self.do_sample:
            assert tree.q is not None
            q = tree.q[row]
            return reject_row(
                children, tokens, lambda node: scores_at(node)[0].softmax(-1), lambda node: q[node], self.randomness
            )
        return walk_row(children, tokens, lambda node: int(self.choose(scores_at(node))))
