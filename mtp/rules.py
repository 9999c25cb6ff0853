"""The acceptance rules by name: what each promises, and which trees it is for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from mtp.typical import typical_row
from mtp.verify import Distribution, Randomness, RowVerdict, reject_row, sampled_walk_row, traverse_row

AUTO = "auto"


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: what ``generate(rule=...)`` calls it.
        exact: the text is distributed as the target's own; a rule that is not exact has to be asked for by name.
        drawn: for trees whose children were drawn at random, each node's on their own (``TokenTree.q``); the others
            are for trees that do not depend on draws (top-k children).
        greedy: for greedy decoding too.  Only the walk is: a target that is certain of its token leaves nothing to
            chance, and draws only make the guesses worse.
        in_order: asks about nodes in the order in which their tokens are committed, each once: what a processor that
            keeps a state from token to token needs.
        verify_row: decides about one row when sampling; ``mtp/verify.py`` says what goes in and comes out.
    """

    name: str
    exact: bool
    drawn: bool
    greedy: bool
    in_order: bool
    verify_row: Callable[[list[list[int]], list[int], Distribution, Distribution, Randomness], RowVerdict]


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("walk", exact=True, drawn=False, greedy=True, in_order=True, verify_row=sampled_walk_row),
        Rule("rejection", exact=True, drawn=True, greedy=False, in_order=True, verify_row=reject_row),
        Rule("traversal", exact=True, drawn=True, greedy=False, in_order=False, verify_row=traverse_row),
        Rule("typical", exact=False, drawn=False, greedy=False, in_order=False, verify_row=typical_row),
    )
}


def available_rules() -> list[str]:
    """Names that ``generate(rule=...)`` takes."""
    return [AUTO, *RULES]


def rule_for(name: str, do_sample: bool, best: str = "walk") -> Rule:
    """The rule of that name; ``"auto"`` is the walk, and ``best`` when sampling.

    Raises:
        ValueError: for an unknown name, and for greedy decoding with a rule that is for sampling.
    """
    if name == AUTO:
        return RULES[best if do_sample else "walk"]
    if name not in RULES:
        near = difflib.get_close_matches(str(name), available_rules(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"rule={name!r} is no acceptance rule; expected one of {', '.join(available_rules())}.{hint}")
    rule = RULES[name]
    if not do_sample and not rule.greedy:
        raise ValueError(
            f"rule={name!r} is for sampling; with do_sample=False the target's own choice is the only right one. Leave "
            "rule out, or pass do_sample=True."
        )
    return rule
