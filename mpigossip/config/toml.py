"""Strict conversion of TOML values to types with limits, error messages, and writing of TOML.

The rest of `config` is built on this module, which does not know the sections of a job.
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
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mpigossip.config import removed

if TYPE_CHECKING:
    import cattrs

LARGEST = 2**63 - 1
"""Largest integer that every TOML parser must accept and that HDF5 can store."""


@dataclass(frozen=True, eq=False)
class Limit:
    """Condition on a value, used as `Annotated[type, Limit(test, words)]`."""

    holds: Callable[[Any], bool]
    """Predicate that is true for valid values."""
    words: str
    """Statement of the condition for error messages, such as "must be at least 0"."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The condition in keywords of JSON Schema, such as ``{"minimum": 0}``, if it has any."""


class BadValue(ValueError):
    """Error about an invalid value; `at` adds the setting to the message."""

    def __init__(self, value: object, need: str) -> None:
        self.value = value
        self.need = need
        super().__init__(value, need)

    def at(self, path: str, default: object = None) -> str:
        """Format the error as one line for the user.

        :param path: setting that has the value, as "section.key"
        :param default: default of the setting, which is shown unless it is None
        :return: setting, value, condition and default, or the message for a removed value
        """
        remedy = "" if default is None else f"; the default is {show(default)}"
        here = f"{path} = {show(self.value)}"
        return removed.of_setting(here) or f"{here}: {self.need}{remedy}"


def show(value: object) -> str:
    """Format ``value`` as in a job file, shortened to at most 80 characters."""
    try:
        text = write(value)
    except (BadValue, ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else text[:60] + " … " + text[-10:]


def near(word: object, words: Iterable[str], others: Iterable[str] = ()) -> str:
    """Suggest words that contain a misspelled word or are similar to it; otherwise list all words.

    :param word: word that is not known
    :param words: valid words
    :param others: further words that may be suggested, but are not listed
    :return: clause for an error message, such as 'did you mean "batch"?'
    """
    words = sorted(words)
    part = _bare(str(word))
    meant = sorted({*words, *others})
    whole = [each for each in meant if len(part) > 2 and part in _bare(each)]
    if close := sorted(whole, key=len)[:3] or difflib.get_close_matches(str(word), meant, 1):
        return "did you mean " + " or ".join(f'"{each}"' for each in close) + "?"
    return "known here: " + ", ".join(words) if words else "there are none here"


def unknown(path: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the message for an unknown key, with its replacement or with similar keys.

    :param path: path of the key, as "section.key"
    :param known: valid keys
    :param others: further keys that may be suggested, but are not listed
    """
    hint = near(path.rpartition(".")[2], known, others)
    return removed.of_setting(path) or f"{path}: unknown key; {hint}"


def _bare(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


def plain(value: Any, depth: int = 16) -> Any:
    """Return ``value`` with its lists converted to tuples.

    :param value: number, string or None, or a list or mapping of them
    :param depth: largest depth of nesting
    :raises BadValue: if TOML or HDF5 cannot store the value, or it would not equal its copy (NaN)
    """
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
    """Return the valid values of section ``name``, and error messages for the other ones."""
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
    """Parse ``text`` as a TOML value; if it is not one, or is a date, return it as a string."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    if set(parsed) != {"v"} or not isinstance(parsed["v"], bool | int | float | str | list | dict):
        return text
    return parsed["v"]


@functools.cache
def converter() -> cattrs.Converter:
    """Return the converter, which accepts neither unknown keys nor implicit changes of type."""
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
    # TOML has no null: files and overrides write "none" for a value that is not set.
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
    """Yield an error message for each problem in an exception of the converter.

    :param error: exception, possibly a group of exceptions
    :param path: setting or section that was converted; "" for a job
    :param default: default of this setting; None: no default is shown
    """
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
    """Write an override "section.key=value" into ``raw``.

    :param raw: sections by name, which are changed in place
    :param text: override
    :return: path "section.key" of the override, and error messages; if the override does not have
        this form, the path is ""
    """
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
    """Check the options in ``values`` against the keyword-only parameters of ``build``.

    Options are converted to the types of the annotations. Missing options get their defaults,
    unless the default is None, which TOML cannot express.

    :param section: name of the section, for error messages
    :param values: keys and values of the section, which are changed in place
    :param known: keys of the section that are not options
    :param build: builder that takes the options
    :param others: paths that a misspelled key may stand for, in addition to the keys here
    :return: an error message for each problem
    """
    parameters, accepts_any = keyword_only(build)
    messages: list[str] = []
    for key in [key for key in values if key not in known]:
        path = f"{section}.{key}"
        if key in parameters:
            annotation, default = parameters[key]
            try:
                values[key] = converter().structure(values[key], annotation)
            except Exception as error:  # cattrs raises groups, which explain() resolves
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
    """Return the keyword-only parameters of ``build``, and whether it accepts any others (`**`).

    :return: annotation and default of each parameter, by name; and true if there is a `**kwargs`
    """
    try:
        hints = typing.get_type_hints(build, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # the annotations exist for type checkers only: accept any type
    parameters = inspect.signature(build).parameters.values()
    found = {
        p.name: (hints.get(p.name, Any), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    return found, any(p.kind is p.VAR_KEYWORD for p in parameters)


def write(value: Any) -> str:
    """Write ``value`` as TOML; None becomes the string "none", which is read as None."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):  # the repr of a NumPy scalar is not TOML
        return repr(float(value) if isinstance(value, float) else value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write(item) for item in value) + "]"
    if isinstance(value, Mapping):
        items = (f"{write_key(key)} = {write(item)}" for key, item in value.items())
        return "{ " + ", ".join(items) + " }" if value else "{}"
    raise BadValue(value, f"a {type(value).__name__} has no place in TOML")


def write_key(key: str) -> str:
    """Write a TOML key: bare if TOML allows it, otherwise quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else write(key)
