"""A copy of one of the target's own decoder layers that runs by itself: in trees, and unrolled in training.

Whatever the architecture makes of attention (latent keys, norms of queries, partial rotary positions) and of the MLP
(experts), the copy is the library's own code; only the attention function is ours, as in a pass of the target.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache

from mtp.attention import ATTENTION_NAME, AttentionPass
from mtp.heads.unrolling import attend_with_own
from mtp.patches import attention_implementation
from mtp.support import MASKED_BY_ARGUMENT, UnsupportedTargetError
from mtp.target import Target

UNROLLED_NAME = "mtp_unrolled"
CACHE_ARGUMENTS = (
    "cache",
    "past_key_values",
    "layer_past",
)  # a layer's name for it differs by architecture and version

_text: ContextVar[tuple[Tensor, int]] = ContextVar("mtp_unrolled_text")


class TargetLayer(nn.Module):
    """The layer, with trainable weights of its own.

    Args:
        target: whose layer is copied, weights included.
        index: which one.

    Raises:
        ValueError: if there is no such layer.
        UnsupportedTargetError: where the layer cannot run outside of its model.
    """

    def __init__(self, target: Target, index: int):
        super().__init__()
        if not 0 <= index < target.num_layers:
            raise ValueError(f"Layer {index} cannot be copied: the target has layers 0 to {target.num_layers - 1}.")
        layer, name = target.layers[index], type(target.layers[index]).__name__
        if target.config.model_type in MASKED_BY_ARGUMENT:
            raise UnsupportedTargetError(f"{name} attends by itself: a copy of it cannot be shown a tree. {ADVICE}")
        if not all(weight.is_floating_point() and weight.device.type != "meta" for weight in layer.parameters()):
            raise UnsupportedTargetError(
                f"The weights of {name} are quantised or offloaded and cannot be copied. {ADVICE}"
            )
        self.block = copy.deepcopy(layer).requires_grad_(True)
        self.rotary = copy.deepcopy(getattr(target.backbone, "rotary_emb", None))
        kinds = getattr(target.config, "layer_types", None)
        angles = {} if self.rotary is None else inspect.signature(self.rotary.forward).parameters
        # Where layers of different types turn by different angles, theirs is asked for by name.
        self._kind = {"layer_type": kinds[index]} if kinds and "layer_type" in angles else {}
        for module in self.block.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = 0  # the only layer of its cache
        self._takes = set(inspect.signature(type(layer).forward).parameters)
        self._configs = list({id(m.config): m.config for m in self.block.modules() if hasattr(m, "config")}.values())
        self._probe(target, name)

    @torch.no_grad()
    def _probe(self, target: Target, name: str) -> None:
        x = torch.zeros(1, 2, target.hidden_size, device=target.device, dtype=next(self.block.parameters()).dtype)
        attention = AttentionPass.over_chain(2, torch.zeros(1, dtype=torch.long, device=x.device), 0)
        try:
            self(x, attention, DynamicCache())
        except Exception as error:  # whatever an architecture stumbles over: the reason is passed on
            raise UnsupportedTargetError(f"{name} does not run outside of its model ({error}). {ADVICE}") from error
        if attention.calls != 1:
            raise UnsupportedTargetError(
                f"{name} called its attention function {attention.calls} times in a pass, expected once. {ADVICE}"
            )

    def forward(self, x: Tensor, attention: AttentionPass, cache: Cache) -> Tensor:
        """``[B, T, H] -> [B, T, H]``; ``cache`` takes the keys and values, ``attention`` says what a token sees."""
        mask = None if attention.is_plain(None) else attention.mask(None, x.device)[:, None]
        with attention.active():
            return self._run(x, attention.positions, mask, cache, ATTENTION_NAME)

    def unrolled(self, x: Tensor, positions: Tensor, seen: Tensor, length: int, cache: Cache) -> Tensor:
        """``x [B, P, H]`` of one unrolled step, whose token p sees the text up to ``seen [B, P]``, and the tokens of
        the same index p in the steps before, itself included.  ``cache`` holds the text, of ``length``, and these."""
        with _showing(seen, length):
            return self._run(x, positions, None, cache, UNROLLED_NAME)

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, attention_name: str) -> Tensor:
        arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        arguments |= dict.fromkeys(CACHE_ARGUMENTS, cache)
        if self.rotary is not None:
            arguments["position_embeddings"] = self.rotary(x, positions, **self._kind)
        with attention_implementation(self._configs, attention_name):
            output = self.block(x, **{name: value for name, value in arguments.items() if name in self._takes})
        return output if isinstance(output, Tensor) else output[0]


ADVICE = "An MTP module is made from the target's own layer; choose another head family for this target."


def full_attention_layer(target: Target) -> int:
    """The last layer that sees the whole text, or the last one where all are local."""
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.num_layers
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    return full[-1] if full else target.num_layers - 1


@contextmanager
def _showing(seen: Tensor, length: int) -> Iterator[None]:
    token = _text.set((seen, length))
    try:
        yield
    finally:
        _text.reset(token)


def unrolled_attention(
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
    """Attention of unrolled steps (see ``TargetLayer.unrolled``), as ``transformers.AttentionInterface`` calls it.

    ``key [B, h, T + s * P, D]`` holds the text and then s steps of P tokens; no scores between different base positions
    are computed.
    """
    if s_aux is not None:
        raise ValueError(
            f"{type(module).__name__} has attention sinks, which unrolled training does not know. {ADVICE}"
        )
    seen, text = _text.get()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    own_keys, own_values = (list(x[:, :, text:].split(query.shape[2], dim=2)) for x in (key, value))
    out = attend_with_own(query, key[:, :, :text], value[:, :, :text], seen, own_keys, own_values, scaling, softcap)
    return out.unflatten(-1, (query.shape[1], -1)), None


AttentionInterface.register(UNROLLED_NAME, unrolled_attention)
