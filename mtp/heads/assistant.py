"""A small language model as a trained head: a sibling of the target or some of its layers, distilled on its answers.

It drafts as any assistant does (``mtp/drafters/assistant.py``), so it trains as a language model does: what it says
behind a token does not depend on how the token came about, and all steps share one prediction a position.  One step
(``head.steps: 1``) is all that a recipe needs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor, nn

from mtp.drafters.assistant import Assistant
from mtp.drafters.base import Budget, Draw, TargetStates
from mtp.drafters.layer_subset import keep_layers
from mtp.drafters.lm_tree import TreeShape
from mtp.heads.base import Head, HeadConfig, Prediction, TrainingBatch
from mtp.heads.sibling import read_sibling
from mtp.heads.warmstart import RidgeRegression
from mtp.target import Target
from mtp.tree import TokenTree


@dataclass(frozen=True)
class AssistantHeadConfig(HeadConfig):
    """Sizes of an assistant; see ``HeadConfig`` for those every family has.

    Attributes:
        model_class: its class in Transformers.
        model: its config there.
        layers: of the target that it was made of; empty for a sibling.
        sibling: the model that it was made of, in place of layers of the target; it is not needed any more.
        depth: longest path of drafted tokens in a tree.
        width: nodes read a level.
    """

    model_class: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    sibling: str | None = None
    depth: int = 6
    width: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(depth=1, width=1)


class AssistantHead(Head):
    """A causal LM with weights of its own; its input embeddings stay those of the model that it was made of."""

    family: ClassVar[str] = "assistant"
    fixed_sizes: ClassVar[frozenset[str]] = frozenset({"taps", "model_class", "model"})
    reads_embeddings: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False  # its layers run inside of one pass of the library's, which is over by then
    config_class: ClassVar[type[AssistantHeadConfig]] = AssistantHeadConfig
    of_the_moment: ClassVar[frozenset[str]] = Head.of_the_moment | {"_assistant"}
    config: AssistantHeadConfig
    _assistant: tuple[Assistant, ...] = ()

    def __init__(self, config: AssistantHeadConfig):
        super().__init__(config)
        model_class = getattr(transformers, config.model_class, None)
        if model_class is None:
            raise ValueError(
                f"Transformers has no {config.model_class!r}, of which an assistant was made; expected a class of its "
                "own, not code that comes with a checkpoint. Use another Transformers, or another family of heads."
            )
        self.lm = model_class(model_class.config_class.from_dict(copy.deepcopy(config.model))).float()
        self.lm.get_input_embeddings().requires_grad_(False)

    @classmethod
    def from_target(
        cls,
        target: Target,
        draft_ids: Tensor,
        layers: tuple[int, ...] | None = None,
        sibling: str | None = None,
        **sizes: Any,
    ) -> Self:
        """A copy of a smaller model, or of some of the target's layers.

        Args:
            layers: those that stay, counted from 0; by default every fourth, the first and the last among them.
            sibling: name or folder of a causal LM of the target's vocabulary to begin from instead.

        Raises:
            UnsupportedTargetError: for layers that cannot make a model by themselves (see ``keep_layers``).
            ValueError: for a sibling that cannot draft for this target (see ``read_sibling``), or for both.
        """
        if sibling is not None and layers is not None:
            raise ValueError(f"Found layers={layers} and sibling={sibling!r}; an assistant begins from one of the two.")
        if sibling is None:
            layers = spread(target.num_layers) if layers is None else layers
            model = keep_layers(target.causal_lm, layers)
        else:
            model = read_sibling(target, sibling)
        model.config.tie_word_embeddings = False  # its output matrix is trained, and its input embeddings are not
        made_of = {
            "model_class": type(model).__name__,
            "model": json.loads(model.config.to_json_string()),  # as it comes back from a checkpoint
            "layers": tuple(layers or ()),
            "sibling": sibling,
        }
        head = super().from_target(target, draft_ids, **made_of, **sizes)
        head.lm.load_state_dict(model.state_dict())
        return head

    def attach(self, target: Target) -> Self:
        if self._assistant and target is self.target:  # a new one would not know its predecessor's generations
            return self
        super().attach(target)
        shape = TreeShape(self.config.width, self.config.depth, self.config.nodes)
        self._assistant = (Assistant(self.lm, shape=shape, draft_ids=self.draft_ids).attach(target),)
        return self

    @property
    def runs_as(self) -> str:
        return f"{super().runs_as}, {self.assistant.runs_as}"

    def refresh(self) -> None:
        self.assistant.refresh()

    def compile_parts(self) -> list[str]:
        return self.assistant.compile_parts()

    @property
    def assistant(self) -> Assistant:
        """The drafter that reads and guesses with the weights of this head."""
        if not self._assistant:
            raise RuntimeError("This head is attached to no target; call head.attach(target) first.")
        return self._assistant[0]

    @property
    def state(self) -> Any:
        return self.assistant.state

    @state.setter
    def state(self, state: Any) -> None:
        self.assistant.state = state

    @property
    def longest(self) -> int | None:
        return self.assistant.model.max_positions

    # ---- training -------------------------------------------------------------------------------------------------

    def unroll(self, batch: TrainingBatch, steps: int) -> list[Prediction]:
        rows, bases = batch.bases(2).nonzero(as_tuple=True)
        positions = bases + 1
        hidden = self._hidden(batch)[rows, positions]
        logits = self.assistant.model.unembed(hidden, self.draft_ids)
        reached = [positions > step for step in range(steps)]
        return [Prediction(logits[there], rows[there], positions[there]) for there in reached]

    def _hidden(self, batch: TrainingBatch) -> Tensor:
        """``[B, T, H]`` its last hidden states.  Padding lies behind the real tokens, which never see it."""
        # As it drafts, through the library's attention: what a stock one leaves out (soft-capping, in older versions)
        # would otherwise be trained without, and drafted with.
        return self.assistant.model.encode(batch.states.tokens, gradient=torch.is_grad_enabled())[0]

    @torch.no_grad()
    def warm_start(self, batches: Iterable[TrainingBatch]) -> None:
        """Fit the target's last hidden states to the assistant's own, and put the map into the output matrix.

        A sibling stays as it is: it comes with an output matrix that was trained for its states.
        """
        if self.config.sibling is not None:
            return
        width = self.config.hidden_size
        output: nn.Linear = self.lm.get_output_embeddings()
        fit = RidgeRegression(width, width, device=output.weight.device)
        for batch in batches:
            read = batch.bases(1)
            fit.add(self._hidden(batch)[read], batch.states.hidden[read])
        output.weight.copy_(self.target.output.weight.float() @ fit.solve())

    # ---- decoding -------------------------------------------------------------------------------------------------

    def start(self, states: TargetStates, capacity: int) -> None:
        self.assistant.start(states, capacity)

    def observe(self, states: TargetStates) -> None:
        self.assistant.observe(states)

    def select_rows(self, rows: Tensor) -> None:
        self.assistant.select_rows(rows)

    def rewind(self, length: int) -> int:
        return self.assistant.rewind(length)

    def propose(self, pending: Tensor, budget: Budget, draw: Draw | None = None) -> TokenTree:
        return self.assistant.propose(pending, budget, draw)


def spread(count: int) -> tuple[int, ...]:
    """About every fourth of ``count`` layers, the first and the last among them."""
    return tuple(sorted(set(torch.linspace(0, count - 1, max(count // 4, min(count, 2))).round().int().tolist())))
