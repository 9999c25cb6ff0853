"""From a recipe to a fresh head, or to the reason why this target cannot carry it, before anything is trained."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from typing import Any, get_type_hints

from torch import Tensor

from mtp.heads import Head, head_class
from mtp.support import UnsupportedTargetError
from mtp.target import Target
from train.config import ConfigError, HeadSection, OptimConfig, RunConfig
from train.recipe import convert, refuse_unknown_keys

# Sizes that a recipe does not name: the target's, those with a key of their own, and what is measured.
GIVEN = {"hidden_size", "vocab_size", "draft_vocab_size", "steps", "nodes", "calibration", "rank_accuracy"}


def make_head(config: RunConfig, target: Target, draft_ids: Tensor) -> Head:
    """The recipe's head, attached to ``target``.

    Args:
        draft_ids: ``[Vd]`` the draft vocabulary.

    Raises:
        ConfigError: for a family, size, loss or schedule that does not exist or does not fit the family.
        UnsupportedTargetError: for a head that this target cannot carry.
    """
    section = config.head
    family, sizes = check_head(config)
    if section.warm_start_positions > 0:
        target.output.rows(draft_ids[:1])  # a warm start copies rows of the target's output matrix
    try:
        head = family.from_target(
            target, draft_ids.to(target.device), steps=section.steps, nodes=section.nodes, **sizes
        )
    except UnsupportedTargetError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"head: found {section}, which makes no {family.family} head: {error}") from error
    longest = min(config.data.max_length, target.max_positions or config.data.max_length)
    if head.longest is not None and head.longest < longest:
        raise ConfigError(
            f"data.max_length: rows may have {longest} tokens, and this {family.family} head reads texts of "
            f"{head.longest} at most; set data.max_length={head.longest}, and longer rows are left out."
        )
    return head


def check_head(config: RunConfig) -> tuple[type[Head], dict[str, Any]]:
    """The class of the recipe's head and the sizes it names; for this the target need not be loaded.

    Raises:
        ConfigError: for a family, size, loss or schedule that does not exist or does not fit the family.
    """
    family = head_family(config.head)
    sizes = head_sizes(family, config.head)
    refuse_unfit_objective(family, config.head.steps, config.optim)
    return family, sizes


def head_family(section: HeadSection) -> type[Head]:
    """The class of the recipe's head, or ``ConfigError``."""
    try:
        return head_class(section.family)
    except ValueError as error:
        raise ConfigError(f"head.family: {error}") from error


def head_sizes(family: type[Head], section: HeadSection) -> dict[str, Any]:
    """``head.sizes``, every name and type checked."""
    kinds = size_kinds(family)
    refuse_unknown_keys(section.sizes, kinds, "head.sizes.")
    return {name: convert(kinds[name], value, f"head.sizes.{name}") for name, value in section.sizes.items()}


def size_kinds(family: type[Head]) -> dict[str, Any]:
    """Types of the sizes that a recipe may name: of the family's config, and what else its heads are made from."""
    hints = get_type_hints(family.config_class) | get_type_hints(family.from_target)
    names = {item.name for item in fields(family.config_class)}
    names |= set(inspect.signature(family.from_target).parameters) - {"target", "draft_ids", "sizes"}
    return {name: hints[name] for name in names - GIVEN - family.fixed_sizes}


def refuse_unfit_objective(head: type[Head], steps: int, optim: OptimConfig) -> None:
    """Raise ``ConfigError`` for losses or a schedule that say nothing to this family of heads."""
    weights = optim.loss
    if not any(weights.values()) or not all(0 <= weight < math.inf for weight in weights.values()):
        raise ConfigError(
            f"optim.loss: found {weights}; expected weights that are zero or more, at least one of them more than zero."
        )
    if weights.get("smooth_l1") and not head.estimates_hidden:
        raise ConfigError(
            f"optim.loss.smooth_l1 compares hidden states, but a {head.family} head makes no estimate of the "
            "target's; set it to 0, or train head.family=eagle."
        )
    each = optim.step_weight if isinstance(optim.step_weight, tuple) else (optim.step_weight,) * steps
    if len(each) != steps or not any(each) or not all(0 <= weight < math.inf for weight in each):
        raise ConfigError(
            f"optim.step_weight: found {optim.step_weight}; expected a number above 0, or a list of {steps} weights "
            "(head.steps), at least one of them above 0."
        )
    if optim.own_tokens > 0 and not head.follows_own_tokens:
        raise ConfigError(
            f"optim.own_tokens={optim.own_tokens}, but a {head.family} head has no steps that could follow a guess "
            "of its own; set it to 0."
        )
    if optim.activation_checkpointing and not head.recomputes:
        raise ConfigError(
            f"optim.activation_checkpointing=true: the layers of a {head.family} head cannot be computed again by "
            "themselves. Set it to false; lower optim.batch_positions and raise optim.accumulate to save memory."
        )
