"""The target's output matrix: how its last hidden states become logits, and what heads may copy of it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from mtp.offload import is_offloaded
from mtp.support import UnsupportedTargetError

LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what ``scaled`` reads


@dataclass(frozen=True)
class OutputMatrix:
    """Of a causal LM, which may be quantised, adapted or offloaded.

    Args:
        causal_lm: whose it is.
        config: of its text part.
    """

    causal_lm: PreTrainedModel
    config: Any

    @property
    def layer(self) -> Any:
        """As the model has it at the moment: adapters and quantisers put layers of their own in its place."""
        return self.causal_lm.get_output_embeddings()

    @property
    def weight(self) -> Tensor:
        """``[V, H]``."""
        weight: Tensor = self.layer.weight
        return weight

    def logits(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """``[..., H]`` last hidden states (after the final norm) to logits ``[..., V]``, or over ``token_ids`` only."""
        layer, weight = self.layer, self.weight
        if token_ids is None or type(weight) is not nn.Parameter or is_offloaded(weight):
            # As the model does it: quantised weights multiply by themselves, offloaded ones are fetched by a hook.
            logits = layer(hidden.to(weight.dtype))
            logits = logits if token_ids is None else logits[..., token_ids.to(logits.device)]
        else:
            token_ids = token_ids.to(weight.device)
            bias = None if layer.bias is None else layer.bias[token_ids]
            logits = F.linear(hidden.to(weight), weight[token_ids], bias)
        return self.scaled(logits)

    def scaled(self, logits: Tensor) -> Tensor:
        """``[..., V]`` products with the matrix, scaled and capped as the architecture has it."""
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = cap * torch.tanh(logits / cap)
        if (scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        return logits

    @property
    def scaling(self) -> str:
        """Identifies what ``scaled`` does."""
        settings = {name: getattr(self.config, name, None) for name in LOGIT_SETTINGS}
        return f"{settings} {inspect.getsource(OutputMatrix.scaled)}"

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be read: it is neither quantised nor adapted nor offloaded."""
        layer = self.layer
        return isinstance(layer, nn.Linear) and type(layer.weight) is nn.Parameter and not is_offloaded(layer.weight)

    def rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weights ``[n, H]`` and biases ``[n]`` for ``token_ids [n]``, for a head to keep.

        Raises:
            UnsupportedTargetError: if they cannot be read: quantised, adapted or offloaded.
        """
        layer, weight = self.layer, self.weight
        if not self.has_rows:
            raise UnsupportedTargetError(
                f"The output matrix of this target is a {type(layer).__name__} over a {type(weight).__name__} on "
                f"{weight.device.type}, whose rows cannot be copied. Load the target with an output matrix that is "
                "neither quantised nor adapted nor offloaded, or train a head that has one of its own, without a warm "
                "start (head.family=eagle3 head.warm_start_positions=0)."
            )
        if torch.equal(token_ids.cpu(), torch.arange(weight.shape[0])):
            return weight, layer.bias  # all of it: no copy
        token_ids = token_ids.to(weight.device)
        return weight[token_ids], None if layer.bias is None else layer.bias[token_ids]
