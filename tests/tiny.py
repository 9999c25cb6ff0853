"""Tiny random models, heads and trees for tests that run offline in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from architectures import HIDDEN, PAD, REGISTRY
from torch import Tensor
from transformers import PreTrainedModel

from mtp.drafters import Budget, Drafter, Draw, TargetStates
from mtp.heads import HEADS, Head
from mtp.target import Target
from mtp.tree import TokenTree

VOCAB = 24
LAYERS = 3


def tiny_model(architecture: str = "llama", seed: int = 0, vocab: int = VOCAB, layers: int = LAYERS) -> PreTrainedModel:
    """A random fp32 model whose weights are large enough that its greedy text is varied."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = REGISTRY[architecture].build(vocab, layers).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "wpe" in name or "embed_positions" in name or "sinks" in name:
                    weight.normal_(0, 0.5)
                elif weight is model.get_input_embeddings().weight:
                    weight.normal_(0, 0.2)
                elif weight.dim() > 1:
                    weight.normal_(0, 1.6 * HIDDEN**-0.5)
                elif name.endswith("bias"):
                    weight.normal_(0, 0.1)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    return model


def tiny_target(architecture: str = "llama", **sizes: Any) -> Target:
    return Target(tiny_model(architecture, **sizes))


def tiny_head(family: str, target: Target, seed: int = 0, draft_vocab: int | None = None, **sizes: Any) -> Head:
    """A random head of a registered family; its draft vocabulary is a random subset when ``draft_vocab`` is given."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft_ids = torch.randperm(target.vocab_size)[: draft_vocab or target.vocab_size].sort().values
        head = HEADS[family].from_target(target, draft_ids, **{"steps": 3, **sizes}).eval()
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() > 1:
                    weight.normal_(0, 1.2 * weight.shape[1] ** -0.5)
    return head


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts without the padding token."""
    rng = random.Random(seed)
    return [[rng.randrange(1, vocab) for _ in range(length)] for length in lengths]


def padded(prompts: Sequence[Sequence[int]], side: str = "left", pad: int = PAD) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of a padded batch."""
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = [], []
    for prompt in prompts:
        fill = longest - len(prompt)
        ids.append([pad] * fill + list(prompt) if side == "left" else list(prompt) + [pad] * fill)
        mask.append([0] * fill + [1] * len(prompt) if side == "left" else [1] * len(prompt) + [0] * fill)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


FOUR = random_prompts([4, 11, 7, 1], seed=4)  # the second is longer than the sliding window


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    """Any tree whose parents come before their children."""
    return [-1] + [rng.randrange(node) for node in range(1, nodes)]


def random_tree(
    rng: random.Random, batch: int = 1, nodes: int = 8, vocab: int = VOCAB, ragged: bool = False
) -> TokenTree:
    """Random trees; siblings have different tokens.  ``ragged`` marks a random tail of each row as padding."""
    tokens, parents, valid = [], [], []
    for _ in range(batch):
        row = random_parents(rng, nodes)
        while max(row.count(parent) for parent in row) > vocab:
            row = random_parents(rng, nodes)
        names = [rng.randrange(vocab)]
        free: dict[int, list[int]] = {}
        for node in range(1, nodes):
            left = free.setdefault(row[node], rng.sample(range(vocab), vocab))
            names.append(left.pop())
        tokens.append(names)
        parents.append(row)
        real = rng.randrange(1, nodes + 1) if ragged else nodes
        valid.append([node < real for node in range(nodes)])
    tree = TokenTree.from_parents(torch.tensor(tokens), torch.tensor(parents))
    return TokenTree(tree.tokens, tree.parents, tree.depths, torch.tensor(valid))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


class OracleDrafter(Drafter):
    """Knows each row's true continuation and hides it in a random tree, ``lengths`` tokens of it in turn.

    Args:
        truths: each row's answer, the first token included.
        lengths: how many right tokens each proposal holds, used in turn.
        clutter: wrong nodes added to each tree.
    """

    def __init__(self, truths: Sequence[Sequence[int]], lengths: Sequence[int] = (4,), clutter: int = 0, seed: int = 0):
        self.truths = [list(truth) for truth in truths]
        self.lengths, self.clutter = list(lengths), clutter
        self.rng = random.Random(seed)

    def start(self, states: TargetStates, capacity: int) -> None:
        self.rows = list(range(states.tokens.shape[0]))
        self.known = [1] * len(self.rows)
        self.rounds = 0

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        right = self.lengths[self.rounds % len(self.lengths)]
        self.rounds += 1
        count = 1 + right + self.clutter
        tokens = torch.zeros(len(self.rows), count, dtype=torch.long)
        parents = torch.full((len(self.rows), count), -1)
        valid = torch.ones(len(self.rows), count, dtype=torch.bool)
        for at, (row, known) in enumerate(zip(self.rows, self.known, strict=True)):
            truth = self.truths[row][known : known + right]
            order = [True] * len(truth) + [False] * (count - 1 - len(truth))
            self.rng.shuffle(order)
            tokens[at, 0] = pending[at]
            spine, children = [0], {0: set()}
            for node, is_right in enumerate(order, start=1):
                children[node] = set()
                if is_right:
                    parent, token = spine[-1], truth[len(spine) - 1]
                    spine.append(node)
                else:
                    # A wrong token: one that is neither the right child nor a sibling's.
                    parent = self.rng.randrange(node)
                    depth = spine.index(parent) if parent in spine else None
                    answer = self.truths[row][known : known + right + 1]
                    taken = set(children[parent])
                    if depth is not None and depth < len(answer):
                        taken.add(answer[depth])
                    free = [token for token in range(VOCAB) if token not in taken]
                    token = self.rng.choice(free)
                parents[at, node], tokens[at, node] = parent, token
                children[parent].add(token)
        tree = TokenTree.from_parents(tokens, parents)
        return TokenTree(tokens, parents, tree.depths, valid)

    def observe(self, states: TargetStates) -> None:
        self.known = [known + count for known, count in zip(self.known, states.counts.tolist(), strict=True)]

    def select_rows(self, rows: Tensor) -> None:
        self.rows = [self.rows[at] for at in rows.tolist()]
        self.known = [self.known[at] for at in rows.tolist()]


class ClutteringDrafter(OracleDrafter):
    """Random trees alone."""

    def __init__(self, nodes: int = 9, seed: int = 0):
        super().__init__([], lengths=(0,), clutter=nodes - 1, seed=seed)

    def start(self, states: TargetStates, capacity: int) -> None:
        super().start(states, capacity)
        self.truths = [[] for _ in self.rows]
