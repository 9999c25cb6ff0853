"""The round loop: draft a tree, verify it in one pass of the target, commit a path, stop, stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters.base import Drafter, Draw, TargetStates
from mtp.past import Past
from mtp.planner import Planner, RoundReport
from mtp.sampling import NodeScores, TargetSampler
from mtp.stats import AcceptanceStats, Drift
from mtp.target import Target
from mtp.tree import TokenTree
from mtp.verify import Outcome

SPARE = 128  # least slots for staged nodes: drafters that use the target's cache stage more than the tree holds


@dataclass(eq=False)  # a row is itself: two rows with the same tokens are still two
class Row:
    """One sequence while it grows.

    Attributes:
        index: its place in the caller's batch.
        ids: the caller's (padded) prompt and everything committed or chosen since; the last one is pending.
        kept: for every token generated, whether it was guessed by the drafter.
        scores: for every token generated, the processed scores ``[V]`` that it was chosen from, where they are wanted.
        logits: and the target's own logits ``[V]``.
    """

    index: int
    ids: list[int]
    kept: list[bool] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class DecodeSettings:
    """How to decode, apart from which token to choose.

    Attributes:
        planner: decides how large a tree each round may make.
        draw: draw the drafter's children at random instead of taking its likeliest ones.
        keep_scores: keep the processed scores of every token.
        keep_logits: keep the target's own logits of every token.
    """

    planner: Planner
    draw: Draw | None = None
    keep_scores: bool = False
    keep_logits: bool = False


class StopRule:
    """When a row ends: the prepared criteria, asked after every single token, so that no block overshoots.

    A criterion of the caller's own may tell rows apart by their place: it is shown a batch of the original size.
    """

    def __init__(self, criteria: StoppingCriteriaList, device: torch.device, batch_size: int = 1):
        self.device = device
        self.batch_size = batch_size
        self.eos: set[int] = set()
        self.max_length: int | None = None
        self.others = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            else:
                self.others.append(criterion)

    def ends(self, row: Row) -> bool:
        """Whether the sequence is complete with its last token."""
        ids = row.ids
        if ids[-1] in self.eos or (self.max_length is not None and len(ids) >= self.max_length):
            return True
        if not self.others:
            return False
        tensor = torch.tensor([ids], device=self.device).expand(self.batch_size, -1)
        answers = [torch.as_tensor(criterion(tensor, None)) for criterion in self.others]
        return any(bool(answer.flatten()[row.index if answer.numel() > 1 else 0]) for answer in answers)


class Decoder:
    """Generates for one batch.

    Args:
        target: verifies.
        drafter: guesses.
        sampler: chooses tokens under the caller's settings.
        stop: decides when a row ends.
        settings: tree size and kind.
        on_token: called with ``(row index, token, kept)`` for every token, in order; ``kept`` says whether the drafter
            had guessed it.
        drift: is told what drafted rounds commit.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampler: TargetSampler,
        stop: StopRule,
        settings: DecodeSettings,
        on_token: Callable[[int, int, bool], None] | None = None,
        drift: Drift | None = None,
    ):
        self.target = target
        self.drafter = drafter
        self.sampler = sampler
        self.stop = stop
        self.settings = settings
        self.on_token = on_token
        self.drift = drift
        self.stats = AcceptanceStats()
        self._lengths: list[int] = []
        if not sampler.rule.exact:
            self.stats.notes.append(
                f"rule={sampler.rule.name!r} is lossy: the text is not distributed as the target's own"
            )
        if sampler.processors.token_processors:
            names = ", ".join(sampler.processors.token_processors)
            self.stats.notes.append(f"{names} depend on the tokens before a node: distributions computed node by node")

    @torch.no_grad()
    def run(self, prompts: list[list[int]], padded: list[list[int]], past: Past | None = None) -> list[Row]:
        """Generate behind ``prompts`` (real tokens only).

        Args:
            padded: the prompts as the caller gave them, which is what Transformers' logits processors see.
            past: of a single row: what of it need not be read again.  Holds what can be continued from here afterwards.

        Returns:
            All rows, in the caller's order.
        """
        with self.stats.timed("prefill"):
            rows, cache, pending = self._prefill(prompts, padded, past)
        finished = [row for row in rows if self.stop.ends(row)]
        active = [row for row in rows if row not in finished]
        pending = self._drop_finished(rows, active, cache, pending)
        while active:
            before = active
            pending = self._round(active, cache, pending)
            active = [row for row in active if not self.stop.ends(row)]
            finished += [row for row in before if row not in active]
            with self.stats.timed("other"):
                pending = self._drop_finished(before, active, cache, pending)
        if past is not None:
            text = prompts[0] + rows[0].ids[len(padded[0]) :]
            past.keep(cache, text[: self._lengths[0]], self.drafter)
        else:
            self.target.give_back(cache)
        return sorted(finished, key=lambda row: row.index)

    def _round(self, rows: list[Row], cache: TreeCache, pending: Tensor) -> Tensor:
        """One pass of the target; returns the new pending tokens ``[B]``."""
        started = time.perf_counter()
        budget = self.settings.planner.budget(max(self._lengths), len(rows))
        with self.stats.timed("draft"):
            tree = TokenTree.root_only(pending)
            if budget is not None:
                tree = self._within_positions(self.drafter.propose(pending, budget, self.settings.draw))
                self._note_other_rule(tree)
        with self.stats.timed("verify"):
            attention = AttentionPass.over_tree(tree, cache.lengths, cache.start)
            output = self.target.forward(tree.tokens, cache, attention, self.drafter.taps)
            scores = self.sampler.at_nodes(
                tree, output.logits, [row.ids[:-1] for row in rows], [row.index for row in rows]
            )
            verdict = self.sampler.verify(scores)
            outcome = Outcome.of(tree, verdict)  # the one point of a round at which the host waits for the device
            verdict = verdict.narrowed(max(map(len, outcome.paths)))
        with self.stats.timed("other"):
            counts = self._commit_tokens(rows, scores, outcome)
        with self.stats.timed("commit"):
            self._lengths = [at + count for at, count in zip(self._lengths, counts, strict=True)]
            # Fewer than the verdict's only where a row ends inside its block.
            whole = counts == [len(path) for path in outcome.paths]
            kept = verdict.counts if whole else torch.tensor(counts, device=verdict.path.device)
            path = verdict.path[:, : max(counts)]
            in_order = len(counts) == 1 and outcome.paths[0][: counts[0]] == list(range(counts[0]))
            cache.commit(None if in_order else path, kept, max(self._lengths))
        with self.stats.timed("draft"):
            self.drafter.observe_tree(tree, output.logits, verdict)
            self.drafter.observe(_states_along(path, kept, tree, output.hidden, output.taps))
        self.settings.planner.learn(
            RoundReport(
                drafted=budget is not None,
                committed=sum(counts) / len(counts),
                promised=None if outcome.promised is None else sum(outcome.promised) / len(counts) - 1,
                seconds=time.perf_counter() - started,
                tree=tree,
                verdict=verdict,
                outcome=outcome,
            )
        )
        return verdict.next_token

    def _commit_tokens(self, rows: list[Row], scores: NodeScores, outcome: Outcome) -> list[int]:
        """Append each row's accepted tokens up to its end; returns how many path nodes belong into the cache."""
        committed, promised = [], outcome.promised
        for at, row in enumerate(rows):
            path, drafted = outcome.paths[at], outcome.drafted[at]
            block = [*outcome.tokens[at][1:], outcome.next_tokens[at]]
            used = 0
            for node, token in zip(path, block, strict=True):
                if self.settings.keep_scores:
                    row.scores.append(scores(at, node).clone())
                if self.settings.keep_logits:
                    row.logits.append(scores.logits[at, node].float())
                self._append(row, token, kept=used < len(path) - 1)
                used += 1
                if used < len(block) and self.stop.ends(row):
                    break
            committed.append(used)
            self.stats.record(kept=min(len(path) - 1, used), committed=used, drafted=drafted)
            if drafted and self.drift is not None and promised is not None:
                self.drift.record(used, promised[at])
        return committed

    def _prefill(
        self, prompts: list[list[int]], padded: list[list[int]], past: Past | None
    ) -> tuple[list[Row], TreeCache, Tensor]:
        """Read the prompts, choose each row's first token and start the drafter."""
        device = self.target.device
        self._lengths = [len(prompt) for prompt in prompts]
        longest = max(self._lengths)
        self._refuse_long(longest)
        capacity = self._capacity(longest, min(len(row) for row in padded))
        cache = past.rewind(prompts[0], self.drafter) if past is not None else None
        cache = cache or self.target.new_cache(len(prompts), capacity)
        cache.reserve(capacity)
        known = cache.start  # tokens of a continued text that need not be read again
        unread = [prompt[known:] for prompt in prompts]
        ids = torch.tensor([tokens + [0] * (longest - known - len(tokens)) for tokens in unread], device=device)
        counts = torch.tensor([len(tokens) for tokens in unread], device=device)
        attention = AttentionPass.over_chain(ids.shape[1], cache.lengths, cache.start)
        last, inverse = (counts - 1).unique(return_inverse=True)
        output = self.target.forward(ids, cache, attention, self.drafter.taps, logits_at=last)
        cache.commit(None, counts, longest)
        logits = output.logits[torch.arange(len(prompts), device=device), inverse]
        states = TargetStates(ids, output.hidden, output.taps, counts)
        self.drafter.refresh()
        self.drafter.share(cache)
        if known:
            self.drafter.observe(states)
        else:
            self.drafter.start(states, capacity)
        rows, pending = self._first_tokens(padded, logits)
        return rows, cache, pending

    def _capacity(self, longest: int, shortest_padded: int) -> int:
        """Slots for the longest text there can be, and the largest tree behind it: buffers are made once.

        Args:
            longest: tokens of the longest prompt.
            shortest_padded: of the shortest one, padding included, from which the length of the answer is counted.
        """
        end = longest + max((self.stop.max_length or 0) - shortest_padded, 0)
        if self.target.max_positions is not None:
            end = min(end, self.target.max_positions)
        return end + max(SPARE, self.settings.planner.nodes)

    def _first_tokens(self, padded: list[list[int]], logits: Tensor) -> tuple[list[Row], Tensor]:
        """The rows with the token that follows each prompt, chosen from ``logits [B, V]``; and these tokens ``[B]``."""
        rows = [Row(index, list(ids)) for index, ids in enumerate(padded)]
        scores = self.sampler.processors.all_rows(torch.tensor(padded, device=logits.device), logits)
        pending = self.sampler.choose(scores)
        for row, token in zip(rows, pending.tolist(), strict=True):
            if self.settings.keep_scores:
                row.scores.append(scores[row.index])
            if self.settings.keep_logits:
                row.logits.append(logits[row.index].float())
            self._append(row, token, kept=False)
        return rows, pending

    def _append(self, row: Row, token: int, kept: bool) -> None:
        row.ids.append(token)
        row.kept.append(kept)
        if self.on_token is not None:
            self.on_token(row.index, token, kept)

    def _drop_finished(self, rows: list[Row], active: list[Row], cache: TreeCache, pending: Tensor) -> Tensor:
        """Take ended rows out of the batch, so that no pass is spent on them."""
        if len(active) == len(rows) or not active:
            return pending
        keep = [at for at, row in enumerate(rows) if row in active]
        self._lengths = [self._lengths[at] for at in keep]
        index = torch.tensor(keep, device=pending.device)
        cache.select_rows(index, max(self._lengths))
        self.drafter.select_rows(index)
        return pending[index]

    def _within_positions(self, tree: TokenTree) -> TokenTree:
        """The tree without guesses past the target's last position."""
        limit = self.target.max_positions
        return tree if limit is None else tree.no_deeper_than(max(limit - 1 - max(self._lengths), 0))

    def _note_other_rule(self, tree: TokenTree) -> None:
        """Guesses that depend on no draws are decided by the walk, which says so where another rule was asked for."""
        if self.settings.draw is None or tree.is_drawn or tree.num_nodes == 1:
            return
        note = f"the drafter draws no guesses at random: the walk decided, not rule={self.sampler.rule.name!r}"
        if note not in self.stats.notes:
            self.stats.notes.append(note)

    def _refuse_long(self, longest: int) -> None:
        limit = self.target.max_positions
        if limit is not None and longest >= limit:
            raise ValueError(
                f"A prompt has {longest} tokens; this target has {limit} positions, and at least one must be left for "
                "the answer. Shorten the prompt."
            )


def _states_along(path: Tensor, counts: Tensor, tree: TokenTree, hidden: Tensor, taps: Tensor | None) -> TargetStates:
    """The states of the nodes that were committed, in order."""
    if tree.num_nodes == 1:  # nothing to pick from, in rounds that are decoded plainly
        return TargetStates(tree.tokens, hidden, taps, counts)

    def pick(states: Tensor) -> Tensor:
        return states.gather(1, path[..., None].expand(-1, -1, states.shape[2]))

    return TargetStates(tree.tokens.gather(1, path), pick(hidden), None if taps is None else pick(taps), counts)
