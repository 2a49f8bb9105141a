"""JSON Schema of job files, by which editors complete and check settings during typing.

The schema is derived from the sections and from the tables of names. It checks types, choices and
most limits. Some conditions need the whole job, or depend on the machine: only the commands check
those.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal

from mpigossip.config.choices import OPEN, USER_CODE, BuilderSpec, Tables, keyword_only
from mpigossip.config.defaults import NAMES
from mpigossip.config.sections import SECTIONS

DRAFT = "http://json-schema.org/draft-07/schema#"
"""Version of JSON Schema that editors for TOML support."""
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
UNSET = "none"
"""Value in a job file of a setting that is not set, because TOML has no null."""


def job_schema(tables: Tables) -> dict[str, Any]:
    """Return the JSON Schema of a job file.

    :param tables: for each setting that holds a name, such as "graph.name", the table of its names
    """
    sections = {name: section_schema(name, tables) for name in SECTIONS}
    return {
        "$schema": DRAFT,
        "title": "mpigossip job",
        "type": "object",
        "properties": sections,
        "additionalProperties": False,
    }


def section_schema(section: str, tables: Tables) -> dict[str, Any]:
    """Return the schema of one section, with the options of all names of this section.

    A section that names user code may have any options. Otherwise, each name of the table allows
    its own options only, and a missing or other name allows the options of all names.

    :param section: name of the section
    :param tables: for each setting that holds a name, the table of its names
    """
    cls = SECTIONS[section]
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = field_docs(cls)
    properties: dict[str, Any] = {}
    for field in fields(cls):
        if field.name == "options":
            continue
        schema = type_schema(hints[field.name])
        schema["description"] = docs[field.name]
        if field.default is not MISSING and field.default is not None:
            schema["default"] = field.default
        table = tables.get(f"{section}.{field.name}")
        if table is not None:
            accepts = [{"enum": sorted(table)}, _names_outside(f"{section}.{field.name}")]
            schema["anyOf"] = [choice for choice in accepts if choice]
        properties[field.name] = schema
    title = (inspect.getdoc(cls) or "").splitlines()[0]
    result = {"type": "object", "description": title, "properties": properties}
    path = NAMES.get(section, "")
    if path not in tables:
        return result | {"additionalProperties": False}
    return result | _options_schema(path.split(".")[1], tables[path], properties)


def _names_outside(path: str) -> dict[str, Any]:
    """Return the schema of those values of the setting ``path`` that its table does not contain."""
    if path == "data.source":
        return {"type": "string"}  # the path of a file
    return {"type": "string", "pattern": f"^({OPEN[path]})$"} if path in OPEN else {}


def _options_schema(
    key: str, table: Mapping[str, Any], properties: dict[str, Any]
) -> dict[str, Any]:
    """Add the options of all names to ``properties``; return the schema that restricts them.

    The schema allows an option only for names that have it.

    :param key: setting that holds the name
    :param table: table of the names
    :param properties: schema of each setting of the section, which is changed in place
    """
    settings = set(properties)
    conditions = []
    for name in table:
        parameters, accepts_any = keyword_only(BuilderSpec.of(table, name).build)
        options = {}
        for option, (hint, default) in parameters.items():
            guess = hint
            if hint is Any and default not in (None, inspect.Parameter.empty):
                guess = type(default)
            options[option] = type_schema(guess)
            properties.setdefault(option, {"description": f"Option of some `{key}`s."})
        then: dict[str, Any] = {"properties": options}
        if not accepts_any:
            then["propertyNames"] = {"enum": sorted(settings | set(options))}
        conditions.append({"if": _has_name(key, {"const": name}), "then": then})
    # Without a name, the valid options depend on a default that depends on other sections.
    known = {"propertyNames": {"enum": sorted(properties)}}
    user_code = {"pattern": f"^{USER_CODE}$"}
    conditions.append({"if": _has_name(key, user_code), "then": {}, "else": known})
    return {"allOf": conditions}


def _has_name(key: str, condition: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a section that has the setting ``key`` with a permitted value.

    :param key: setting that holds the name
    :param condition: schema of the permitted values
    """
    return {"properties": {key: condition}, "required": [key]}


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the schema of a type annotation; for an unknown type, the schema of any value."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        (limit,) = hint.__metadata__
        return type_schema(hint.__origin__) | dict(limit.schema)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [type_schema(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object"}
    if origin is tuple:
        return {"type": "array", "items": type_schema(arguments[0])}
    if hint is type(None):
        return {"const": UNSET}
    return {"type": TYPES[hint]} if hint in TYPES else {}


def field_docs(cls: type) -> dict[str, str]:
    """Return, by field of a dataclass, the docstring below the field, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for line, text in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(line, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        assert isinstance(line.target, ast.Name)
        assert isinstance(text.value, ast.Constant)
        docs[line.target.id] = " ".join(str(text.value.value).split())
    return docs
