"""Conversion of TOML to a job and back, with all problems reported at once.

`load` reads a file, a string or a dict and applies overrides. `dump` writes the complete job as
TOML, so that `load(dump(job)) == job`.
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpigossip.config import packaged, stored_jobs, toml
from mpigossip.config.choices import FILES, Tables, apply_implied, check, options_of, spec_of
from mpigossip.config.errors import JobError
from mpigossip.config.sections import SECTIONS, AlgorithmSection, Job
from mpigossip.config.structure import structure
from mpigossip.config.toml import near, show
from mpigossip.config.user_code import is_user_code


def load(
    source: Path | str | Mapping, overrides: Sequence[str] = (), tables: Tables | None = None
) -> Job:
    """Read a job, apply overrides, and check all settings.

    If an override changes the name in a section, the options of the old name are dropped. If the
    new name is an algorithm with its own local step, the section `[local]` is dropped, too.

    :param source: path of a TOML file, name of an example, TOML text as a string of several lines,
        or a dict of sections
    :param overrides: strings "section.key=value"; a value is TOML or a bare word, and `none`
        unsets a setting that may be unset
    :param tables: for some settings that hold a name, the table of their names (see `choices`).
        Further keys in the section of such a setting are the keyword-only parameters of the name's
        builder. Their defaults are added to the job unless they are None, as are the settings that
        the name implies for other sections. None: names and options are not checked
    :raises JobError: if there are user errors; the message lists all of them
    """
    tables = tables or {}
    raw = read(source)
    if isinstance(source, str) and "\n" in source:
        raw = stored_jobs.update(raw)
    messages = _override(raw, overrides, tables)
    sections = {name: value for name, value in raw.items() if name in SECTIONS}
    unknown = [name for name in raw if name not in SECTIONS]
    messages += [f"{name}: unknown section; {near(name, SECTIONS)}" for name in unknown]
    for name, section in list(sections.items()):
        sections[name], problems = toml.plain_table(name, section)
        messages += problems
    messages += apply_implied(sections, tables, local_in_effect(sections, tables))
    messages += _check_names(sections, tables)
    try:
        job = structure({n: _fold_options(n, s) for n, s in sections.items()}, Job)
    except JobError as error:
        raise JobError([*messages, *error.messages]) from None
    if list(job.schedule.milestones) != sorted(set(job.schedule.milestones)):
        messages.append(
            f"schedule.milestones = {show(job.schedule.milestones)}: must be in ascending order"
        )
    if messages:
        raise JobError(messages)
    return job


def read(source: Path | str | Mapping) -> dict[str, Any]:
    """Read the sections of a job without checking them.

    :param source: path of a TOML file, name of an example, TOML text as a string of several lines,
        or a dict of sections
    :return: a copy of the sections, which may be changed
    :raises JobError: if the file cannot be read or is not TOML
    """
    if isinstance(source, Mapping):
        tables = dict(source)
    else:
        where = "the job"
        text = source
        if isinstance(source, Path) or "\n" not in source:
            where = f'job file "{source}"'
            path = packaged.given(source)
            try:
                text = path.read_text("utf-8-sig")
            except FileNotFoundError:
                raise JobError(f"{where}: no such file; {_suggest_files(path)}") from None
            except (OSError, ValueError) as error:
                raise JobError(f"{where} can't be read as text: {error}") from None
        try:
            tables = tomllib.loads(str(text))
        except (ValueError, RecursionError) as error:
            hint = "strings need quotes, and names of sections need [brackets]"
            raise JobError(f"{where} is not TOML: {error}; {hint}") from None
    return {str(n): dict(t) if isinstance(t, Mapping) else t for n, t in tables.items()}


def _suggest_files(path: Path) -> str:
    """Suggest job files from the folder of a ``path`` that does not exist."""
    try:
        names = [file.name for file in path.parent.glob("*.toml")]
        return near(path.name, names) + "; `mpigossip examples` lists the installed examples"
    except OSError:
        return "give the path of a TOML file"


def _override(raw: dict[str, Any], overrides: Sequence[str], tables: Tables) -> list[str]:
    """Apply overrides to `raw`, and remove the options of names that they change."""
    before = _names(raw, tables)
    changed_paths = set()
    messages = list[str]()
    for text in overrides:
        path, problems = toml.override(raw, text)
        changed_paths.add(path)
        messages += problems
    after = _names(raw, tables)
    for section in before.keys() & SECTIONS.keys():
        keys = _keys(section)
        if "options" in keys and before[section] != after[section]:
            unaffected = {f"{section}.{key}" for key in keys} | changed_paths
            table = raw[section] if isinstance(raw.get(section), dict) else {}
            for key in [key for key in table if f"{section}.{key}" not in unaffected]:
                del table[key]
    spec = spec_of(tables.get("algorithm.name", {}), _algorithm(raw))
    algorithm_changed = "algorithm.name" in changed_paths and not any(
        path.startswith("local.") for path in changed_paths
    )
    if algorithm_changed and spec and spec.local is None:
        raw.pop("local", None)  # the local step is part of the new algorithm
    return messages


def _names(raw: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    keys = {path.split(".")[0]: path.split(".")[1] for path in FILES}
    names = {
        section: table[key]
        for section, table in raw.items()
        if isinstance(table, dict) and (key := keys.get(section, "name")) in table
    }
    return names | {"local": local_in_effect(dict(raw), tables)}


def _check_names(sections: dict[str, dict[str, Any]], tables: Tables) -> list[str]:
    """Check names and options against the tables, and add the defaults of options."""
    messages = []
    for path, table in tables.items():
        section, key = path.split(".")
        if section == "local":
            messages += check_local(sections, tables)
            continue
        defaults = {f.name: f.default for f in fields(SECTIONS[section]) if f.name != "options"}
        values = sections.setdefault(section, {})
        others = local_options(sections, tables) if section == "algorithm" else []
        messages += check(path, values.get(key, defaults[key]), values, defaults, table, others)
    return messages


def as_dict(job: Job) -> dict[str, dict[str, Any]]:
    """Convert a job to a dict of sections, in which options are keys like the settings."""
    tables = {}
    for name, cls in SECTIONS.items():
        section = getattr(job, name)
        table = {f.name: getattr(section, f.name) for f in fields(cls)}
        tables[name] = table | table.pop("options", {})
    return tables


def dump(job: Job, sections: Collection[str] = tuple(SECTIONS)) -> str:
    """Write a complete job as TOML, such that `load(dump(job)) == job`.

    :param job: job to write
    :param sections: names of the sections to write; default: all sections
    :return: TOML in which unset settings are comments
    """
    lines = []
    for name, table in as_dict(job).items():
        if name not in sections:
            continue
        lines += [f"[{name}]"]
        for key, value in table.items():
            unset = value is None and key in _keys(name)
            line = f"{toml.write_key(key)} = {toml.write(value)}"
            lines += [f"# {key} is not set" if unset else line]
        lines += [""]
    return "\n".join(lines)


def _keys(section: str) -> set[str]:
    return {f.name for f in fields(SECTIONS[section])}


def _fold_options(name: str, section: dict[str, Any]) -> dict[str, Any]:
    """Move the keys that the section's dataclass lacks into `options`, if it has that field."""
    if "options" not in _keys(name):
        return section
    fields_of_section = _keys(name) - {"options"}
    folded = {key: value for key, value in section.items() if key in fields_of_section}
    return folded | {"options": {k: v for k, v in section.items() if k not in fields_of_section}}


def local_in_effect(sections: dict[str, Any], tables: Tables) -> Any:
    """Return the name of the local step: the job's, or the default of its algorithm, or None."""
    name = _table(sections, "local").get("name")
    if name not in (None, "none"):
        return name
    spec = spec_of(tables.get("algorithm.name", {}), _algorithm(sections))
    return spec.local if spec else None


def local_options(sections: dict[str, Any], tables: Tables) -> list[str]:
    """Return the options of the local step in effect, as "local.key"."""
    name = local_in_effect(sections, tables)
    return [f"local.{key}" for key in options_of(tables.get("local.name", {}), name)]


def check_local(sections: dict[str, Any], tables: Tables) -> list[str]:
    """Check the local step and its options, and add the defaults of the options.

    :param sections: sections of the job, which are changed in place
    :param tables: tables of names, with "algorithm.name" and "local.name" among them
    :return: an error message for each problem
    """
    values = sections.setdefault("local", {})
    algorithms = tables["algorithm.name"]
    keys = _keys("local") - {"options"}
    name = local_in_effect(sections, tables)
    algorithm = _algorithm(sections)
    spec = spec_of(algorithms, algorithm)
    with_local = [key for key in algorithms if (entry := spec_of(algorithms, key)) and entry.local]
    if name is not None and spec and spec.local is None:
        return [
            f'local.name = {show(name)}: "{algorithm}" has its own local step; leave it out, or '
            f"choose another algorithm: {', '.join(with_local)}"
        ]
    if name is None and (spec or is_user_code(str(algorithm))):
        return [
            f'local.{key}: algorithm "{algorithm}" has no separate local step with this option; '
            "leave it out, or set local.name"
            for key in values.keys() - keys
        ]
    return check("local.name", name, values, keys, tables["local.name"])


def _algorithm(sections: dict[str, Any]) -> Any:
    return _table(sections, "algorithm").get("name", AlgorithmSection.name)


def _table(sections: dict[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name, {})
    return section if isinstance(section, dict) else {}
