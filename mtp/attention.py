"""Tree attention for stock Transformers models.

One attention function is registered with Transformers' ``AttentionInterface``.  While a pass of ours runs, the model's
configs name it as the attention implementation; outside of a pass the model is as its owner left it.  What a token may
see is not handed through the model as a mask tensor: the function takes it from the pass at hand, so that sliding
windows, soft-capping and grouped-query attention are settled here, for every architecture that uses the interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the field's customary name
from transformers import AttentionInterface

from mtp.tree import TokenTree

ATTENTION_NAME = "mtp_tree"

_current_pass: ContextVar[AttentionPass] = ContextVar("mtp_attention_pass")


class AttentionPass:
    """What the tokens of one forward pass see: a prefix of their row, and some of the staged tokens.

    Args:
        lengths: ``[B]`` committed tokens of each row.
        start: slot of the first staged token.
        positions: ``[B, T]`` positions of this pass's tokens (the queries).
        staged_mask: ``[B, T, S]`` which of the S staged tokens each query sees, itself included.
        staged_positions: ``[B, S]`` positions of all staged tokens.
        causal: the pass is a plain causal chain over empty rows (a prefill), for which no mask has to be built unless
            a window is shorter than it.
    """

    def __init__(
        self,
        lengths: Tensor,
        start: int,
        positions: Tensor,
        staged_mask: Tensor,
        staged_positions: Tensor,
        causal: bool = False,
    ):
        self.lengths = lengths
        self.start = start
        self.positions = positions
        self.staged_mask = staged_mask
        self.staged_positions = staged_positions
        self.causal = causal
        self._masks: dict[tuple[int | None, torch.device], Tensor] = {}

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
        mask = (offsets[:, None] >= offsets).expand(lengths.shape[0], length, length)
        return cls(lengths, start, positions, mask, positions, causal=start == 0)

    def needs_mask(self, window: int | None) -> bool:
        """Whether plain causal attention would be wrong."""
        return not self.causal or (window is not None and window < self.positions.shape[1])

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """``[B, T, start + S]`` bool, True where query t sees slot s; windows count logical positions."""
        key = (window, device)
        if key not in self._masks:
            slots = torch.arange(self.start, device=self.lengths.device)
            prefix = (slots < self.lengths[:, None])[:, None].expand(-1, self.positions.shape[1], -1)
            staged = self.staged_mask
            if window is not None:
                oldest = self.positions[:, :, None] - window
                prefix = prefix & (slots > oldest)
                staged = staged & (self.staged_positions[:, None] > oldest)
            self._masks[key] = torch.cat([prefix, staged], dim=2).to(device)
        return self._masks[key]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the pass that ``tree_attention`` reads."""
        token = _current_pass.set(self)
        try:
            yield
        finally:
            _current_pass.reset(token)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, softcap: float | None = None
) -> Tensor:
    """Grouped-query attention without repeating keys and values.

    Args:
        query: ``[B, Hq, T, D]``; key, value: ``[B, Hkv, S, D]`` with Hkv dividing Hq.
        mask: ``[B, T, S]`` bool, True = visible; None for plain causal attention over T = S tokens.
        softcap: bound on the scores before the softmax (Gemma 2): ``softcap * tanh(scores / softcap)``.

    Returns:
        ``[B, T, Hq, D]``, contiguous.
    """
    batch, heads, length, _ = query.shape
    groups = heads // key.shape[1]
    if mask is None and softcap is None:
        if groups > 1:  # a prefill: repeating once is cheap beside attention over the whole prompt
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous()
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().expand(batch, -1, -1)
    # Fold the query heads that share a key head into the query length: [B, Hkv, G * T, D].
    folded = query.reshape(batch, key.shape[1], groups * length, query.shape[-1])
    visible = mask.repeat(1, groups, 1)[:, None]
    if softcap is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=visible, scale=scaling)
    else:
        scores = softcap * torch.tanh(folded @ key.transpose(2, 3) * scaling / softcap)
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32)
        out = weights.to(value.dtype) @ value
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2).contiguous()


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function Transformers calls in every attention layer; see ``transformers.AttentionInterface``."""
    for name in ("position_bias", "s_aux", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name!r} to its attention function, which tree attention does not "
                "support yet; use this target without drafting."
            )
    current = _current_pass.get()
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    mask = current.mask(sliding_window, query.device) if current.needs_mask(sliding_window) else None
    return attend(query, key, value, mask, scaling, softcap), None


AttentionInterface.register(ATTENTION_NAME, tree_attention)
