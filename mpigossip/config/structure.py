"""Conversion of plain values, such as a TOML file contains, to the types of annotations.

`structure` knows bool, int, float, str, Any, Literal, tuples, dictionaries, unions, dataclasses and
`Annotated` types with a `Limit`. It is strict: it changes no type, except an integer to a float, a
list to a tuple, and the text "none" to None in a union with None. A dataclass accepts no unknown
keys. One JobError reports all problems of a dataclass, each with the path of its setting, and with
the default if there is one.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal

from mpigossip.config.errors import JobError
from mpigossip.config.toml import BadValue, closest, show, unknown

NEEDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
"""Scalar types, each with its description in error messages."""


@dataclass(frozen=True, eq=False)
class Limit:
    """Condition on a value, used as `Annotated[type, Limit(test, words)]`."""

    holds: Callable[[Any], bool]
    """Predicate that is true for valid values."""
    words: str
    """Statement of the condition for error messages, such as "must be at least 0"."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The condition in keywords of JSON Schema, such as ``{"minimum": 0}``, if it has any."""


def structure(value: Any, kind: Any, path: str = "", default: object = None) -> Any:
    """Convert ``value`` to the type ``kind``.

    :param value: scalar, None, or a list or mapping of such values
    :param kind: type, as in an annotation
    :param path: setting that has the value, as "section.key", for error messages; "": the value is
        a whole job
    :param default: default of the setting, which error messages show unless it is None
    :raises JobError: if the value does not have this type; the message lists all problems
    :raises TypeError: if this module does not know the type
    """
    try:
        return _convert(value, kind, path)
    except BadValue as error:
        raise JobError([error.at(path, default)]) from None


def _convert(value: Any, kind: Any, path: str) -> Any:
    """Convert ``value`` to ``kind``.

    :param value: value as :func:`structure` takes it
    :param kind: type, as in an annotation
    :param path: setting that has the value, for messages about a dataclass; "": a whole job
    :raises BadValue: if the value, or an item of it, has the wrong type or violates a limit
    :raises JobError: if ``kind`` is a dataclass whose settings have problems
    :raises TypeError: if this module does not know the type
    """
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return value
    if kind in NEEDS:
        return _scalar(value, kind)
    if is_dataclass(kind):
        return _dataclass(value, kind, path)
    if origin is Annotated:
        return _limited(value, kind, path)
    if origin is Literal:
        return _choice(value, typing.get_args(kind))
    if origin is tuple:
        return _tuple(value, typing.get_args(kind), path)
    if origin is dict:
        return _dict(value, typing.get_args(kind) or (Any, Any), path)
    if origin in (typing.Union, types.UnionType):
        return _union(value, typing.get_args(kind), path)
    raise TypeError(f"{path}: settings cannot have the type {kind}")


def _scalar(value: Any, kind: type) -> Any:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and is_integer:
        return float(value)
    if not isinstance(value, kind) or (kind is int and not is_integer):
        raise BadValue(value, f"needs {NEEDS[kind]}")
    return value


def _limited(value: Any, kind: Any, path: str) -> Any:
    converted = _convert(value, kind.__origin__, path)
    for limit in kind.__metadata__:
        if not limit.holds(converted):
            raise BadValue(converted, limit.words)
    return converted


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    close = closest(str(value), map(str, choices))
    hint = f'; did you mean "{close[0]}"?' if close else ""
    *others, last = map(show, choices)
    listed = f"{', '.join(others)} or {last}" if others else last
    raise BadValue(value, f"must be {listed}{hint}")


def _tuple(value: Any, kinds: tuple[Any, ...], path: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise BadValue(value, "needs a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise BadValue(value, f"needs a list of {len(kinds)} values, got {len(value)}")
    return tuple(_convert(item, kind, path) for item, kind in zip(value, kinds, strict=True))


def _dict(value: Any, kinds: tuple[Any, ...], path: str) -> dict:
    if not isinstance(value, Mapping):
        raise BadValue(value, "needs a table of keys and values")
    key_kind, item_kind = kinds
    converted = {}
    for key, item in value.items():
        name = _convert(key, key_kind, path)
        try:
            converted[name] = _convert(item, item_kind, path)
        except BadValue as error:
            inner = f".{error.key}" if error.key else ""
            raise BadValue(error.value, error.need, f"{name}{inner}") from None
    return converted


def _union(value: Any, kinds: tuple[Any, ...], path: str) -> Any:
    members = [kind for kind in kinds if kind is not type(None)]
    # TOML has no null: files and overrides write "none" for a value that is not set.
    if value in (None, "none") and len(members) < len(kinds):
        return None
    errors = []
    for member in members:
        try:
            return _convert(value, member, path)
        except BadValue as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    raise BadValue(value, " or ".join(error.need for error in errors))


def _dataclass(value: Any, cls: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise BadValue(value, "needs a table of keys and values")
    prefix = f"{path}." if path else ""
    hints = _hints(cls)
    values = {}
    problems: list[str] = []
    for setting in fields(cls):
        if setting.name in value:
            default = None if setting.default is MISSING else setting.default
            setting_path = prefix + setting.name
            try:
                values[setting.name] = structure(
                    value[setting.name], hints[setting.name], setting_path, default
                )
            except JobError as error:
                problems += error.messages
        elif setting.default is MISSING and setting.default_factory is MISSING:
            problems.append(f"{prefix}{setting.name} is missing: add this key")
    problems += [
        unknown(f"{prefix}{key}", hints) for key in sorted(value.keys() - hints.keys(), key=str)
    ]
    if problems:
        raise JobError(problems)
    return cls(**values)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with its limits, by the name of the field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {setting.name: hints[setting.name] for setting in fields(cls)}
