"""Heads that guess in the target's hidden space: its own output matrix makes their hidden states into logits.

The matrix stays the target's.  It is no part of the head's weights, is not trained, and over the whole vocabulary it is
the very same tensor.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mtp.heads.autoregressive import AutoregressiveHead
from mtp.heads.base import Prediction, TrainingBatch
from mtp.heads.context_vocabulary import OutputRows
from mtp.packing import PackedLinears
from mtp.target import Target


class TargetOutputHead(AutoregressiveHead):
    """See the module's text."""

    of_the_moment: ClassVar[frozenset[str]] = AutoregressiveHead.of_the_moment | {"_output"}
    _output: tuple[nn.Linear, ...] = ()

    def __init__(self, config: Any):
        super().__init__(config)
        self.register_load_state_dict_post_hook(lambda head, keys: head._forget_output())

    def attach(self, target: Target) -> Self:
        if self._target and target is self.target:
            return self
        super().attach(target)
        target.output.rows(self.draft_ids[:1])  # refuses a target whose output matrix cannot be read
        self._forget_output()
        return self

    def cast(self, dtype: torch.dtype) -> Self:
        super().cast(dtype)
        self._forget_output()
        return self

    def set_draft_vocabulary(self, draft_ids: Tensor) -> None:
        super().set_draft_vocabulary(draft_ids)
        self._forget_output()

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        _ = self.output_layer  # made here: in a step that is computed again it would be there the second time
        return super().unroll(batch, steps)

    def read_out(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` estimates of the target's final hidden states to logits ``[..., Vd]``."""
        return self.target.output.scaled(self.output_layer(hidden))

    def readable(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` hidden states of the layer as the output matrix reads them."""
        return hidden

    def guess(self, hidden: Tensor, step: int = 0) -> Tensor:
        return self.read_out(self.readable(hidden))

    def guess_context(self, hidden: Tensor, rows: OutputRows, step: int = 0) -> Tensor:
        return self.target.output.scaled(rows(self.readable(hidden)))

    @property
    def output_layer(self) -> nn.Linear:
        """The target's output matrix over the draft vocabulary."""
        if not self._output:
            rows, bias = self.target.output.rows(self.draft_ids)
            like = next(self.parameters())
            layer = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
            layer.weight = nn.Parameter(rows.to(like).detach(), requires_grad=False)
            if bias is not None:
                layer.bias = nn.Parameter(bias.to(like).detach(), requires_grad=False)
            self._output = (layer,)
        return self._output[0]

    def _forget_output(self) -> None:
        """Read the output matrix again at the next use: the target, the draft vocabulary or the precision is another.

        What was compiled knows the one before; it can be compiled again.
        """
        self._output, self.compiled = (), ()
        self.__dict__.pop("_packed", None)

    @property
    def graph_settings(self) -> str:
        return f"{super().graph_settings} {self.target.output.scaling}"

    @cached_property
    def _packed(self) -> PackedLinears:
        return PackedLinears(nn.ModuleList([self, self.output_layer]))
