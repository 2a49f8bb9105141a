"""Names that a job can choose, their builders, and the check of the options of a builder.

A table maps each name to a `BuilderSpec` or to a builder. `load` receives one table for each
setting that holds a name, such as `{"graph.name": graphs.BUILDERS}`.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mpigossip.config.errors import JobError
from mpigossip.config.structure import structure
from mpigossip.config.toml import near, plain, show, unknown

USER_CODE = r"[A-Za-z_][\w.]*:\w+"
"""Pattern of a name of user code, "package.module:factory"."""
OPEN = {
    "graph.name": rf"file:.+|{USER_CODE}",
    "model.name": USER_CODE,
    "algorithm.name": USER_CODE,
    "task.name": USER_CODE,
    "data.source": USER_CODE,
}
"""Settings that also accept names outside their table, such as a graph from a file or user code,
with the pattern of those names. The options of such a name are checked when it is built."""
FILES = ("data.source",)
"""Settings that may also name a file; a file has no options."""
LOCAL = "local.name"
"""Setting of the local step. An algorithm that implies a value for it takes any local step; all
other algorithms have their own step."""

Table = Mapping[str, "BuilderSpec | Callable"]
"""Entry of each name that a setting may have."""
Tables = Mapping[str, Table]
"""Table of each setting that holds a name, by the setting, such as "graph.name"."""


@dataclass(frozen=True)
class BuilderSpec:
    """Entry of a table for one name: its builder, and what the name implies for other settings."""

    made_by: Callable | str
    """Builder, whose keyword-only parameters are the options of the name. A string
    "module:function" is imported when the builder is first used."""
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that the name implies for settings of later sections: "section.key" -> value. If the
    setting may be unset, as `local.name`, the job does not store the implied value: the setting
    stays unset, and the value is used in its place."""
    only: bool | Collection[str] = False
    """Settings of `implies` that may not have another value, because the algorithm would then be
    a different one; they may still name user code. True: all settings of `implies` are fixed, and
    user code is not allowed either. A setting that may be unset is never fixed."""
    follows: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Rules that compute options from the rest of the run if a job does not set them."""

    @classmethod
    def of(cls, table: Table, name: str) -> BuilderSpec:
        """Return the entry for ``name`` in ``table``.

        :param table: table that contains the name
        :param name: name in the table
        """
        builder = table[name]
        return builder if isinstance(builder, cls) else cls(builder)

    @property
    def build(self) -> Callable:
        """Builder of the name; if `made_by` is a string, it is imported now."""
        if callable(self.made_by):
            return self.made_by
        module, _, name = self.made_by.partition(":")
        return getattr(import_module(module), name)

    def following(self, options: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """Compute values for the options that a job leaves unset, by the rules in `follows`.

        :param options: options of the job, by name; an option of value None counts as unset
        :param context: argument that is passed to each rule
        :return: the computed values by option; if a rule returns None, its option is left out
        """
        unset = {key: rule for key, rule in self.follows.items() if options.get(key) is None}
        values = {key: rule(context) for key, rule in unset.items()}
        return {key: value for key, value in values.items() if value is not None}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.build(*arguments, **options)


def spec_of(table: Table, name: Any) -> BuilderSpec | None:
    """Return the entry of ``table`` for ``name``; None if there is no such entry."""
    return BuilderSpec.of(table, name) if isinstance(name, str) and name in table else None


def options_of(table: Table, name: Any) -> Collection[str]:
    """Return the names of the options of ``name``; () if ``name`` is not in the table."""
    spec = spec_of(table, name)
    return keyword_only(spec.build)[0] if spec else ()


def check_name(
    path: str,
    name: Any,
    values: Mapping[str, Any],
    setting_keys: Collection[str],
    table: Table,
    others: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Check the name at ``path`` and the options in its section.

    :param path: setting that holds the name, as "section.key"
    :param name: name in effect at this path
    :param values: keys and values of the section
    :param setting_keys: keys of the section that are not options
    :param table: table of the names
    :param others: settings of other sections, as "section.key", that messages about an unknown key
        may suggest
    :return: the values with the defaults of the options, and an error message for each problem
    """
    section, key = path.split(".")
    if not isinstance(name, str):
        return dict(values), []  # The type check of the section reports this problem.
    spec = spec_of(table, name)
    if spec is None:
        if re.fullmatch(OPEN.get(path, "(?!)"), name):
            return dict(values), []
        if path in FILES:
            return check_options(section, values, setting_keys, lambda: None)
        noun = section if key == "name" else key
        return dict(values), [f"{path} = {show(name)}: unknown {noun}; {near(name, table)}"]
    if key != "name" and path not in FILES:
        return dict(values), []  # Other settings that hold a name have no options.
    return check_options(section, values, setting_keys, spec.build, others)


def check_options(
    section: str,
    values: Mapping[str, Any],
    setting_keys: Collection[str],
    build: Callable,
    others: Collection[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Check the options in ``values`` against the keyword-only parameters of ``build``.

    Options are converted to the types of the annotations. Missing options get their defaults,
    unless the default is None, which TOML cannot express.

    :param section: name of the section, for error messages
    :param values: keys and values of the section
    :param setting_keys: keys of the section that are not options
    :param build: builder that takes the options
    :param others: settings of other sections, as "section.key", that messages about an unknown key
        may suggest
    :return: the values, with options converted and missing options added, and an error message for
        each problem; a value that cannot be converted is kept
    """
    parameters, accepts_any = keyword_only(build)
    complete = dict(values)
    messages: list[str] = []
    for key in [key for key in values if key not in setting_keys]:
        path = f"{section}.{key}"
        if key in parameters:
            annotation, default = parameters[key]
            try:
                shown_default = None if default is inspect.Parameter.empty else default
                complete[key] = structure(values[key], annotation, path, shown_default)
            except JobError as error:
                messages += error.messages
        elif not accepts_any:
            messages.append(unknown(path, [*setting_keys, *parameters], others))
    for key, (_, default) in parameters.items():
        if default is inspect.Parameter.empty:
            if key not in values:
                messages.append(f"{section}.{key} is not set: it has no default; write {key} = …")
        elif default is not None:
            complete.setdefault(key, plain(default))
    return complete, messages


def keyword_only(build: Callable) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Return the keyword-only parameters of ``build``, and whether it accepts any others (`**`).

    :param build: builder
    :return: for each parameter, by name, its annotation and its default
        (`inspect.Parameter.empty` if it has none); and true if ``build`` has a parameter `**kwargs`
    """
    try:
        hints = typing.get_type_hints(build, include_extras=True)
    except (NameError, TypeError):
        hints = {}  # Some annotations exist for type checkers only, so accept any type.
    parameters = inspect.signature(build).parameters.values()
    options = {
        p.name: (hints.get(p.name, Any), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY
    }
    return options, any(p.kind is p.VAR_KEYWORD for p in parameters)
