"""Reading of plain TOML values, writing of TOML, and error messages about keys and values.

This module depends neither on the types nor on the sections of a job.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from mpigossip.config.errors import JobError

LARGEST = 2**63 - 1
"""Largest integer that every TOML parser must accept and that HDF5 can store."""


class BadValue(ValueError):
    """Error about an invalid value; `at` adds the setting to the message."""

    def __init__(self, value: object, need: str, key: str = "") -> None:
        """Store what is wrong.

        :param value: invalid value
        :param need: condition that it violates
        :param key: key of the value in the table that the setting holds; "": the value is the
            setting itself, or an item of its list
        """
        self.value = value
        self.need = need
        self.key = key
        super().__init__(value, need, key)

    def at(self, path: str, default: object = None) -> str:
        """Format the error as one line for the user.

        :param path: setting that has the value, as "section.key"
        :param default: default of the setting, which is shown unless it is None
        :return: setting, value, condition and default
        """
        remedy = "" if default is None else f"; the default is {show(default)}"
        path = f"{path}.{self.key}" if self.key else path
        return f"{path} = {show(self.value)}: {self.need}{remedy}"


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
    bare_word = _bare(str(word))
    candidates = sorted({*words, *others})
    containing = [
        candidate
        for candidate in candidates
        if len(bare_word) > 2 and bare_word in _bare(candidate)
    ]
    if close := sorted(containing, key=len)[:3] or closest(str(word), candidates):
        return "did you mean " + " or ".join(f'"{candidate}"' for candidate in close) + "?"
    return "known here: " + ", ".join(words) if words else "there are none here"


def closest(word: str, candidates: Iterable[str]) -> list[str]:
    """Return the candidate that is most similar to ``word`` in a list, or [] if there is none.

    If several are equally similar, the one that consists of the same letters is returned, because
    letters are often exchanged by mistake. If there is no such candidate, the first one is returned
    for a long word, and none for a word of up to four letters.
    """
    close = difflib.get_close_matches(word, list(candidates), 2)
    ratios = {difflib.SequenceMatcher(None, candidate, word).ratio() for candidate in close}
    if len(close) < 2 or len(ratios) > 1:
        return close[:1]
    permutations = [candidate for candidate in close if sorted(candidate) == sorted(word)]
    return permutations or close[: len(word) > 4]


def unknown(path: str, valid_keys: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the message for an unknown key, with similar keys.

    :param path: path of the key, as "section.key"
    :param valid_keys: keys that the section or table may contain
    :param others: further keys that may be suggested, but are not listed
    """
    hint = near(path.rpartition(".")[2], valid_keys, others)
    return f"{path}: unknown key; {hint}"


def _bare(word: str) -> str:
    return re.sub(r"[\W_]", "", word.lower())


def plain(value: Any, depth: int = 16) -> Any:
    """Return ``value`` with lists converted to tuples, and keys of mappings to strings.

    :param value: number, string or None, or a list or mapping of them
    :param depth: number of levels of nested lists and mappings from which on the value is rejected
    :raises BadValue: if TOML or HDF5 cannot store the value, or if a number in it is not finite
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
        raise BadValue(value, "must fit into 64 bits (at most 9223372036854775807)")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadValue(ascii(value), "must be text in UTF-8") from None
    return value


def plain_table(name: str, table: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the valid settings of section ``name``, and error messages for invalid ones."""
    if not isinstance(table, Mapping):
        return {}, [f"{name} = {show(table)}: must be a section [{name}] with keys"]
    values: dict[str, Any] = {}
    messages = []
    for key, value in table.items():
        try:
            values[plain(str(key))] = plain(value)
        except BadValue as error:
            messages.append(error.at(f"{name}.{ascii(str(key))[1:-1]}"))
    return values, messages


def parse_value(text: str) -> Any:
    """Parse ``text`` as a TOML value; if that fails or gives a date, return ``text`` itself."""
    try:
        parsed = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    if set(parsed) != {"v"} or not isinstance(parsed["v"], bool | int | float | str | list | dict):
        return text
    return parsed["v"]


def parse_override(text: str) -> tuple[str, str, Any]:
    """Split an override "section.key=value" into section, key and parsed value.

    :param text: override; its value is TOML, or otherwise a text without quotes
    :raises JobError: if the override does not have this form
    """
    match = re.fullmatch(r"\s*([\w-]+)\.([\w-]+)\s*=(.*)", text, re.DOTALL)
    if match is None:
        raise JobError(
            f"override {show(text)}: needs the form section.key=value, as in run.epochs=5"
        )
    return match[1], match[2], parse_value(match[3].strip())


def write(value: Any) -> str:
    """Write ``value`` as TOML; None becomes the string "none", which `structure` reads as None.

    :param value: None, boolean, number or string, or a list, tuple or mapping of such values
    :raises BadValue: if the value, or an item of it, has another type
    """
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
    raise BadValue(value, f"a {type(value).__name__} isn't TOML; write numbers, text or lists")


def write_key(key: str) -> str:
    """Write a TOML key: bare if TOML allows it, otherwise quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else write(key)
