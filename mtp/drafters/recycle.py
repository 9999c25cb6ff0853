"""Token recycling (Luo et al., arXiv 2408.08696): what the target said after a token, the last time it looked at it.

Every pass computes the target's distribution at all nodes of a tree and uses those on one path.  Here the likeliest
tokens at every node, the refused ones too, are written down in a table of successors, and the next tree is read out of
it: the successors of the pending token, theirs, and so on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtp.drafters.base import Budget, Drafter, Draw, TargetStates
from mtp.drafters.reliability import Reliability, committed_text, held_against
from mtp.growth import BestFirstGrowth
from mtp.tree import TokenTree
from mtp.verify import Verdict

COPIED = 0.3  # what a pair of neighbours in a prompt is taken to promise; corrected by what comes of it


class RecyclingDrafter(Drafter):
    """Drafts from a table of each token's successors, as the target last named them.

    The paper keeps ranks and expands one tree that was found by hand.  Here the target's probabilities are kept beside
    the tokens, and corrected by how often such guesses were right of late, so that every tree grows where it is
    likeliest to be accepted and the planner can tell what a node is worth.  Two additions fill an empty table sooner:
    neighbours in the prompt are successors too, and rounds without drafting are learnt from.

    What it has learnt is about the target's language, not about one text, and is kept from one generation to the next
    on purpose; the first answers of a fresh drafter are the slowest.  Trees then depend on the generations before.
    Greedy text does not, nor does sampled text at batch 1 on a CPU; where a batch has to be sampled twice alike, call
    ``forget`` before each time.

    Children drawn at random are not on offer, as a table holds no distribution to draw from: trees are the same for
    every rule, and rules for drawn children verify them by the walk.

    The table takes 6 bytes for each token of the vocabulary and successor, on the target's device: 2.4 MB for a
    vocabulary of 49,152 and 12.6 MB for one of 262,144 with 8 successors each.  It does not grow with what is read.

    Args:
        successors: kept for each token.
        depth: longest path of drafted tokens.
        width: nodes expanded a level.
    """

    runs_network = False

    def __init__(self, successors: int = 8, depth: int = 8, width: int = 8):
        if min(successors, depth, width) < 1:
            raise ValueError(
                f"Token recycling needs at least one successor, level and node a level; found successors={successors}, "
                f"depth={depth}, width={width}."
            )
        self.successors, self.depth, self.width = successors, depth, width
        self.forget()

    def forget(self) -> None:
        self.reliability = Reliability()
        # Entry 0 belongs to no token; those of token t are at t + 1.  A confidence of zero stands for no successor.
        self._tokens = torch.zeros(1, self.successors, dtype=torch.int32)
        self._confidences = torch.zeros(1, self.successors, dtype=torch.float16)
        self._proposed: TokenTree | None = None
        self._reads_on = False

    def start(self, states: TargetStates, capacity: int) -> None:
        self._proposed = None
        self._copy(states)
        self._reads_on = False

    def observe(self, states: TargetStates) -> None:
        """What a round commits was learnt from as part of its tree; what a continued text brings along was not."""
        if self._reads_on:
            self._copy(states)
        self._reads_on = False

    def select_rows(self, rows: Tensor) -> None:
        """The table serves all rows."""

    def rewind(self, length: int) -> int:
        self._proposed = None
        self._reads_on = True
        return length

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        growth = BestFirstGrowth(pending, budget, self.width, self._believed)
        expanded = pending[:, None]
        for level in range(1, self.depth + 1):
            place = self._place(expanded)
            growth.add_children(self._tokens[place].long(), self._confidences[place].float().log())
            if level == self.depth or not growth.pays_to_go_on():
                break
            expanded = growth.frontier()[0]
        self._proposed = growth.tree()
        return self._proposed

    def _believed(self, log_q: Tensor, depth: int) -> Tensor:
        return self.reliability.believed(log_q.exp()).log()

    @torch.no_grad()
    def observe_tree(self, tree: TokenTree, logits: Tensor, verdict: Verdict) -> None:
        if self._proposed is not None and self._proposed.log_q is not None:
            tried, right = held_against(self._proposed, *committed_text(tree, verdict))
            self.reliability.learn(self._proposed.log_q.exp(), tried, right)
        self._proposed = None
        count = min(self.successors, logits.shape[-1])
        likeliest = logits.topk(count, dim=-1)
        confidences = (likeliest.values.float() - logits.float().logsumexp(-1, keepdim=True)).exp()
        # A token may stand at several nodes: one on the kept path, whose context is real, speaks last.
        counted = torch.arange(verdict.path.shape[1], device=verdict.path.device) < verdict.counts[:, None]
        kept = torch.zeros_like(tree.valid).scatter(1, torch.where(counted, verdict.path, 0), True)
        latest = _latest(tree.tokens, kept, tree.valid)
        self._reserve(logits.shape[-1], logits.device)
        place = torch.where(latest, tree.tokens + 1, 0).flatten()
        self._tokens[place, :count] = likeliest.indices.flatten(0, 1).int()
        self._confidences[place, :count] = confidences.flatten(0, 1).half()
        self._confidences[0] = 0.0

    def _copy(self, states: TargetStates) -> None:
        """Enter each token's follower in the prompts; of several followers the last."""
        if states.tokens.shape[1] < 2:
            return
        token, follower = states.tokens[:, :-1], states.tokens[:, 1:]
        real = states.valid[:, 1:]
        self._reserve(int(states.tokens.max()) + 1, token.device)
        latest = _latest(token, torch.zeros_like(real), real)
        place = torch.where(latest, token + 1, 0).flatten()
        known, confidences = self._tokens[place], self._confidences[place]
        follower = follower.flatten()[:, None].int()
        # A follower that is known keeps its place; another one takes that of the least likely.
        new = torch.where((known == follower) & (confidences > 0), 0.0, confidences.new_tensor(COPIED)).amin(1)
        worst = confidences.argmin(1, keepdim=True)
        wins = new[:, None] > confidences.gather(1, worst)
        known = torch.where(wins, known.scatter(1, worst, follower), known)
        confidences = torch.where(wins, confidences.scatter(1, worst, new[:, None]), confidences)
        self._tokens[place], self._confidences[place] = known, confidences
        self._confidences[0] = 0.0

    def _place(self, tokens: Tensor) -> Tensor:
        """Where each token's successors are; a token that was never seen has none."""
        return torch.where(tokens + 1 < self._tokens.shape[0], tokens + 1, 0)

    def _reserve(self, vocab_size: int, device: torch.device) -> None:
        """Room for the successors of so many tokens, on ``device``."""
        missing = max(vocab_size + 1 - self._tokens.shape[0], 0)
        if missing or self._tokens.device != device:
            grow = (0, 0, 0, missing)
            self._tokens = torch.nn.functional.pad(self._tokens.to(device), grow)
            self._confidences = torch.nn.functional.pad(self._confidences.to(device), grow)


def _latest(tokens: Tensor, preferred: Tensor, valid: Tensor) -> Tensor:
    """``[B, N]`` True at one node for each token: the last preferred one, or the last."""
    flat = torch.where(valid, tokens, -1).flatten()
    order = (2 * flat + preferred.flatten()).sort(stable=True)
    names = order.values >> 1
    last = torch.cat([names[1:] != names[:-1], names.new_ones(1, dtype=torch.bool)])
    return torch.zeros_like(last).scatter(0, order.indices, last & (names >= 0)).view_as(tokens)
