"""A smaller language model of the same vocabulary as drafter (Leviathan et al., arXiv 2211.17192).

It keeps a cache of its own and grows trees: in batches of ragged rows, greedy or drawn.  It reads nothing before it is
asked to guess: where the planner decodes plainly it costs nothing, and catches up in one pass afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mtp.attention import AttentionPass
from mtp.cache import TreeCache
from mtp.drafters.base import Budget, Drafter, Draw, TargetStates
from mtp.drafters.layer_subset import keep_layers
from mtp.drafters.lm_tree import Reader, TreeShape, grow
from mtp.drafters.unread import Unread
from mtp.drafters.vocabulary import local_tokenizer, refuse_other_vocabulary
from mtp.target import Target
from mtp.tree import TokenTree

SHAPE = TreeShape()


@dataclass(frozen=True)
class AssistantConfig:
    """Which model drafts (as its fingerprint, precision and device say), and the trees it grows."""

    fingerprint: str
    dtype: str
    device: str
    shape: TreeShape


@dataclass
class AssistantState:
    """What an assistant knows of a generation.

    Attributes:
        model: whose keys and values these are.
        cache: of the text that was read.
        unread: the tokens behind it (their states are left out).
        read_ahead: the pending token was read too: the next tokens to be observed begin with it.
    """

    model: Target
    cache: TreeCache
    unread: Unread
    read_ahead: bool = False


class Assistant(Drafter):
    """Drafts with another, smaller causal LM.

    Args:
        model: a loaded Transformers causal LM that understands the target's token ids.  It may be on another device and
            in another precision; its context may be shorter, then it stops drafting at its end.
        tokenizer: of the model.
        target_tokenizer: of the target.  Where both are known they have to agree; where they are not given, those lying
            beside the models' weights are used.
        shape: of its trees.
        draft_ids: the tokens that it may guess; None for all.

    Raises:
        UnsupportedTargetError: for models that cannot read trees.
    """

    state: AssistantState | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        target_tokenizer: Any = None,
        shape: TreeShape = SHAPE,
        draft_ids: Tensor | None = None,
    ):
        self.model = Target(model)
        self.tokenizer = tokenizer
        self.target_tokenizer = target_tokenizer
        self.draft_ids = draft_ids
        self.config = AssistantConfig(self.model.fingerprint(), str(self.model.dtype), str(self.model.device), shape)
        self._target: Target | None = None

    @property
    def runs_as(self) -> str:
        return self.model.runs_as

    def refresh(self) -> None:
        self.model.refresh()

    def compile_parts(self) -> list[str]:
        return list(self.model.compile(progress=False).reasons)

    @classmethod
    def from_pretrained(
        cls, name_or_path: str | Path, *, target_tokenizer: Any = None, shape: TreeShape = SHAPE, **kwargs: Any
    ) -> Self:
        """Load a model and, where there is one, its tokenizer.

        Args:
            kwargs: for ``AutoModelForCausalLM.from_pretrained``: ``dtype``, ``device_map`` ...
        """
        model = AutoModelForCausalLM.from_pretrained(name_or_path, **{"dtype": "auto", **kwargs})
        shared = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token") if name in kwargs}
        try:
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **shared)
        except (OSError, ValueError):  # a folder of weights alone
            tokenizer = None
        return cls(model, tokenizer, target_tokenizer, shape)

    @classmethod
    def from_layers(
        cls, target_lm: PreTrainedModel, layers: Iterable[int], *, tokenizer: Any = None, shape: TreeShape = SHAPE
    ) -> Self:
        """The target with some of its own layers only, as a model of its own that can be trained and saved.

        The weights are the target's own tensors: they take no memory of their own, and training them would change the
        target.  Save the model and load it again to have a copy.

        Args:
            layers: the layers that stay, counted from 0.

        Raises:
            UnsupportedTargetError: for layers that do not exist or cannot make a model by themselves.
        """
        return cls(keep_layers(target_lm, tuple(layers)), tokenizer, tokenizer, shape)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, and its tokenizer where it has one, as a plain Transformers folder."""
        self.model.causal_lm.save_pretrained(folder)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def attach(self, target: Target) -> Self:
        """Check that the two models mean the same by the same token ids.

        Raises:
            ValueError: if they do not, or if that cannot be told.
        """
        if target is self._target:
            return self
        ours = self.tokenizer or local_tokenizer(self.model)
        theirs = self.target_tokenizer or local_tokenizer(target)
        refuse_other_vocabulary(self.model.vocab_size, ours, target.vocab_size, theirs)
        self._target = target
        return self

    @torch.no_grad()
    def start(self, states: TargetStates, capacity: int) -> None:
        shape = self.config.shape
        cache = self.model.new_cache(states.tokens.shape[0], capacity + shape.width * shape.depth)
        self.state = AssistantState(self.model, cache, Unread(_tokens_of(states, self.model.device)))

    @torch.no_grad()
    def observe(self, states: TargetStates) -> None:
        known = self._known()
        new = _tokens_of(states, self.model.device)
        known.unread.add(new.without_first(1) if known.read_ahead else new)
        known.read_ahead = False

    @torch.no_grad()
    def select_rows(self, rows: Tensor) -> None:
        known = self._known()
        rows = rows.to(self.model.device)
        known.cache.select_rows(rows, int(known.cache.lengths[rows].max()))
        known.unread.select_rows(rows)

    @torch.no_grad()
    def rewind(self, length: int) -> int:
        known = self.state
        if known is None or known.model is not self.model:  # another assistant's: its keys and values mean nothing here
            return 0
        known.read_ahead = False
        read = int(known.cache.lengths[0])
        if length <= read or known.unread.counts is None:
            known.cache.crop(min(length, read))
            known.unread = Unread()
            return min(length, read)
        waiting = known.unread.take()
        left = min(length - read, int(waiting.counts[0]))
        known.unread.add(_without_states(waiting.tokens[:, :left], torch.full_like(waiting.counts, left)))
        return read + left

    @torch.no_grad()
    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        known = self._known()
        if self._target is None:
            raise RuntimeError("This assistant is attached to no target; call attach(target) first.")
        shape = self._shape_within(known)
        if shape is None or budget.nodes < 2:
            return TokenTree.root_only(pending)

        def forward(ids: Tensor, attention: AttentionPass) -> Tensor:
            return self.model.forward(self._readable(ids), known.cache, attention).logits

        logits = self._read(known, pending.to(self.model.device))
        reader = Reader(forward, known.cache, self._target.vocab_size, self.draft_ids)
        return grow(reader, pending, logits, budget, shape, draw)

    def _known(self) -> AssistantState:
        if self.state is None:
            raise RuntimeError("This assistant was told of no text; call start first (see Drafter).")
        return self.state

    def _shape_within(self, known: AssistantState) -> TreeShape | None:
        """The trees that end before the model's last position; None where there is no room, and nothing is read."""
        shape, limit = self.config.shape, self.model.max_positions
        if limit is None:
            return shape
        waiting = 0 if known.unread.counts is None else int(known.unread.counts.max())
        return shape.within(limit - known.cache.start - waiting)  # padding behind shorter rows has positions as well

    def _read(self, known: AssistantState, pending: Tensor) -> Tensor:
        """Read what was committed since the last call, and the pending tokens ``[B]``; their logits ``[B, 1, V']``."""
        cache = known.cache
        known.unread.add(_without_states(pending[:, None], torch.ones_like(pending)))
        new = known.unread.take()
        attention = AttentionPass.over_chain(new.tokens.shape[1], cache.lengths, cache.start)
        last, inverse = (new.counts - 1).unique(return_inverse=True)
        output = self.model.forward(self._readable(new.tokens), cache, attention, logits_at=last)
        cache.commit(None, new.counts, cache.longest_with(new.counts))
        known.read_ahead = True
        return output.logits[torch.arange(len(pending), device=pending.device), inverse][:, None]

    def _readable(self, ids: Tensor) -> Tensor:
        """Ids that the model has an embedding for: the target's matrix may be padded further than its own."""
        return ids.clamp_max(self.model.causal_lm.get_input_embeddings().weight.shape[0] - 1)


def _tokens_of(states: TargetStates, device: torch.device) -> TargetStates:
    """The tokens and counts alone: an assistant computes states of its own, and keeps none of the target's alive."""
    return _without_states(states.tokens.to(device), states.counts.to(device))


def _without_states(tokens: Tensor, counts: Tensor) -> TargetStates:
    return TargetStates(tokens, tokens.new_empty(*tokens.shape, 0), None, counts)
