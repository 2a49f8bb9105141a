"""Typed values and TOML: strict conversion with limits, messages that help, and writing.

`config` is built on it; nothing here knows the sections of a job.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from mpigossip.config import removed

if TYPE_CHECKING:
    import cattrs

LARGEST = 2**63 - 1
"""Largest whole number that TOML promises and HDF5 stores."""


class Limit(NamedTuple):
    """A condition on a value, used as `Annotated[type, Limit(test, words)]`."""

    holds: Callable[[Any], bool]
    words: str


class BadValue(ValueError):
    """A value and what is wrong with it; `at` adds where it stands."""

    def __init__(self, value: object, need: str) -> None:
        self.value = value
        self.need = need
        super().__init__(value, need)

    def at(self, path: str, default: object = None) -> str:
        """One line for the user: path, value, limit, and the default where there is one."""
        remedy = "" if default is None else f"; the default is {show(default)}"
        here = f"{path} = {show(self.value)}"
        return removed.of_setting(here) or f"{here}: {self.need}{remedy}"


def show(value: object) -> str:
    """`value` as it would stand in a job file, cut to a readable length."""
    try:
        text = write(value)
    except (BadValue, ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:60] + " … " + text[-10:]


def near(word: object, words: Iterable[str], others: Iterable[str] = ()) -> str:
    """`did you mean …`: those of `words` that have it in them, or one like it; all otherwise.

    `others` may be meant, too, and aren't listed.
    """
    words = sorted(words)
    part = _bare(str(word))
    meant = sorted({*words, *others})
    whole = [each for each in meant if len(part) > 2 and part in _bare(each)]
    if close := sorted(whole, key=len)[:3] or difflib.get_close_matches(str(word), meant, 1):
        return "did you mean " + " or ".join(f'"{each}"' for each in close) + "?"
    return "known here: " + ", ".join(words) if words else "there are none here"


def unknown(path: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the message on a key that isn't known at `path`: what replaced it, or what is near."""
    hint = near(path.rpartition(".")[2], known, others)
    return removed.of_setting(path) or f"{path}: unknown key; {hint}"


def _bare(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


def plain(value: Any, depth: int = 16) -> Any:
    """`value` with lists as tuples; BadValue where TOML, HDF5 or a comparison couldn't keep it."""
    if depth == 0:
        raise BadValue(value, "is nested too deeply; 15 levels are allowed")
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(plain(item, depth - 1) for item in value)
    if not isinstance(value, bool | int | float | str | None):
        raise BadValue(value, f"is a {type(value).__name__}; write numbers, text or lists")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadValue(value, "must be a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise BadValue(value, "must lie within 64 bits (at most 9223372036854775807)")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadValue(ascii(value), "must be text in UTF-8") from None
    return value


def plain_table(name: str, table: Any) -> tuple[dict[str, Any], list[str]]:
    """The plain values of a section, and the mistakes in the others."""
    if not isinstance(table, Mapping):
        return {}, [f"{name} = {show(table)}: needs keys, in a section [{name}]"]
    values: dict[str, Any] = {}
    messages = []
    for key, value in table.items():
        try:
            values[plain(str(key))] = plain(value)
        except BadValue as mistake:
            messages.append(mistake.at(f"{name}.{ascii(str(key))[1:-1]}"))
    return values, messages


def parse_value(text: str) -> Any:
    """The value that `text` is in TOML; otherwise, and for dates, a bare word: `text` itself."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    if set(parsed) != {"v"} or not isinstance(parsed["v"], bool | int | float | str | list | dict):
        return text
    return parsed["v"]


@functools.cache
def converter() -> cattrs.Converter:
    """The converter: no key that a dataclass lacks, no silent change of type."""
    import cattrs

    made = cattrs.Converter(forbid_extra_keys=True)
    needs = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    for kind, words in needs.items():
        made.register_structure_hook(kind, functools.partial(_scalar, words))
    hooks = {
        Literal: _choice,
        tuple: _tuple,
        typing.Union: _union,
        types.UnionType: _union,
        Annotated: _limited,
    }
    made.register_structure_hook_func(
        lambda kind: typing.get_origin(kind) in hooks,
        lambda value, kind: hooks[typing.get_origin(kind)](value, kind),
    )
    return made


def _scalar(words: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadValue(value, f"needs {words}")
    return value


def _choice(value: Any, kind: Any) -> Any:
    choices = typing.get_args(kind)
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    close = difflib.get_close_matches(str(value), map(str, choices), 1)
    hint = f'; did you mean "{close[0]}"?' if close else ""
    *others, last = map(show, choices)
    named = f"{', '.join(others)} or {last}" if others else last
    raise BadValue(value, f"must be {named}{hint}")


def _tuple(value: Any, kind: Any) -> tuple:
    if not isinstance(value, list | tuple):
        raise BadValue(value, "needs a list")
    items = typing.get_args(kind)
    if items[-1] is Ellipsis:
        items = items[:1] * len(value)
    if len(items) != len(value):
        raise BadValue(value, f"needs a list of {len(items)}, got {len(value)}")
    return tuple(converter().structure(v, k) for v, k in zip(value, items, strict=True))


def _union(value: Any, kind: Any) -> Any:
    kinds = typing.get_args(kind)
    members = [k for k in kinds if k is not type(None)]
    # "none" is how TOML and an override say that nothing is set.
    if value in (None, "none") and len(members) < len(kinds):
        return None
    wrong = []
    for member in members:
        try:
            return converter().structure(value, member)
        except BadValue as mistake:
            wrong.append(mistake)
    if len(wrong) == 1:
        raise wrong[0]
    raise BadValue(value, " or ".join(mistake.need for mistake in wrong))


def _limited(value: Any, kind: Any) -> Any:
    value = converter().structure(value, kind.__origin__)
    limit = kind.__metadata__[0]
    if not limit.holds(value):
        raise BadValue(value, limit.words)
    return value


def explain(error: Exception, path: str = "", default: object = None) -> Iterator[str]:
    """Each mistake inside what the converter raised, with its dotted path."""
    import cattrs

    if isinstance(error, BadValue):
        yield error.at(path, default)
    elif isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [f.name for f in fields(error.cl)]
        for key in sorted(error.extra_fields, key=str):
            yield unknown(f"{path}.{key}" if path else str(key), known)
    elif isinstance(error, cattrs.ClassValidationError):
        defaults = {f.name: f.default for f in fields(error.cl) if f.default is not MISSING}
        for inner, note in error.group_exceptions()[0]:
            at = f"{path}.{note.name}" if path else note.name
            yield from explain(inner, at, defaults.get(note.name))
        for inner in error.group_exceptions()[1]:
            yield from explain(inner, path)
    else:
        raise error


def override(raw: dict[str, Any], text: str) -> tuple[str, list[str]]:
    """Put `section.key=value` into `raw`; its path, and the message where it isn't of that form."""
    match = re.fullmatch(r"\s*([\w-]+)\.([\w-]+)\s*=(.*)", text, re.DOTALL)
    if match is None:
        return "", [f"override {show(text)}: needs the form section.key=value, as in run.epochs=5"]
    table = raw.setdefault(match[1], {})
    if isinstance(table, dict):
        table[match[2]] = parse_value(match[3].strip())
    return f"{match[1]}.{match[2]}", []


def check_options(
    section: str,
    values: dict[str, Any],
    known: Collection[str],
    build: Callable,
    others: Collection[str] = (),
) -> list[str]:
    """Check `values`, but for the `known` keys, against the keyword-only parameters of `build`.

    Types are those of the annotations; converted values and defaults (but for None, which TOML
    lacks) are filled into `values`. Returns the mistakes. `others`: what an unknown key may mean.
    """
    parameters, accepts_any = keyword_only(build)
    messages: list[str] = []
    for key in [key for key in values if key not in known]:
        path = f"{section}.{key}"
        if key in parameters:
            annotation, default = parameters[key]
            try:
                values[key] = converter().structure(values[key], annotation)
            except Exception as error:  # cattrs raises groups; explain() sorts them out
                messages += explain(error, path, default)
        elif not accepts_any:
            messages.append(unknown(path, [*known, *parameters], others))
    for key, (_, default) in parameters.items():
        if default is inspect.Parameter.empty and key not in values:
            messages.append(f"{section}.{key} is not set: it has no default; write {key} = …")
        elif default is not None:
            values.setdefault(key, plain(default))
    return messages


def keyword_only(build: Callable) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Keyword-only parameters (annotation, default), and whether any other is taken."""
    try:
        hints = typing.get_type_hints(build, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # annotations that exist for type checkers alone: taken unchecked
    parameters = inspect.signature(build).parameters.values()
    found = {
        p.name: (hints.get(p.name, Any), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    return found, any(p.kind is p.VAR_KEYWORD for p in parameters)


def write(value: Any) -> str:
    """`value` as TOML; None, which TOML lacks, is written as the text that is read back as None."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):  # NumPy's repr is no TOML
        return repr(float(value) if isinstance(value, float) else value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{write_key(key)} = {write(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }" if value else "{}"
    raise BadValue(value, f"a {type(value).__name__} has no place in TOML")


def write_key(key: str) -> str:
    """`key` as it stands before the equals sign: bare where TOML allows it, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else write(key)
