"""Section `[local]` beside the algorithm that uses it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mpigossip.config.choices import Tables, check, options_of, part_of
from mpigossip.config.own_parts import is_own
from mpigossip.config.sections import SECTIONS, AlgorithmSection
from mpigossip.config.toml import show


def local_in_effect(sections: dict[str, Any], tables: Tables) -> Any:
    """The local step that a job names, or else the usual one of its algorithm, or else None."""
    named = _table(sections, "local").get("name")
    if named not in (None, "none"):
        return named
    part = part_of(tables.get("algorithm.name", {}), _algorithm(sections))
    return part.local if part else None


def local_options(sections: dict[str, Any], tables: Tables) -> list[str]:
    """Return the options of the local step in effect, as `local.key`."""
    name = local_in_effect(sections, tables)
    return [f"local.{key}" for key in options_of(tables.get("local.name", {}), name)]


def check_local(sections: dict[str, Any], tables: Tables) -> list[str]:
    """Check the local step with its options against its table and the algorithm; fill them in."""
    values, algorithms = sections.setdefault("local", {}), tables["algorithm.name"]
    name, algorithm = local_in_effect(sections, tables), _algorithm(sections)
    part = part_of(algorithms, algorithm)
    takes = [key for key in algorithms if (line := part_of(algorithms, key)) and line.local]
    if name is not None and part and part.local is None:
        return [
            f'local.name = {show(name)}: "{algorithm}" has its own local step; leave it out, or '
            f"choose one of {', '.join(takes)}"
        ]
    if name is None and (part or is_own(str(algorithm))):
        return [
            f'local.{key}: algorithm "{algorithm}" has no local step that it could be an option '
            "of; leave it out, or name a local step"
            for key in values.keys() - _keys("local")
        ]
    return check("local.name", name, values, _keys("local"), tables["local.name"])


def _algorithm(sections: dict[str, Any]) -> Any:
    return _table(sections, "algorithm").get("name", AlgorithmSection.name)


def _table(sections: dict[str, Any], name: str) -> dict[str, Any]:
    found = sections.get(name, {})
    return found if isinstance(found, dict) else {}


def _keys(section: str) -> set[str]:
    return {field.name for field in fields(SECTIONS[section]) if field.name != "options"}
