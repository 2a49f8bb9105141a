"""What an algorithm's name says about other sections of a job; part of `config`."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mpigossip.config import toml
from mpigossip.config.toml import near, show

OWN = r"[A-Za-z_][\w.]*:\w+"
"""The form of a name that stands for something to import: "package.module:factory"."""

BRINGS: dict[str, dict[str, str]] = {
    "parallel": {"graph.name": "complete"},
    "qsgd": {"graph.name": "complete", "node.wire": "qsgd"},
    "cpsgd": {"cadence.name": "cpsgd"},
    "adpsgd": {"cadence.name": "adpsgd"},
    "gossip-pga": {"cadence.name": "gossip-pga"},
    "gossip-aga": {"cadence.name": "gossip-aga"},
    "slowmo": {"cadence.name": "gossip-pga"},
    "diloco": {"cadence.name": "cpsgd"},
    "noloco": {"cadence.name": "every", "graph.name": "random-matching"},
    "defacto": {"cadence.name": "halves", "graph.name": "spanning-tree"},
    "ceca": {"graph.name": "ceca"},
}
"""Algorithms whose names in the literature say something about other sections: what they say."""

ONLY = {"parallel", "qsgd", "cpsgd", "adpsgd", "gossip-pga", "gossip-aga"}
"""Those of `BRINGS` that would be another method with anything else; the rest are defaults."""


def bring(sections: dict[str, dict[str, Any]]) -> list[str]:
    """Fill in what the algorithm brings; naming something else is a mistake where it is all."""
    algorithm, messages = sections.get("algorithm", {}).get("name"), []
    for path, value in BRINGS.get(algorithm if isinstance(algorithm, str) else "", {}).items():
        section, key = path.split(".")
        named = sections.setdefault(section, {}).setdefault(key, value)
        if named != value and algorithm in ONLY:
            messages.append(
                f'{path} = {show(named)}: algorithm.name = "{algorithm}" means {path} = "{value}"; '
                'leave it out, or choose another algorithm, such as "dsgd" or "dmsgd"'
            )
    return messages


def names(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The key `name` of every section that has one."""
    return {
        section: table["name"]
        for section, table in sections.items()
        if isinstance(table, dict) and "name" in table
    }


def drop_options(
    table: dict[str, Any], known: Collection[str], section: str, overrides: Sequence[str]
) -> None:
    """Options belong to a name: where an override changes it, those of the old one go."""
    given = {text.partition("=")[0].strip() for text in overrides}
    for key in [k for k in table if k not in known and f"{section}.{k}" not in given]:
        del table[key]


def check_choice(
    section: str,
    values: dict[str, Any],
    known: Mapping[str, Any],
    choices: Mapping[str, Callable],
) -> list[str]:
    """Check the name and the options in `values` against `choices`; fill in the defaults.

    `known`: the section's own keys with their defaults.
    """
    name = values.get("name", known["name"])
    if not isinstance(name, str):
        return []  # the section's own check reports it
    if name not in choices:
        # A graph from a file and what a user brings along have their own options.
        own = {"graph": r"file:.+", "model": OWN, "algorithm": OWN}.get(section, "(?!)")
        if re.fullmatch(own, name):
            return []
        return [f"{section}.name = {show(name)}: unknown {section}; {near(name, choices)}"]
    return toml.check_options(section, values, known, choices[name])
