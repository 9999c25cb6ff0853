"""A target and a drafter together, with the ``generate`` that Transformers' users know."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from mtp.compiled import CompileReport
from mtp.cost import Costs
from mtp.decode import Decoder, DecodeSettings, StopRule
from mtp.drafters import Drafter, Draw, NgramDrafter, PlainDrafter, PredictionDrafter, drafter_by_name
from mtp.drafters.mixed import leaves
from mtp.drafters.prediction import predicted_ids
from mtp.growth import may_ask
from mtp.heads import Head
from mtp.padding import by_step, pad_sequences, padding_token, real_tokens
from mtp.past import Past
from mtp.planner import CostPlanner, FixedPlanner, Planner
from mtp.processors import names_of_stateful
from mtp.refusals import (
    refuse_foreign_log,
    refuse_foreign_past,
    refuse_ignored_inputs,
    refuse_unsupported_arguments,
    refuse_unsupported_settings,
)
from mtp.rules import AUTO, RULES, rule_for
from mtp.sampling import TargetSampler
from mtp.stats import AcceptanceStats, Drift
from mtp.stopping import with_stop_strings
from mtp.target import Target
from mtp.traffic import TrafficLog, sampling_record
from mtp.verify import Randomness

logger = logging.getLogger(__name__)

DEFAULT_NODES: int | str = "auto"
MOST_NODES = 64  # of trees whose size is left to the planner
EXPECTED_LENGTH = 2.0  # mean accepted length of a drafter of which nothing is known
FIXED_NODES = 16  # of trees of a fixed size, where neither the caller nor the drafter says
TokenListener = Callable[[int, int, bool], None]


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What ``generate`` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[B, T]`` prompts and answers, as Transformers returns them.
        scores: with ``output_scores=True``, for each new token the processed scores ``[B, V]`` it was chosen from;
            zeros in rows that had ended.
        logits: with ``output_logits=True``, the target's own logits likewise.
        past: of a single row, what a longer text can be continued from; None for a batch.
        acceptance: counters of the run.
        kept: for each row, whether each generated token had been guessed by the drafter.
    """

    past: Past | None = None
    acceptance: AcceptanceStats | None = None
    kept: list[list[bool]] | None = None


_locks: WeakKeyDictionary[Drafter, threading.RLock] = WeakKeyDictionary()


@contextmanager
def turn_of(*drafters: Drafter) -> Iterator[None]:
    """A drafter keeps the state of one generation: those of several threads, and of several models, take turns."""
    involved = {id(leaf): leaf for drafter in drafters for leaf in leaves(drafter)}
    with ExitStack() as stack:
        for key in sorted(involved):  # in one order everywhere, so that no two wait for each other
            stack.enter_context(_locks.setdefault(involved[key], threading.RLock()))
        yield


class SpeculativeModel:
    """A frozen target and a drafter: the target's own text, in fewer passes of the target.

    Args:
        target: the verifier.
        drafter: the guesser; a trained head or one of ``mtp.available_drafters()``.
        tokenizer: kept beside them for convenience; may be None.
        expected_length: mean accepted length that the drafter was measured to have.

    Attributes:
        drift: what it has come to of late, over all generations.
    """

    def __init__(self, target: Target, drafter: Drafter, tokenizer: Any = None, expected_length: float | None = None):
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.drift = Drift(expected_length)
        self._planners: WeakKeyDictionary[Drafter | type[Drafter], CostPlanner] = WeakKeyDictionary()
        self._named: dict[str, Drafter] = {}
        drafter.attach(target)

    @classmethod
    def from_target(cls, model: PreTrainedModel, drafter: str | Drafter, tokenizer: Any = None) -> SpeculativeModel:
        """Put a drafter (an object, or the name of one that needs no training) on a loaded causal LM."""
        return cls(Target(model), drafter_by_name(drafter) if isinstance(drafter, str) else drafter, tokenizer)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def compile(self, progress: bool = True) -> CompileReport:
        """Compile the target's layers and the drafter's for this machine, which makes every pass shorter.

        See ``mtp.compiled``; the report is on the target's.

        On a GPU passes over trees are recorded and replayed (``mtp.graphs``).  On a CPU with a C++ compiler ten seconds
        or so for each kind of layer, and for ``mtp.kernels``, the first time, two afterwards.  Where nothing can be
        done, all stays as it is and the report says why.
        """
        with turn_of(self.drafter):
            report = self.target.compile(progress)
            for reason in self.drafter.compile_parts() if self.device.type == "cpu" else ():
                logger.warning("a part of the drafter runs as it is: %s", reason)
            self._planners.clear()  # passes cost something else now
        return report

    def drafter_for(self, asked: str | Drafter | None) -> Drafter:
        """What ``generate(drafter=...)`` means: the model's own if nothing is asked for, an object, or a name.

        Drafters that were named are kept, and with them what they learn from one generation to the next.
        """
        if asked is None:
            return self.drafter
        if not isinstance(asked, str):
            return asked.attach(self.target)
        if asked not in self._named:
            own = self.drafter if isinstance(self.drafter, Head) else None
            self._named[asked] = drafter_by_name(asked, own).attach(self.target)
        return self._named[asked]

    def planner(self, drafter: Drafter, nodes: int | str | None) -> Planner:
        """Trees of at most ``nodes`` nodes; ``"auto"`` (or None) for what pays on this machine, which is measured once.

        What is learnt about a drafter's acceptance is kept from one generation to the next.
        """
        nodes = DEFAULT_NODES if nodes is None else nodes
        if isinstance(nodes, int):
            if nodes < 1:
                raise ValueError(f"A draft tree has at least its root; found nodes={nodes}, expected 1 or more.")
            return FixedPlanner(nodes)
        if nodes != "auto":
            raise ValueError(f'nodes={nodes!r}: expected a number of nodes, or "auto".')
        if isinstance(drafter, PlainDrafter):
            return FixedPlanner(1)
        # Drafters that look texts up are made anew for a call, and cost the same whatever the texts are.
        key = type(drafter) if isinstance(drafter, NgramDrafter) else drafter
        if key not in self._planners:
            self._planners[key] = CostPlanner(
                Costs(self.target, drafter),
                MOST_NODES,
                self.drift.expected or EXPECTED_LENGTH,
                ahead=not may_ask(self.target.device),
            )
        return self._planners[key]

    @property
    def default_nodes(self) -> int:
        """Nodes of trees of a fixed size that the drafter was made for."""
        return self.drafter.config.nodes if isinstance(self.drafter, Head) else FIXED_NODES

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as ``transformers`` would, with the same arguments and the same result.

        Args:
            nodes: most nodes of a draft tree, the root included; ``"auto"``, the default, makes trees as large as
                pays on this machine, which is measured once, and decodes plainly where drafting does not pay.
            planner: decides about the trees in place of ``nodes``; see ``mtp.planner``.
            drafter: another drafter for this call, an object or a name: one of ``mtp.available_drafters()`` (``"none"``
                decodes plainly), or several joined by ``+`` that draft together, with ``"head"`` for the model's own.
            prediction: what the answer will mostly repeat, as text or token ids (one for each prompt of a batch); it is
                the draft, in place of the drafter, and is taken up again after every departure from it.
            rule: of acceptance: one of ``mtp.available_rules()``.  All are exact but ``"typical"``, which says so in
                ``acceptance.notes``; ``"auto"``, the default, is the walk, or with ``nodes=N`` the rule that
                keeps the most of this drafter's guesses.
            on_token: called with ``(row, token, kept)`` as soon as a token is committed, for every token in order;
                ``kept`` says whether the drafter had guessed it.  Unlike a streamer it takes batches too.
            generator: source of all random draws; torch's default one (``torch.manual_seed``) when left out.
            past: what an earlier call returned under that name: what this prompt shares with it is not read again.
            traffic: a log that takes the answers down, as ``mtp.traffic`` says; without one nothing is kept.

        Returns:
            ``[B, T]`` token ids, or a ``SpeculativeOutput`` with ``return_dict_in_generate=True``.

        Raises:
            ValueError: for what cannot be drafted for (beam search, scores of every step ...), saying why.
        """
        refuse_unsupported_arguments(kwargs)
        names = ("nodes", "planner", "drafter", "prediction", "rule", "on_token", "generator", "past", "traffic")
        own = {name: kwargs.pop(name) for name in names if name in kwargs}
        decode = speculate(self, **own, streamer=kwargs.get("streamer"))
        return self.target.causal_lm.generate(*args, custom_generate=decode, **with_stop_strings(kwargs))


def speculate(
    model: SpeculativeModel,
    *,
    nodes: int | str | None = None,
    planner: Planner | None = None,
    drafter: str | Drafter | None = None,
    prediction: Any = None,
    rule: str = AUTO,
    on_token: TokenListener | None = None,
    generator: torch.Generator | None = None,
    past: Past | None = None,
    traffic: TrafficLog | None = None,
    streamer: BaseStreamer | None = None,
) -> Callable[..., Any]:
    """The round loop as a decoding method for Transformers: ``lm.generate(..., custom_generate=speculate(model))``.

    Transformers prepares the generation config, logits processors and stopping criteria; they mean what they always do.
    It does not hand a streamer or a tokenizer on to a decoding method, though: name the streamer here as well, and pass
    stop strings as ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.  ``SpeculativeModel.generate`` does
    both by itself.
    """
    predictions = None
    if prediction is not None:
        if drafter is not None:
            raise ValueError("prediction is itself the draft; found a drafter as well. Leave one of the two out.")
        predictions = predicted_ids(prediction, model.tokenizer)
        drafter = PredictionDrafter(predictions)
    drafter = model.drafter_for(drafter)
    planner = planner or model.planner(drafter, nodes)
    refuse_foreign_past(past, model.target)
    refuse_foreign_log(traffic, model.target)

    def decode(
        lm: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        if lm is not model.target.causal_lm:
            raise ValueError(
                f"speculate(model) belongs to the {type(model.target.causal_lm).__name__} that model verifies with; "
                f"it was called on another {type(lm).__name__}, whose text would not be that model's."
            )
        refuse_unsupported_settings(generation_config)
        refuse_ignored_inputs(input_ids, model_kwargs)
        if input_ids.shape[0] > 1 and padding_token(generation_config) is None and len(stopping_criteria) > 1:
            raise ValueError("Rows that end at different lengths need a pad_token_id (there is no end token).")
        batch_size = input_ids.shape[0]
        asked = batch_size // (generation_config.num_return_sequences or 1)
        if predictions is not None and len(predictions) != asked:
            raise ValueError(f"Found {len(predictions)} predictions for {asked} prompts; expected one for each.")
        wants_dict = bool(generation_config.return_dict_in_generate)
        # How many draws a drawn tree takes depends on its size: with trees that are planned by the clock a seed would
        # not give its text again, which under the walk it does.
        best = drafter.best_rule(generation_config.temperature or 1.0) if planner.is_fixed else "walk"
        if names_of_stateful(logits_processor) and not RULES[best].in_order:
            best = "walk"
        chosen = rule_for(rule, generation_config.do_sample, best)
        sampler = TargetSampler(
            logits_processor, generation_config.do_sample, batch_size, Randomness(generator), chosen
        )
        draw = Draw(generation_config.temperature or 1.0, generator) if chosen.drawn else None
        settings = DecodeSettings(
            planner,
            draw,
            keep_scores=wants_dict and bool(generation_config.output_scores),
            keep_logits=wants_dict and bool(generation_config.output_logits),
        )
        decoder = Decoder(
            model.target,
            drafter,
            sampler,
            StopRule(stopping_criteria, input_ids.device, batch_size),
            settings,
            on_token=_listener(streamer, on_token, batch_size),
            drift=model.drift if drafter is model.drafter else None,
        )
        if past is not None and batch_size > 1:
            raise ValueError(f"past continues a single text; found a batch of {batch_size}.")
        kept_past = past if past is not None else Past(model.target) if wants_dict and batch_size == 1 else None
        padded = input_ids.tolist()
        with turn_of(model.drafter, drafter):
            planner.prepare(batch_size)
            prompts = real_tokens(padded, model_kwargs.get("attention_mask"))
            rows = decoder.run(prompts, padded, kept_past)
        decoder.stats.drift = model.drift.to_dict() if decoder.drift is not None else None
        if (warning := model.drift.warning()) is not None:
            decoder.stats.notes.append(warning)
            logger.warning(warning)
        if traffic is not None:
            answers = [row.ids[len(row.ids) - len(row.kept) :] for row in rows]
            sampling = sampling_record(generation_config, logits_processor, chosen.name)
            traffic.add(prompts, answers, [row.kept for row in rows], sampling)
        if streamer is not None:
            streamer.end()
        sequences = pad_sequences([row.ids for row in rows], generation_config, input_ids)
        if not wants_dict:
            return sequences
        return SpeculativeOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=by_step([row.scores for row in rows]) if settings.keep_scores else None,  # type: ignore[arg-type]
            logits=by_step([row.logits for row in rows]) if settings.keep_logits else None,  # type: ignore[arg-type]
            past=kept_past,
            acceptance=decoder.stats,
            kept=[row.kept for row in rows],
        )

    return decode


def _listener(streamer: BaseStreamer | None, on_token: TokenListener | None, batch_size: int) -> TokenListener | None:
    """One listener for the streamer and the caller's own; None when there is neither."""
    if streamer is None:
        return on_token
    if batch_size > 1:
        raise ValueError(f"A streamer takes one sequence; found a batch of {batch_size}.")

    def listen(row: int, token: int, kept: bool) -> None:
        streamer.put(torch.tensor([token]))
        if on_token is not None:
            on_token(row, token, kept)

    return listen
