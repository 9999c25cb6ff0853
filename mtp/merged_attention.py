"""Attention of a few staged tokens to a long prefix, without a mask over the prefix.

All nodes of a row's tree see the whole prefix.  Only among themselves do they need a mask, and that part is small:
T x T for T nodes.  So the prefix goes through the fast kernel, which takes no mask and also gives the logarithm of the
softmax's denominator; the tree is computed in plain terms, and both are merged.  A masked kernel would read a mask of
T x (prefix + T) for every head, and on a GPU it would not split a long prefix over the device.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_TOKENS = 256  # of one pass: the T x T block is computed in float32 for every head
# Prefix from which merging is faster than the masked kernel, by device; see docs/decisions.md.  Devices that are not
# named have no kernel that gives the denominator.
SHORTEST_PREFIX = {"cuda": 1024}
HALF = (torch.float16, torch.bfloat16)


def pays(device: torch.device, prefix: int, tokens: int) -> bool:
    """Whether merging is expected to be faster than one masked call."""
    shortest = SHORTEST_PREFIX.get(device.type)
    return shortest is not None and prefix >= shortest and tokens <= MOST_TOKENS


def is_possible(query: Tensor, value: Tensor) -> bool:
    """Whether the fast kernel takes ``query [B, h, T, D]`` and ``value [B, h, S, Dv]``, and was found to be right."""
    width = query.shape[-1]
    fits = value.shape[-1] == width and (
        query.device.type == "cpu" or (width % 8 == 0 and width <= 256 and query.dtype in HALF)
    )
    return fits and not torch.is_grad_enabled() and _is_right(query.device, query.dtype, width)


def attend_merged(query: Tensor, key: Tensor, value: Tensor, own_bias: Tensor, scaling: float) -> Tensor:
    """Grouped-query attention to a prefix that all queries see, and to staged tokens that each sees some of.

    Args:
        query: ``[B, Hq, T, D]``; key, value: ``[B, Hkv, P + S, D]``, P of the prefix and S staged.
        own_bias: ``[B, 1, Hq / Hkv * T, S]`` float32 of ``mtp.attention.mask_bias`` over the staged tokens.

    Returns:
        ``[B, T, Hq, D]``, contiguous.
    """
    batch, heads, length, width = query.shape
    start = key.shape[2] - own_bias.shape[-1]
    # Query heads that share a key head lie one behind the other: no key is repeated.
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * length, width)
    scores = folded.float() @ key[:, :, start:].float().transpose(2, 3) * scaling + own_bias
    own_values = value[:, :, start:].float()
    if start == 0:
        out = scores.softmax(-1) @ own_values
    else:
        prefix, log_sum = _attend_unmasked(folded, key[:, :, :start], value[:, :, :start], scaling)
        # The prefix takes part in the softmax as one more key: its score is the log-sum-exp of its own scores, and its
        # value what was attended to in it.
        weights = torch.cat([scores, log_sum[..., None]], dim=-1).softmax(-1)
        out = torch.addcmul(weights[..., :-1] @ own_values, weights[..., -1:], prefix.float())
    return out.to(query.dtype).reshape(batch, heads, length, width).transpose(1, 2).contiguous()


def _attend_unmasked(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention ``[B, h, T, D]`` of every query to every key, and the log-sum-exp ``[B, h, T]`` of its scores.

    What ``F.scaled_dot_product_attention`` calls itself, which keeps the second to itself.  Of the public functions
    ``varlen_attn`` gives it on CUDA alone, and ``flex_attention`` only compiled.
    """
    if query.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scaling)
    else:
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scaling)[:2]
    return out, log_sum


@cache
def _is_right(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel gives on this device what its mathematics says; asked once, before it is first relied on.

    It is no public function of torch's: where it is missing, refuses or means something else, attention stays masked.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        for length in (1, 77, 2048):  # one block of the kernel, a part of one, and many
            query, key, value = (
                torch.randn(1, 2, tokens, width, generator=generator).to(device, dtype)
                for tokens in (12, length, length)
            )
            out, log_sum = _attend_unmasked(query, key, value, width**-0.5)
            scores = query.float() @ key.float().transpose(2, 3) * width**-0.5
            tolerance = 2e-2 if dtype in HALF else 1e-4
            torch.testing.assert_close(log_sum, scores.logsumexp(-1), rtol=tolerance, atol=tolerance)
            expected = scores.softmax(-1) @ value.float()
            torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    except (RuntimeError, AssertionError, AttributeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning(
            "attention to the prefix stays masked: the kernel for %s on %s failed (%s)", dtype, device, reason
        )
        return False
    return True
