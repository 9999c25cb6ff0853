"""Reading a recipe: one YAML file and dotted overrides (``optim.lr=1e-3``), every key and type checked."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from train.config import ConfigError, Range, RunConfig


def load_config(arguments: Sequence[str]) -> RunConfig:
    """Read ``[recipe.yaml] key=value ...``.

    Raises:
        ConfigError: for a file that is missing or no YAML, an unknown key (naming the nearest right one), a value of
            the wrong type or a number out of its range.
    """
    values: dict[str, Any] = {}
    overrides = list(arguments)
    if overrides and "=" not in overrides[0]:
        path = Path(overrides.pop(0))
        if not path.is_file():
            raise ConfigError(f"No recipe at {path}; expected a YAML file such as configs/smollm2_eagle3.yaml.")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is no text ({error.reason}); expected a YAML file in UTF-8.") from error
        loaded = _parse(text, str(path))
        if not isinstance(loaded, dict):
            raise ConfigError(f"{path} holds a {type(loaded).__name__}; expected keys and values.")
        values = loaded
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"Found {override!r}; expected key=value, for example optim.lr=1e-3.")
        _assign(values, key.split("."), _parse(text, override) if text else None, key)
    config = build(RunConfig, values)
    if not config.target.path:
        raise ConfigError("target.path is empty; expected the Hub name or folder of a causal language model.")
    if not config.data.path:
        raise ConfigError("data.path is empty; expected distilled rows (train/distill.py writes them).")
    return _at_home(config)


def _at_home(config: RunConfig) -> RunConfig:
    """Folders behind ``~`` where they are: in a recipe no shell has looked at it."""
    start = {
        name: os.path.expanduser(folder) for name in ("head", "traffic") if (folder := getattr(config.start, name))
    }
    return replace(
        config,
        output=os.path.expanduser(config.output),
        data=replace(config.data, path=os.path.expanduser(config.data.path)),
        start=replace(config.start, **start),
    )


def _parse(text: str, where: str) -> Any:
    """YAML, or ``ConfigError`` that says where it is not."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"{where}{place}: not YAML ({error.problem}). Quote what holds spaces or brackets."
        ) from error


def _assign(values: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {part!r} is a value, not a section.")
    values[path[-1]] = value


def build(schema: type[Any], values: Any, prefix: str = "") -> Any:
    """An instance of the dataclass ``schema`` from nested ``values``, every key and type checked."""
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'The recipe'}: found {values!r}, expected a section of keys.")
    known = {item.name for item in fields(schema)}
    refuse_unknown_keys(values, known, prefix)
    hints = typing.get_type_hints(schema, include_extras=True)
    return schema(**{key: convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def refuse_unknown_keys(values: Iterable[Any], known: Collection[str], prefix: str) -> None:
    """Raise ``ConfigError`` for the first of ``values`` that is not among the ``known``, naming the nearest."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {prefix}{near[0]}?" if near else f"; there are {', '.join(sorted(known))}."
            raise ConfigError(f"Unknown key {prefix}{key}{hint}")


def convert(kind: Any, value: Any, key: str) -> Any:
    """``value`` as the type ``kind``, or ``ConfigError`` that names ``key``, what was found and what was expected."""
    if is_dataclass(kind) and isinstance(kind, type):
        return build(kind, value, f"{key}.")
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = typing.get_args(kind) if is_union else (kind,)
    for option, limit in map(_limited, options):
        origin = typing.get_origin(option) or option
        if option is type(None):
            if value is None:
                return None
        elif origin is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple):
                (kind_of_item, _) = typing.get_args(option)
                return tuple(convert(kind_of_item, item, f"{key}.{at}") for at, item in enumerate(items))
        elif origin is float:
            number = _as_float(value)
            if number is not None:
                return _within(limit, number, key)
        elif origin is dict:
            if isinstance(value, dict):
                return _items(option, value, key)
        elif origin is Literal:
            name = "no" if value is False else value  # YAML reads a bare no as a truth value
            if name in typing.get_args(option):
                return name
        elif isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
            return _within(limit, value, key)
    raise ConfigError(
        f"{key}: found {value!r} ({type(value).__name__}), expected {' or '.join(map(_name_of, options))}."
    )


def _limited(kind: Any) -> tuple[Any, Range | None]:
    """A type without, and with, the range that its numbers are limited to."""
    if typing.get_origin(kind) is typing.Annotated:
        plain, limit = typing.get_args(kind)
        return plain, limit
    return kind, None


def _within(limit: Range | None, value: Any, key: str) -> Any:
    if limit is not None and not limit.holds(value):
        raise ConfigError(f"{key}: found {value}, expected {limit}.")
    return value


def _items(kind: Any, values: dict[Any, Any], key: str) -> dict[Any, Any]:
    names, of_item = typing.get_args(kind)
    if typing.get_origin(names) is Literal:
        refuse_unknown_keys(values, typing.get_args(names), f"{key}.")
    if of_item is Any:
        return values
    return {name: convert(of_item, value, f"{key}.{name}") for name, value in values.items()}


def _name_of(kind: Any) -> str:
    """What a person calls a type, or the values there are."""
    kind, _ = _limited(kind)
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    return "null" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):  # YAML reads 1e-3 as text
        try:
            return float(value)
        except ValueError:
            return None
    return None
