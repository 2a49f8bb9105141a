"""Defaults of a job that depend on the names that it chooses.

A name implies settings of later sections: `algorithm.name = "diloco"` implies `cadence.name =
"cpsgd"`. The builder of a name also has options, which have defaults. `with_defaults` returns
copies of the sections with the implied settings and these defaults.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from mpigossip.config.choices import (
    FILES,
    LOCAL,
    USER_CODE,
    Table,
    Tables,
    check_name,
    options_of,
    spec_of,
)
from mpigossip.config.sections import SECTIONS
from mpigossip.config.toml import show
from mpigossip.config.user_code import is_user_code

Sections = Mapping[str, Any]
"""Sections of a job by name; each is a mapping from its keys to plain values. Before they are
checked, a section may be any other value."""
SETTINGS: dict[str, dict[str, Any]] = {
    section: {f.name: f.default for f in fields(cls) if f.name != "options"}
    for section, cls in SECTIONS.items()
}
"""Default of each setting, by section and key; MISSING for `algorithm.average_state`."""
NAMES: dict[str, str] = {
    section: next((path for path in FILES if path.startswith(f"{section}.")), f"{section}.name")
    for section, cls in SECTIONS.items()
    if "options" in {f.name for f in fields(cls)}
}
"""Setting that holds the name to which the options of a section belong, by section."""


def keys_of(sections: Sections, name: str) -> Mapping[str, Any]:
    """Return the keys and values of a section; {} if the section is missing or not a mapping."""
    section = sections.get(name)
    return section if isinstance(section, Mapping) else {}


def may_be_unset(path: str) -> bool:
    """Return whether the setting at ``path``, as "section.key", has the default None."""
    section, key = path.split(".")
    return SETTINGS[section].get(key, MISSING) is None


def names_in_effect(sections: Sections, tables: Tables) -> dict[str, Any]:
    """Return the name at each setting that holds one, by path, in the order of the sections.

    The name in effect is the value of the setting. If the setting is missing or unset, it is the
    value that an earlier name implies, or otherwise the default of the setting.

    :param sections: sections of a job, which need not be checked yet
    :param tables: for each setting that holds a name, the table of its names
    """
    order = list(SECTIONS)
    paths = {*NAMES.values(), *tables}
    implied: dict[str, Any] = {}
    names: dict[str, Any] = {}
    for path in sorted(paths, key=lambda path: order.index(path.split(".")[0])):
        section, key = path.split(".")
        name = keys_of(sections, section).get(key, MISSING)
        if name is MISSING or (may_be_unset(path) and name in (None, "none")):
            name = implied.get(path, SETTINGS[section][key])
        names[path] = name
        spec = spec_of(tables.get(path, {}), name)
        implied = {**(spec.implies if spec else {}), **implied}
    return names


def with_defaults(
    sections: Mapping[str, dict[str, Any]], tables: Tables
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Add the settings that names imply, and the defaults of options.

    :param sections: sections of a job, of plain values
    :param tables: for each setting that holds a name, the table of its names
    :return: new sections, and an error message for each name, option or implied setting that is
        wrong
    """
    names = names_in_effect(sections, tables)
    implied, contradictions = _with_implied(sections, names, tables)
    complete, problems = _with_options(implied, names, tables)
    return complete, contradictions + problems


def _with_implied(
    sections: Mapping[str, dict[str, Any]], names: Mapping[str, Any], tables: Tables
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Add the settings that ``names`` imply; report settings that contradict a fixed value."""
    result = {name: dict(section) for name, section in sections.items()}
    problems = []
    for path, table in tables.items():
        name = names[path]
        spec = spec_of(table, name)
        for other, value in spec.implies.items() if spec else ():
            if may_be_unset(other):
                continue
            section, key = other.split(".")
            chosen = result.setdefault(section, {}).setdefault(key, value)
            is_user_code = isinstance(chosen, str) and re.fullmatch(USER_CODE, chosen) is not None
            is_fixed = spec.only is True or spec.only and other in spec.only and not is_user_code
            if chosen != value and is_fixed:
                problems.append(
                    f'{other} = {show(chosen)}: {path} = "{name}" means {other} = "{value}"; '
                    f"set {other}={value}, which replaces the value of the job, or choose another "
                    f"{path.split('.')[0]}"
                )
    return result, problems


def _with_options(
    sections: Mapping[str, dict[str, Any]], names: Mapping[str, Any], tables: Tables
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Add the defaults of the options of ``names``; report wrong names and options."""
    result = dict(sections)
    messages = []
    local_options = options_of(tables.get(LOCAL, {}), names[LOCAL])
    for path, table in tables.items():
        section = path.split(".")[0]
        others = [f"local.{key}" for key in local_options] if section == "algorithm" else []
        values = result.get(section, {})
        if path == LOCAL and (problems := _check_local(values, names, tables)) is not None:
            result[section] = values
        else:
            result[section], problems = check_name(
                path, names[path], values, SETTINGS[section], table, others
            )
            problems = [_mention_owners(problem, names[path], table) for problem in problems]
        messages += problems
    return result, messages


def owners(table: Table) -> dict[str, list[str]]:
    """Return, for each option of any name in a table, the names that have this option."""
    names: dict[str, list[str]] = {}
    for name in table:
        for option in options_of(table, name):
            names.setdefault(option, []).append(name)
    return names


def _mention_owners(problem: str, name: Any, table: Table) -> str:
    """Replace the end of a message about an unknown key if the key is an option of other names.

    A message that suggests a similar key stays unchanged.

    :param problem: an error message
    :param name: name in effect in the section, such as "parallel"
    :param table: all names of the section
    """
    path, separator, _ = problem.partition(": unknown key; ")
    # The options of all names are not read without need, because this takes long.
    if not separator or "did you mean" in problem:
        return problem
    having = owners(table).get(path.rpartition(".")[2], [])
    if not having:
        return problem
    listed = ", ".join(having[:4]) + (", …" if len(having) > 4 else "")
    return f'{path}: unknown key of "{name}", an option of {listed}; remove {path}'


def _check_local(
    values: Mapping[str, Any], names: Mapping[str, Any], tables: Tables
) -> list[str] | None:
    """Check that section `[local]` is empty if the algorithm has its own local step.

    :param values: keys and values of the section
    :param names: names in effect, by path
    :param tables: for each setting that holds a name, the table of its names
    :return: an error message for each problem; None if the section has to be checked like any
        other, because the algorithm takes the local step, or because the algorithm is not known
    """
    local = names[LOCAL]
    algorithm = names["algorithm.name"]
    algorithms = tables.get("algorithm.name", {})
    spec = spec_of(algorithms, algorithm)
    if local is not None and spec and LOCAL not in spec.implies:
        entries = {name: spec_of(algorithms, name) for name in algorithms}
        fitting = [name for name, entry in entries.items() if entry and LOCAL in entry.implies]
        return [
            f'local.name = {show(local)}: "{algorithm}" has its own local step; remove local.name, '
            f"or choose another algorithm.name: {', '.join(fitting)}"
        ]
    if local is None and (spec or is_user_code(str(algorithm))):
        return [
            f'local.{key}: algorithm "{algorithm}" has no separate local step with this option; '
            f"remove local.{key}, or set local.name"
            for key in values
            if key not in SETTINGS["local"]
        ]
    return None
