"""Tree attention for stock Transformers models.

An attention function and a mask function are registered with Transformers' ``AttentionInterface`` and
``AttentionMaskInterface``.  While a pass of ours runs, the model's configs name them as the attention implementation;
outside of a pass the model is as its owner left it.

The mask function is asked by the model for the mask of each kind of layer, and handed that kind's *pattern*: a
predicate over a query's and a key's place, such as "not further back than the window" or "in the same chunk".  It
evaluates the pattern at the places that the tokens would have in a text of their own, their logical positions, and
keeps what the tree lets a node see.  So windows and chunks are exact whatever the architecture makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's customary name
from transformers import AttentionInterface, AttentionMaskInterface

from mtp import kernels, merged_attention
from mtp.tree import TokenTree

ATTENTION_NAME = "mtp_tree"
KINDS_OF_MASK = 4  # full, sliding, chunked ...: as many are kept during a pass

# Transformers' mask functions: (batch index, head index, query position, key position) -> visible, broadcasting.
Pattern = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_current_pass: ContextVar[AttentionPass] = ContextVar("mtp_attention_pass")


class AttentionPass:
    """What the tokens of one forward pass see: a prefix of their row, and some of the staged tokens.

    Args:
        lengths: ``[B]`` committed tokens of each row.
        start: slot of the first staged token: the length of the longest row, and so of a single one.
        positions: ``[B, T]`` positions of this pass's tokens (the queries).
        staged_mask: ``[B, T, S]`` which of the S staged tokens each query sees, itself included; None for a chain, in
            which each sees those before it.
        staged_positions: ``[B, S]`` positions of all staged tokens.
        causal: the pass is a plain causal chain over empty rows (a prefill), for which no mask has to be built unless
            a window is shorter than it.

    Attributes:
        calls: attention layers that ``tree_attention`` has served in this pass.
    """

    def __init__(
        self,
        lengths: Tensor,
        start: int,
        positions: Tensor,
        staged_mask: Tensor | None,
        staged_positions: Tensor,
        causal: bool = False,
    ):
        self.lengths = lengths
        self.start = start
        self.positions = positions
        if staged_mask is not None:
            self.staged_mask = staged_mask
        self.staged_positions = staged_positions
        self.causal = causal
        self.calls = 0
        self._visible: dict[torch.device, Tensor] = {}
        self._biases: dict[tuple[int | None, int, torch.dtype, torch.device], tuple[Tensor | None, Tensor]] = {}
        self._own_biases: dict[tuple[int, torch.device], Tensor] = {}
        self._has_open_prefix = False

    @classmethod
    def over_tree(cls, tree: TokenTree, lengths: Tensor, start: int) -> AttentionPass:
        """Every node sees its row's prefix, its ancestors and itself."""
        positions = lengths[:, None] + tree.depths
        return cls(lengths, start, positions, tree.ancestor_mask(), positions)

    @classmethod
    def over_chain(cls, length: int, lengths: Tensor, start: int) -> AttentionPass:
        """``length`` tokens a row, one after the other, behind the row's prefix (a prefill)."""
        offsets = torch.arange(length, device=lengths.device)
        positions = lengths[:, None] + offsets
        return cls(lengths, start, positions, None, positions, causal=start == 0)

    def forget(self) -> None:
        """Compute masks anew when they are next asked for."""
        for kept in (self._visible, self._biases, self._own_biases):
            kept.clear()

    @cached_property
    def staged_mask(self) -> Tensor:
        """``[B, T, S]``.  That of a chain is made when it is asked for: it is square, and a prefill does without."""
        offsets = torch.arange(self.positions.shape[1], device=self.positions.device)
        return (offsets[:, None] >= offsets).expand(len(self.lengths), -1, -1)

    def is_plain(self, local_size: int | None) -> bool:
        """Whether the mask of layers with this window or chunk (None: neither) is a causal triangle."""
        return self.causal and (local_size is None or self.positions.shape[1] <= local_size)

    def opens_prefix(self, local_size: int | None, device: torch.device) -> bool:
        """Whether layers with this window or chunk can do without a mask over the prefix, and are faster for it.

        Every token sees all of the prefix then: there is one row, so no unused slots, and no window that is too short.
        """
        if len(self.lengths) > 1 or (local_size is not None and self.end > local_size):
            return False
        opens = merged_attention.pays(device, self.start, self.staged_positions.shape[1])
        self._has_open_prefix |= opens
        return opens

    @property
    def end(self) -> int:
        """One past the last staged slot."""
        return self.start + self.staged_positions.shape[1]

    @property
    def expects_no_mask(self) -> bool:
        """Whether some layers were told that they need no mask."""
        return self.causal or self._has_open_prefix

    def mask(self, pattern: Pattern | None, device: torch.device) -> Tensor:
        """``[B, T, start + S]`` bool, True where query t sees slot s.

        Args:
            pattern: what a layer sees of a text, by logical positions; None for everything.
        """
        if device not in self._visible:
            slots = torch.arange(self.start, device=self.lengths.device)
            prefix = (slots < self.lengths[:, None])[:, None].expand(-1, self.positions.shape[1], -1)
            self._visible[device] = torch.cat([prefix, self.staged_mask], dim=2).to(device)
        visible = self._visible[device]
        if pattern is None:
            return visible
        rows = torch.arange(self.lengths.shape[0], device=device)
        prefix_positions = torch.arange(self.start, device=device).expand(len(rows), -1)
        keys = torch.cat([prefix_positions, self.staged_positions.to(device)], dim=1)
        head = torch.zeros((), dtype=torch.long, device=device)
        return visible & pattern(rows[:, None, None], head, self.positions.to(device)[:, :, None], keys[:, None])

    def bias(self, mask: Tensor | None, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``mask_bias`` of a ``mask [B, 1, T, S]`` (None: of all that the pass shows) that several layers share.

        Computed once a pass.
        """
        key = (None if mask is None else id(mask), groups, dtype, device)
        if key not in self._biases:
            if len(self._biases) == KINDS_OF_MASK:  # a model that makes a mask for every layer
                self._biases.clear()
            visible = self.mask(None, device) if mask is None else mask[:, 0]
            # The mask is kept too, so that its id stays its own.
            self._biases[key] = (mask, mask_bias(visible, groups, dtype))
        return self._biases[key][1]

    def own_bias(self, groups: int, device: torch.device) -> Tensor:
        """``mask_bias`` over the staged tokens alone, ``[B, 1, groups * T, S]`` in float32, computed once a pass."""
        if (groups, device) not in self._own_biases:
            self._own_biases[groups, device] = mask_bias(self.staged_mask.to(device), groups, torch.float32)
        return self._own_biases[groups, device]

    def additive_mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[B, 1, T, start + S]``: 0 where query t sees slot s, else the lowest number of ``dtype``."""
        hidden = ~self.mask(None, device)[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the pass that ``tree_mask`` and ``tree_attention`` read."""
        self.calls = 0
        token = _current_pass.set(self)
        try:
            yield
        finally:
            _current_pass.reset(token)


def current_pass() -> AttentionPass:
    """That which is ``active``."""
    return _current_pass.get()


def mask_bias(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """What ``attend`` adds to the scores: 0 where ``mask [B, T, S]`` is True, else minus infinity.

    Returns:
        ``[B, 1, groups * T, S]``, for ``groups`` query heads that share a key head and lie one behind the other.
    """
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return bias.repeat(1, groups, 1)[:, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention without repeating keys and values.

    Args:
        query: ``[B, Hq, T, D]``; key: ``[B, Hkv, S, D]`` with Hkv dividing Hq; value: ``[B, Hkv, S, Dv]``.
        bias: of ``mask_bias`` for Hq / Hkv groups; None for plain causal attention over T = S tokens.
        softcap: bound on the scores before the softmax (Gemma 2): ``softcap * tanh(scores / softcap)``.
        sinks: ``[Hq]`` a score for each head that takes part in the softmax and carries no value (gpt-oss): where
            nothing is worth attending to, the weights may sum to less than one.

    Returns:
        ``[B, T, Hq, Dv]``, contiguous.
    """
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    explicit = softcap is not None or sinks is not None  # what torch's own function cannot do
    if bias is None and not explicit:
        if groups > 1:  # a prefill: repeating once is cheap beside attention over the whole prompt
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous()
    if bias is None:
        triangle = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        bias = mask_bias(triangle.expand(batch, -1, -1), groups, query.dtype)
    if not explicit and kernels.attends(query, key, value):
        return kernels.attend_few(query, key, value, bias, scaling)
    # Fold the query heads that share a key head into the query length: [B, Hkv, G * T, D].
    folded = query.reshape(batch, key.shape[1], groups * length, query.shape[-1])
    if explicit:
        scores = folded @ key.transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + bias
        if sinks is not None:
            column = sinks.to(scores).reshape(-1, groups, 1).expand(-1, -1, length).reshape(1, -1, groups * length, 1)
            scores = torch.cat([scores, column.expand(batch, -1, -1, -1)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]]
        out = weights.to(value.dtype) @ value
    else:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scaling)
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous()


def tree_mask(
    *,
    mask_function: Pattern,
    device: torch.device,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The function Transformers calls for the mask of each kind of layer; see ``transformers.AttentionMaskInterface``.

    Args:
        mask_function: the layers' pattern.
        local_size: their window or chunk.
        allow_is_causal_skip: whether the pattern is just what ``local_size`` says.

    Returns:
        ``[B, 1, T, S]`` bool; None for a causal triangle, or where all tokens see the whole prefix.
    """
    current, device = _current_pass.get(), torch.device(device)
    if allow_is_causal_skip and (current.is_plain(local_size) or current.opens_prefix(local_size, device)):
        return None
    return current.mask(mask_function, device)[:, None]


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function Transformers calls in every attention layer; see ``transformers.AttentionInterface``.

    Args:
        attention_mask: what ``tree_mask`` returned for this kind of layer.
        s_aux: Transformers' name for attention sinks.

    Raises:
        ValueError: for terms that tree attention does not know, or a mask that is not its own.
    """
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention function, which tree attention does not "
                "support yet; use this target without drafting."
            )
    current = _current_pass.get()
    current.calls += 1
    if (attention_mask is None and not current.expects_no_mask) or (
        attention_mask is not None and attention_mask.dtype != torch.bool
    ):
        found = "none" if attention_mask is None else f"one of {attention_mask.dtype}"
        raise ValueError(
            f"{type(module).__name__} did not take its mask from Transformers' AttentionMaskInterface (expected a mask "
            f"of torch.bool, found {found}), so it cannot be shown a tree; use this target without drafting."
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if attention_mask is None and current.causal:
        return attend(query, key, value, None, scaling, softcap, s_aux), None
    groups = query.shape[1] // key.shape[1]
    if attention_mask is None and softcap is None and s_aux is None and merged_attention.is_possible(query, value):
        return merged_attention.attend_merged(query, key, value, current.own_bias(groups, query.device), scaling), None
    bias = current.bias(attention_mask, groups, query.dtype, query.device)
    return attend(query, key, value, bias, scaling, softcap, s_aux), None


AttentionInterface.register(ATTENTION_NAME, tree_attention)
AttentionMaskInterface.register(ATTENTION_NAME, tree_mask)
