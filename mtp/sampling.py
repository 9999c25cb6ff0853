"""The target's distribution at the nodes of a tree, after everything the caller asked for, and the choice from it.

Transformers' logits processors see the tokens before a position.  In a tree each node has its own: the row's prefix and
the node's path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from mtp.processors import RowProcessors
from mtp.rules import RULES, Rule
from mtp.tree import TokenTree
from mtp.verify import Randomness, RowVerdict, Verdict, verdict_of, walk, walk_row


class NodeScores:
    """Processed scores at the nodes of one round's trees, each computed when it is first asked for.

    A rule that goes down a tree asks about a handful of nodes: those it reaches.

    Args:
        processors: of the caller.
        tree: what was verified.
        logits: ``[B, N, V]`` of the target at every node.
        prefixes: each row's tokens before its root, as the processors are to see them.
        places: each row's place in the caller's batch (other rows may have ended).
    """

    def __init__(
        self,
        processors: RowProcessors,
        tree: TokenTree,
        logits: Tensor,
        prefixes: Sequence[list[int]],
        places: Sequence[int],
    ):
        self.processors = processors
        self.tree = tree
        self.logits = logits
        self.prefixes = prefixes
        self.places = places
        self._known: dict[tuple[int, int], Tensor] = {}

    def __call__(self, row: int, node: int) -> Tensor:
        """``[V]`` float32."""
        if (row, node) not in self._known:
            self._known[row, node] = self._compute(row, node)
        return self._known[row, node]

    def everywhere(self) -> Tensor:
        """``[B, N, V]`` at all nodes in one call; only where no processor looks at the tokens."""
        if not self.processors:
            return self.logits.float()
        scores = self.processors.any_position(self.logits.flatten(0, 1)).unflatten(0, self.logits.shape[:2])
        self._known = {
            (row, node): scores[row, node] for row in range(scores.shape[0]) for node in range(scores.shape[1])
        }
        return scores

    def _compute(self, row: int, node: int) -> Tensor:
        logits = self.logits[row, node : node + 1]
        if not self.processors:
            return logits[0].float()
        if self.processors.logits_only:
            return self.processors.any_position(logits)[0]
        ids = torch.tensor([self.prefixes[row] + self.tree.path_tokens(row, node)], device=logits.device)
        return self.processors.one_row(self.places[row], ids, logits)[0]


class TargetSampler:
    """Chooses tokens as the target would under ``generate``'s settings.

    Args:
        processors: Transformers' prepared logits processors and warpers, in order.
        do_sample: draw from the processed distribution instead of taking its mode.
        batch_size: rows of the caller's batch.
        randomness: the source of draws.
        rule: of acceptance; see ``mtp.rules``.

    Raises:
        ValueError: if a processor may keep a state from token to token and the rule would mix up its tokens.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        do_sample: bool,
        batch_size: int = 1,
        randomness: Randomness | None = None,
        rule: Rule = RULES["walk"],
    ):
        self.processors = RowProcessors(processors, batch_size)
        self.do_sample = do_sample
        self.randomness = randomness or Randomness()
        self.rule = rule
        if self.processors.in_order and not rule.in_order:
            raise ValueError(
                f"{', '.join(self.processors.in_order)} may keep a state from token to token, and rule={rule.name!r} "
                "asks about the tokens of a tree in another order. Use rule='walk' or rule='rejection'."
            )

    def choose(self, scores: Tensor) -> Tensor:
        """A token for each row of processed ``scores [M, V]``."""
        if not self.do_sample:
            return scores.argmax(-1)
        return torch.multinomial(scores.softmax(-1), 1, generator=self.randomness.generator)[:, 0]

    def at_nodes(
        self, tree: TokenTree, logits: Tensor, prefixes: Sequence[list[int]], places: Sequence[int]
    ) -> NodeScores:
        """Scores of one round; see ``NodeScores``."""
        return NodeScores(self.processors, tree, logits, prefixes, places)

    def verify(self, scores: NodeScores) -> Verdict:
        """Decide what is kept, by the rule; by the walk where nothing was drawn for a rule that is for draws."""
        tree = scores.tree
        if self.do_sample and tree.is_drawn and not self.rule.drawn:
            raise ValueError(f"rule={self.rule.name!r} is for trees that depend on no draws; this one was drawn.")
        rule = self.rule if self.do_sample and tree.is_drawn == self.rule.drawn else RULES["walk"]
        # On a CPU a warper or a draw costs as much for each node (a sort of the vocabulary): only what is reached is
        # processed.  Elsewhere one launch for all nodes is cheaper than a round trip for each.
        free = not self.processors and not self.do_sample
        together = self.processors.logits_only and (free or scores.logits.device.type != "cpu")
        if together and rule.name == "walk":
            everywhere = scores.everywhere()
            return walk(tree, self.choose(everywhere.flatten(0, 1)).view(tree.tokens.shape))
        verify_row = self._sampled_row if self.do_sample else self._greedy_row
        return verdict_of([verify_row(scores, row, rule) for row in range(tree.batch_size)], tree.tokens.device)

    def _greedy_row(self, scores: NodeScores, row: int, rule: Rule) -> RowVerdict:
        tree = scores.tree
        return walk_row(tree.children(row), tree.tokens[row].tolist(), lambda node: int(scores(row, node).argmax()))

    def _sampled_row(self, scores: NodeScores, row: int, rule: Rule) -> RowVerdict:
        tree = scores.tree
        return rule.verify_row(
            tree.children(row),
            tree.tokens[row].tolist(),
            lambda node: scores(row, node).softmax(-1),
            lambda node: tree.drawn_from(row, node),
            self.randomness,
        )
