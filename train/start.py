"""A finished head trained further: loaded, and checked to be what the recipe describes."""

from __future__ import annotations

from pathlib import Path

from mtp.checkpoint import CheckpointError, load_head
from mtp.heads import Head
from mtp.target import Target
from train.config import ConfigError, RunConfig
from train.fitting import head_family, head_sizes


def check_start(config: RunConfig) -> None:
    """Refuse a start that could not end as the recipe says; before anything is loaded.

    Raises:
        ConfigError: naming the key.
    """
    start = config.start
    if start.head is None:
        if start.replace:
            raise ConfigError("start.replace: there is no head to replace; name it with start.head.")
        return
    if config.target.adapter.rank > 0:
        raise ConfigError("start.head: heads of an adapted target (target.adapter) cannot be trained further yet.")
    head, output = Path(start.head), Path(config.output)
    if output.resolve() in (head.resolve(), *head.resolve().parents):
        raise ConfigError(
            f"start.head leads to {head.resolve()}, which is in this run's own output: it would be overwritten while "
            "it is in use. Choose another output; a run that has replaced the head is done."
        )
    if start.replace and not head.is_symlink():
        raise ConfigError(
            f"start.replace: {head} is no symbolic link, and only a link can be made to lead elsewhere in one step. "
            f"Make it one: mv {head} {head}-1 && ln -s {head.name}-1 {head}"
        )


def continued_head(config: RunConfig, target: Target) -> Head:
    """The head in ``start.head``, attached to ``target``, ready to be trained.

    Raises:
        ConfigError: if it is no head of this target, or another than the recipe describes.
    """
    assert config.start.head is not None
    try:
        head = load_head(config.start.head, target)
    except CheckpointError as error:
        raise ConfigError(f"start.head: {error}") from error
    section = config.head
    found = {"family": head.family, **head.config.to_dict()}
    family = head_family(section)
    wanted = {"family": family.family, "steps": section.steps}
    if family is type(head):
        wanted |= {"draft_vocab_size": section.draft_vocab_size or target.vocab_size, **head_sizes(family, section)}
    if different := [name for name, value in wanted.items() if found[name] != value]:
        raise ConfigError(
            f"start.head: {config.start.head} is another head than the recipe's: "
            + ", ".join(f"{name} {found[name]!r} there, {wanted[name]!r} here" for name in different)
            + ". Take the recipe that it was trained with (its README.md has it)."
        )
    return head.train()
