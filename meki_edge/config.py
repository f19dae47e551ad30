"""Strict JSON configuration: frozen dataclasses in, frozen dataclasses out.

An unknown key, a missing key or a value of the wrong type is an error that names the key and,
for an unknown one, the nearest known key. Nothing is guessed and nothing is dropped.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from os import PathLike
from typing import Any, TypeVar

from meki_edge.errors import UserError, nearest

T = TypeVar("T")


def from_dict(cls: type[T], values: Any, where: str | PathLike[str]) -> T:
    """Build dataclass ``cls`` from a JSON object, strictly.

    Args:
        cls: a dataclass whose fields are ``int``, ``float``, ``bool``, ``str``, tuples of these,
            nested dataclasses or optional forms of them.
        values: the parsed JSON object.
        where: the file (and field) that an error names.

    Raises:
        UserError: an unknown or missing key, or a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise UserError(f"expected a JSON object, got {values!r}", where=where, fix="write an object {…}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise UserError(
                f"unknown key {key!r}{nearest(key, fields)}",
                where=where,
                fix=f"known keys: {', '.join(sorted(fields))}",
            )
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = _convert(hints[name], values[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"the key {name!r} is missing", where=where, fix=f"add {name!r}")
    return cls(**arguments)


def to_dict(config: Any) -> dict[str, Any]:
    """The JSON object of a dataclass (tuples become lists), the inverse of :func:`from_dict`."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if value is None and type(None) in options:
            return None
        return _convert(next(option for option in options if option is not type(None)), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise UserError(f"expected a list, got {value!r}", where=where, fix="write a JSON list […]")
        element = typing.get_args(hint)[0]
        return tuple(_convert(element, item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise UserError(f"expected an object, got {value!r}", where=where, fix="write a JSON object {…}")
        element = typing.get_args(hint)[1]
        return {key: _convert(element, item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise UserError("the number is too large", where=where, fix="give a smaller number") from None
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise UserError(
            f"expected {hint.__name__}, got {value!r}", where=where, fix=f"give a value of type {hint.__name__}"
        )
    return value
