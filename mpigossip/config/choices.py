"""Names that a job chooses from: tables of builders, and settings that a name brings along.

A table is `{name: Part or builder}`; `load` is given one for each setting that holds a name, such
as `{"graph.name": graphs.BUILDERS}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mpigossip.config import removed, toml
from mpigossip.config.toml import near, show

OWN = r"[A-Za-z_][\w.]*:\w+"
"""The form of a name that stands for something to import: "package.module:factory"."""
OPEN = {
    "graph.name": rf"file:.+|{OWN}",
    "model.name": OWN,
    "algorithm.name": OWN,
    "task.name": OWN,
    "data.source": OWN,
}
"""Settings that hold other names too, by their form: a graph from a file, what a user brings along.
These have options of their own, which nobody can check before they are made."""


FILES = ("data.source",)
"""Settings that may name a file, too; a file has no options."""

Table = Mapping[str, "BuilderSpec | Callable"]
Tables = Mapping[str, Table]


@dataclass(frozen=True)
class BuilderSpec:
    """A line of a table: the builder of a name, and all that is to be known without calling it."""

    made_by: Callable | str
    """The builder, whose keyword-only parameters are the options; or "module:function", which is
    imported at its first use."""
    local: str | None = None
    """An algorithm's usual local step; None where it has its own."""
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of other settings that the name brings: "section.key" -> value."""
    only: bool | Collection[str] = False
    """With anything else than `brings`, or these settings of it, it would be another method; the
    others are defaults, and a setting may name a user's own."""
    follows: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Options that follow from the rest of the run where a job leaves them unset."""

    @classmethod
    def of(cls, table: Table, name: str) -> BuilderSpec:
        """The line of a name that a table has."""
        found = table[name]
        return found if isinstance(found, cls) else cls(found)

    @property
    def build(self) -> Callable:
        """The builder itself."""
        if callable(self.made_by):
            return self.made_by
        module, _, name = self.made_by.partition(":")
        return getattr(import_module(module), name)

    def following(self, options: Mapping[str, Any], known: Any) -> dict[str, Any]:
        """Values of `follows` for what is unset among `options`; a rule may give None: leave it."""
        unset = {key: rule for key, rule in self.follows.items() if options.get(key) is None}
        values = {key: rule(known) for key, rule in unset.items()}
        return {key: value for key, value in values.items() if value is not None}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.build(*arguments, **options)


def spec_of(table: Table, name: Any) -> BuilderSpec | None:
    """The line of this name, None where there is none."""
    return BuilderSpec.of(table, name) if isinstance(name, str) and name in table else None


def options_of(table: Table, name: Any) -> Collection[str]:
    """The options of this name; none where it isn't in the table."""
    part = spec_of(table, name)
    return toml.keyword_only(part.build)[0] if part else ()


def apply_implied(
    sections: dict[str, dict[str, Any]], tables: Tables, local: Any = None
) -> list[str]:
    """Fill in what the chosen names bring, ``local`` being the local step in effect.

    Naming something else is a mistake where it is all.
    """
    messages = []
    for path, table in tables.items():
        section, key = path.split(".")
        name = local if section == "local" else sections.get(section, {}).get(key)
        part = spec_of(table, name)
        for other, value in part.implies.items() if part else {}:
            there, what = other.split(".")
            named = sections.setdefault(there, {}).setdefault(what, value)
            own = isinstance(named, str) and re.fullmatch(OWN, named) is not None
            only = part.only is True or part.only and other in part.only and not own
            if named != value and only:
                messages.append(
                    f'{other} = {show(named)}: {path} = "{name}" means {other} = "{value}"; '
                    f"leave it out, or choose another {section}"
                )
    return messages


def check(
    path: str,
    name: Any,
    values: dict[str, Any],
    known: Collection[str],
    table: Table,
    others: Collection[str] = (),
) -> list[str]:
    """Check the name at `path` and the options beside it in `values`; fill in the defaults.

    `known`: the section's own keys, which are no options; `others`: what an unknown key may mean.
    """
    section, key = path.split(".")
    if not isinstance(name, str):
        return []  # the section's own check reports it
    part = spec_of(table, name)
    if part is None:
        if re.fullmatch(OPEN.get(path, "(?!)"), name):
            return []
        if path in FILES:
            return toml.check_options(section, values, known, lambda: None)
        what = section if key == "name" else key
        gone = removed.of_setting(f"{path} = {show(name)}")
        return [gone or f"{path} = {show(name)}: unknown {what}; {near(name, table)}"]
    if key != "name" and path not in FILES:
        return []
    return toml.check_options(section, values, known, part.build, others)
