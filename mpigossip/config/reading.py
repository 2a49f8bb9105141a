"""Conversion of TOML to a job and back, with all problems reported at once.

`load` reads the sections of a job from a file, a string or a dict, applies overrides, keeps the
valid values, adds all defaults that depend on names, and builds a `Job`. Each of these steps
returns new sections together with the problems that it found. `dump` writes a job as TOML, from
which `load` reads an equal job.
"""

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpigossip.config import packaged, stored_jobs, toml
from mpigossip.config.choices import LOCAL, Tables, options_of, spec_of
from mpigossip.config.defaults import (
    NAMES,
    Sections,
    keys_of,
    may_be_unset,
    names_in_effect,
    with_defaults,
)
from mpigossip.config.errors import JobError
from mpigossip.config.sections import SECTIONS, Job
from mpigossip.config.structure import structure
from mpigossip.config.toml import near, show


def load(
    source: Path | str | Mapping, overrides: Sequence[str] = (), tables: Tables | None = None
) -> Job:
    """Read a job, apply overrides, and check all settings.

    If an override changes the name in a section, the options of the old name are dropped. If it
    gives the section its first name, or changes the name that another section implies for it, the
    options of the implied name that the new name does not have are dropped. If the new name is an
    algorithm with its own local step, the section `[local]` is dropped, too, unless an override
    sets a key of it.

    :param source: path of a TOML file, name of an example, TOML text as a string of several lines,
        or a dict of sections. Such a text may be a stored job of an earlier version, whose former
        settings are removed or renamed
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
    overridden, override_problems = _apply_overrides(raw, overrides, tables)
    plain, value_problems = _plain_sections(overridden)
    complete, name_problems = with_defaults(plain, tables)
    messages = override_problems + value_problems + name_problems
    try:
        job = structure({n: _fold_options(n, s) for n, s in complete.items()}, Job)
    except JobError as error:
        raise JobError([*messages, *error.messages]) from None
    if list(job.schedule.milestones) != sorted(set(job.schedule.milestones)):
        messages.append(
            f"schedule.milestones = {show(job.schedule.milestones)}: must be in ascending order, "
            "each only once"
        )
    if messages:
        raise JobError(messages)
    return job


def read(source: Path | str | Mapping) -> dict[str, Any]:
    """Read the sections of a job without checking them.

    :param source: path of a TOML file, name of an example, TOML text as a string of several lines,
        or a dict of sections
    :return: the sections as new dicts, which the caller may change
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
                raise JobError(
                    f"{where} can't be read as text: {error}; give a TOML file"
                ) from None
        try:
            tables = tomllib.loads(str(text))
        except (ValueError, RecursionError) as error:
            hint = "strings need quotes, and names of sections need [brackets]"
            raise JobError(f"{where} is not TOML: {error}; {hint}") from None
    return {str(n): dict(t) if isinstance(t, Mapping) else t for n, t in tables.items()}


def _suggest_files(path: Path) -> str:
    """Return a clause that suggests job files from the folder of a ``path`` that does not exist.

    If the path is a name without a folder and a suffix, it also suggests the names of examples.
    """
    examples: Iterable[str] = ()
    if not path.suffix and not path.parent.name:
        with suppress(JobError):  # installed without examples
            examples = packaged.examples(packaged.EXAMPLES[:1])
    try:
        names = [file.name for file in path.parent.glob("*.toml")]
        return (
            near(path.name, names, examples) + "; `mpigossip examples` lists the installed examples"
        )
    except OSError:
        return "give the path of a TOML file"


def _apply_overrides(
    raw: Sections, overrides: Sequence[str], tables: Tables
) -> tuple[dict[str, Any], list[str]]:
    """Return sections with overrides applied, and without the options of names that they change.

    :param raw: sections as they were read
    :param overrides: strings "section.key=value"
    :param tables: for each setting that holds a name, the table of its names
    :return: new sections, and an error message for each override that does not have the form
        section.key=value
    """
    result = dict(raw)
    changed_paths = set()
    messages: list[str] = []
    for text in overrides:
        try:
            section, key, value = toml.parse_override(text)
        except JobError as error:
            messages += error.messages
            continue
        changed_paths.add(f"{section}.{key}")
        table = result.get(section, {})
        result[section] = {**table, key: value} if isinstance(table, dict) else table
    names_before = names_in_effect(raw, tables)
    names_after = names_in_effect(result, tables)
    before = _chosen_names(raw, names_before)
    after = _chosen_names(result, names_after)
    for section in before:
        table = result.get(section)
        if before[section] != after[section] and isinstance(table, dict):
            result[section] = {
                key: value
                for key, value in table.items()
                if key in _keys(section) or f"{section}.{key}" in changed_paths
            }
    for section, path in NAMES.items():
        table = result.get(section)
        is_changed = path in changed_paths or names_before[path] != names_after[path]
        if is_changed and section not in before and isinstance(table, dict):
            # The file does not name what has these options: it is implied, as diloco implies cpsgd.
            table_of_names = tables.get(path, {})
            implied = options_of(table_of_names, names_before[path])
            known = {*_keys(section), *options_of(table_of_names, names_after[path])}
            # Unknown keys stay, so that they are reported.
            dropped = {*implied} - known
            result[section] = {
                key: value
                for key, value in table.items()
                if key not in dropped or f"{section}.{key}" in changed_paths
            }
    sets_local = any(path.startswith("local.") for path in changed_paths)
    spec = spec_of(tables.get("algorithm.name", {}), after.get("algorithm"))
    if "algorithm.name" in changed_paths and not sets_local and spec and LOCAL not in spec.implies:
        result.pop("local", None)  # the local step is part of the new algorithm
    return result, messages


def _chosen_names(sections: Sections, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the name of each section that has options, by section.

    A section that gives no name is left out. If the setting of its name may be unset, the section
    is included with the name in effect.

    :param sections: sections of a job
    :param names: names in effect, by path
    """
    return {
        section: names[path]
        for section, path in NAMES.items()
        if path.split(".")[1] in keys_of(sections, section) or may_be_unset(path)
    }


def _plain_sections(raw: Sections) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the known sections with their valid values, and error messages for all others."""
    sections = {}
    messages = [
        f"{name}: unknown section; {near(name, SECTIONS)}" for name in raw if name not in SECTIONS
    ]
    if {"job", "grid"} <= raw.keys():
        messages = ["this file describes a study, and not a job: run it by `mpigossip study FILE`"]
    for name in [name for name in raw if name in SECTIONS]:
        sections[name], problems = toml.plain_table(name, raw[name])
        messages += problems
    return sections, messages


def as_dict(job: Job) -> dict[str, dict[str, Any]]:
    """Convert a job to a dict of sections, in which options are keys like the settings."""
    tables = {}
    for name, cls in SECTIONS.items():
        section = getattr(job, name)
        table = {f.name: getattr(section, f.name) for f in fields(cls)}
        tables[name] = table | table.pop("options", {})
    return tables


def dump(job: Job, sections: Collection[str] = tuple(SECTIONS)) -> str:
    """Write a job as TOML, such that `load(dump(job)) == job` if all sections are written.

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
    """Return the names of the fields of a section's dataclass, which may include "options"."""
    return {f.name for f in fields(SECTIONS[section])}


def _fold_options(name: str, section: dict[str, Any]) -> dict[str, Any]:
    """Move keys for which the section's dataclass has no field to its field `options`, if any."""
    if "options" not in _keys(name):
        return section
    fields_of_section = _keys(name) - {"options"}
    folded = {key: value for key, value in section.items() if key in fields_of_section}
    return folded | {"options": {k: v for k, v in section.items() if k not in fields_of_section}}
