"""What a trained head is: a drafter that is also an ``nn.Module``, with the alignment of its labels in one place."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtp.drafters.base import Drafter, TargetStates
from mtp.heads.context_vocabulary import BatchVocabulary
from mtp.support import UnsupportedTargetError
from mtp.target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class Prediction:
    """What a head says at one unrolled step, for M of the batch's positions.

    Attributes:
        logits: ``[M, V']`` over the batch's vocabulary (``Head.vocabulary``), which begins with the draft vocabulary.
        rows: ``[M]`` the batch row of each prediction.
        positions: ``[M]`` the token position whose *target distribution* each prediction imitates: the distribution
            over the token at ``positions + 1`` given everything up to ``positions``.
        hidden: ``[M, H]`` what each prediction takes the target's last hidden state at ``positions`` to be; None in
            families that make no such estimate.
        confidence: ``[M]`` what the head adds to the logit of a guess's probability to make it that of being
            accepted; None for heads that take their probabilities as they are.
    """

    logits: Tensor
    rows: Tensor
    positions: Tensor
    hidden: Tensor | None = None
    confidence: Tensor | None = None


@dataclass(frozen=True)
class HeadConfig:
    """Sizes that every family has.  A family adds its own in a subclass.

    Attributes:
        hidden_size: of the target.
        vocab_size: of the target.
        draft_vocab_size: tokens the head can propose; the most frequent ones in the training answers.
        steps: how many tokens ahead it was trained to draft (unrolled steps, or heads).
        nodes: nodes of the trees it proposes unless asked otherwise, the root included.
        taps: the target's layers it reads, by the ids of ``Target.default_taps``.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    steps: int = 4
    nodes: int = 16
    taps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.require(steps=1, nodes=1, draft_vocab_size=1)
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"The draft vocabulary ({self.draft_vocab_size} tokens) is larger than the target's "
                f"({self.vocab_size}); expected at most as many."
            )

    def require(self, **smallest: float) -> None:
        """Refuse sizes that are too small; for ``__post_init__``.

        Raises:
            ValueError: naming the first one, what was found and what was expected.
        """
        for name, least in smallest.items():
            if (found := getattr(self, name)) < least:
                raise ValueError(f"A head needs {name} of at least {least}; found {name}={found}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of ``to_dict``; unknown keys are refused."""
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        converted: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**converted)


@dataclass(frozen=True)
class TrainingBatch:
    """Some distilled rows with the target's states, as ``Head.unroll`` takes them.

    Attributes:
        states: the target's states of whole rows, prompt and response, starting at position 0.
        trained: ``[B, T]`` True at the tokens whose prediction is trained (the response, its end token included).
        own_tokens: probability that the steps unrolled from a position follow the head's own guesses; see
            ``mtp.heads.unrolling.misses_own_token``.
    """

    states: TargetStates
    trained: Tensor
    own_tokens: float = 0.0

    def bases(self, lookahead: int) -> Tensor:
        """``[B, T]`` True at positions t whose guess at the token ``t + lookahead`` is trained."""
        moved = torch.zeros_like(self.trained)
        moved[:, : max(self.trained.shape[1] - lookahead, 0)] = self.trained[:, lookahead:]
        return moved


PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)


class Head(nn.Module, Drafter):
    """A small network on top of a frozen target that drafts several tokens ahead.

    A head proposes the token after the pending one first: its step s, standing at position t, knows the token
    ``t + 1`` and guesses the token ``t + 2 + s``.

    Attributes:
        family: the registry's name for it.
        attends_to_prompt: whether a guess depends on states before the position it is made from.
        reads_embeddings: whether it puts the target's embeddings of tokens beside hidden states, as wide as these.
        estimates_hidden: whether its predictions hold an estimate of the target's hidden states.
        follows_own_tokens: whether it unrolls steps that can follow its own guesses.
        fixed_sizes: of its config, those that follow from the target and cannot be asked for.
        of_the_moment: attributes that a copy does not take along: what belongs to a generation, is derived from the
            weights or compiled, and the target, which the copy drafts for as well.
        recomputes: whether unrolled steps can be computed again in the backward pass instead of being kept.
        activation_checkpointing: whether they are; see ``recomputed``.
        draft_ids: ``[Vd]`` target token id of each entry of the draft vocabulary.
    """

    family: ClassVar[str]
    attends_to_prompt: ClassVar[bool] = True
    reads_embeddings: ClassVar[bool] = True
    estimates_hidden: ClassVar[bool] = False
    follows_own_tokens: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    fixed_sizes: ClassVar[frozenset[str]] = frozenset({"taps"})  # most families read the final hidden states alone
    of_the_moment: ClassVar[frozenset[str]] = frozenset({"state", "_target", "_packed"})
    config_class: ClassVar[type[HeadConfig]] = HeadConfig
    config: HeadConfig
    activation_checkpointing: bool = False
    draft_ids: Tensor
    _target: tuple[Target, ...] = ()  # in a tuple: no submodule, whose weights would be the head's

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.taps = config.taps
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A head of the same weights for the same target, that has not drafted yet."""
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        kept = {name: value for name, value in self.__dict__.items() if name not in self.of_the_moment}
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in kept.items()})
        return clone.attach(self.target) if self._target else clone

    @classmethod
    def from_target(cls, target: Target, draft_ids: Tensor, **sizes: Any) -> Self:
        """A fresh head for ``target``, attached to it.

        Args:
            draft_ids: ``[Vd]`` the draft vocabulary.
            sizes: of the family's config; those that are not named follow from the target (``default_sizes``).

        Raises:
            ValueError: for sizes that make no head, or that the target cannot carry.
        """
        config = cls.config_class(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_ids.numel(),
            **{**cls.default_sizes(target, sizes), **sizes},
        )
        head = cls.of_sizes(config, target).to(target.device).attach(target)
        head.set_draft_vocabulary(draft_ids)
        return head

    @classmethod
    def default_sizes(cls, target: Target, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes that follow from the target, or from the sizes that were ``asked`` for, unless they are asked for."""
        return {}

    @classmethod
    def of_sizes(cls, config: Any, target: Target) -> Self:
        """A head of these sizes, its weights still to be set; ``target`` is for families that borrow its layers."""
        return cls(config)

    @property
    def target(self) -> Target:
        if not self._target:
            raise RuntimeError("This head is attached to no target; call head.attach(target) first.")
        return self._target[0]

    def attach(self, target: Target) -> Self:
        """Connect to the target, whose embeddings it reads.  The target does not become part of the head's weights.

        Raises:
            ValueError: if the sizes do not fit, or the target lacks a layer that the head reads.
        """
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        for name, found in sizes.items():
            if (expected := getattr(self.config, name)) != found:
                raise ValueError(
                    f"This {self.family} head was made for a target with {name} {expected}; the target at hand has "
                    f"{found}. Load the target that the checkpoint names."
                )
        for layer in self.config.taps:
            if not 0 <= layer <= target.num_layers:
                raise UnsupportedTargetError(
                    f"This {self.family} head reads layer {layer} of the target (taps {list(self.config.taps)}), but "
                    f"the target at hand has layers 0 to {target.num_layers}."
                )
        if self.reads_embeddings:
            width = target.embed(torch.zeros(1, dtype=torch.long, device=target.device)).shape[-1]
            if width != target.hidden_size:
                raise UnsupportedTargetError(
                    f"A {self.family} head reads embeddings as wide as hidden states ({target.hidden_size}); those of "
                    f"this target have {width} dimensions. Train a head that reads no embeddings (head.family=medusa)."
                )
        self._target = (target,)
        return self

    def cast(self, dtype: torch.dtype) -> Self:
        """Keep its weights in ``dtype``, for decoding.

        What inputs are scaled by, and the tables of positions, stay in the precision that they were made in.  Where
        ``dtype`` is that of a quantised target, in which nothing can be computed, weights stay as they are, too.
        """
        if dtype not in PRECISIONS:
            return self
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    @property
    def runs_as(self) -> str:
        return str(next(self.parameters()).dtype)

    @property
    def longest(self) -> int | None:
        """Most tokens of a text that it can be trained on; None for as many as the target takes."""
        return None

    @abstractmethod
    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """Predictions of every step, for exactly the trained tokens that the step can reach.

        Step s trains each marked token j with ``j >= 2 + s`` once, from base position ``j - 2 - s``.
        """

    def recomputed(self, part: Callable[..., T], *inputs: Any) -> T:
        """``part(*inputs)``, a part of ``unroll`` that depends on nothing that changes before the backward pass.

        With ``activation_checkpointing`` its inputs alone are kept until then, and the rest is computed again (Chen et
        al., arXiv 1604.06174).
        """
        if not self.activation_checkpointing:
            return part(*inputs)
        result: T = checkpoint(part, *inputs, use_reentrant=False)
        return result

    def forward(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        """``unroll``, under the name by which wrappers for distributed training call it."""
        return self.unroll(batch, steps)

    @abstractmethod
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Set the weights by least squares on the target's own states; one pass over ``batches``."""

    def set_rank_accuracy(self, rank_accuracy: tuple[tuple[float, ...], ...]) -> None:
        """Take over how often, on held-out text, each step's guess of each rank was right; for heads that use it."""

    def set_calibration(self, calibration: tuple[tuple[float, float], ...]) -> None:
        """Take over how far, on held-out text, confidences at each depth could be believed; for heads that use it.

        Offset and slope of the logit of being accepted over the logit of the head's own probability.
        """

    def set_draft_vocabulary(self, draft_ids: Tensor) -> None:
        """Name the target tokens that the head's output rows stand for (``[Vd]``, without repeats)."""
        if draft_ids.shape != self.draft_ids.shape or draft_ids.unique().numel() != draft_ids.numel():
            raise ValueError(
                f"Expected {self.draft_ids.numel()} different token ids as the draft vocabulary; found "
                f"{draft_ids.numel()} ids, {draft_ids.unique().numel()} of them different."
            )
        if draft_ids.min() < 0 or draft_ids.max() >= self.config.vocab_size:
            raise ValueError(
                f"The draft vocabulary holds ids from {int(draft_ids.min())} to {int(draft_ids.max())}; the target has "
                f"tokens 0 to {self.config.vocab_size - 1}."
            )
        self.draft_ids.copy_(draft_ids)

    def vocabulary(self, batch: TrainingBatch) -> BatchVocabulary:
        """The tokens that it can guess in ``batch``."""
        return BatchVocabulary.of(self.draft_ids, self.config.vocab_size)

    def num_trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)
