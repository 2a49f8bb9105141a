"""User code that a job names as "package.module:factory", such as a model, data or a hook."""

import importlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpigossip.config.choices import USER_CODE
from mpigossip.config.errors import JobError, UserError


def is_user_code(name: str) -> bool:
    """Return whether a name in a job names user code."""
    return re.fullmatch(USER_CODE, name) is not None


MISSING = object()
"""Value that stands for an attribute that a module lacks."""


def import_object(setting: str, name: str, form: str) -> Callable:
    """Import a callable of the user.

    :param setting: setting that holds the name, for error messages
    :param name: "package.module:factory"
    :param form: arguments and return value of the callable, for error messages
    :raises JobError: if the module cannot be imported or lacks the name, or if the object is not
        callable
    :raises PermissionError: if this user may not read a file of the module
    """
    module, _, attribute = name.partition(":")
    try:
        imported = getattr(importlib.import_module(module), attribute, MISSING)
    except ImportError as error:
        raise JobError(
            f'{setting} = "{name}": {module} can\'t be imported ({error}): check that its folder '
            "is in PYTHONPATH"
        ) from error
    except PermissionError:
        raise  # The command-line program adds a remedy to the message.
    except (Exception, SystemExit) as error:
        raise JobError(f'{setting} = "{name}": {describe_exception(error)}') from error
    if imported is MISSING:
        raise JobError(
            f'{setting} = "{name}": {module} has no {attribute}: define it there, or correct the '
            "name"
        )
    if not callable(imported):
        raise JobError(
            f'{setting} = "{name}" is of type {type(imported).__name__}; it must be a '
            f"function of {form}"
        )
    return imported


def parameters(make: Callable) -> tuple[set[str], set[str]]:
    """Return the names of the parameters of ``make`` that can be passed by name.

    :param make: function or class
    :return: names of all these parameters, and names of the parameters among them without a
        default; if the signature is not known, the first set is empty and the second is {"?"}
    """
    try:
        signature = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # Functions in C may have no signature.
        return set(), {"?"}
    named = [p for p in signature if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name for p in named}, {p.name for p in named if p.default is p.empty}


def call_factory(
    make: Callable, values: Mapping[str, Any], options: Mapping[str, Any], otherwise: tuple = ()
) -> Any:
    """Call a factory of the user with the options of a job, and with the values that it takes.

    If a parameter without a default is neither in ``values`` nor in ``options``, the factory is
    called with positional arguments instead. If these do not fit either, Python's TypeError is
    raised.

    :param make: factory
    :param values: values by name; a value is passed if the factory has a parameter of this name
    :param options: options of the job, which are always passed by name
    :param otherwise: positional arguments of the second kind of call; if empty, all ``values``
    """
    names, needed = parameters(make)
    if needed <= values.keys() | options.keys():
        accepted = {name: value for name, value in values.items() if name in names}
        return make(**{**accepted, **options})
    return make(*(otherwise or values.values()), **options)


def build_checked(
    setting: str, name: str, kind: type, make: Callable, *arguments: Any, **options: Any
) -> Any:
    """Call a factory of the user and check the type of its result.

    :param setting: setting that names the factory, for error messages
    :param name: "package.module:factory"
    :param kind: required type of the result
    :param make: function that calls the factory
    :param arguments: positional arguments of ``make``
    :param options: keyword arguments of ``make``
    :raises JobError: if the factory raises an exception, or returns an object of another type
    :raises UserError: unchanged, if the factory raises it
    """
    try:
        result = make(*arguments, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        with_options = f" with the options {options}" if options else ""
        raise JobError(
            f'{setting} = "{name}"{with_options}: {describe_exception(error)}'
        ) from error
    if not isinstance(result, kind):
        raise JobError(
            f'{setting} = "{name}" returned {type(result).__name__}; it must return a '
            f"{kind.__module__}.{kind.__qualname__}"
        )
    return result


def describe_exception(error: BaseException) -> str:
    """Return the type of an exception, its innermost line of user code, and its message, in a line.

    Without user code in the traceback, there is no line number. At most 300 characters of the
    message are included.
    """
    frame = user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{where}: {text[:300] or 'no message'}"


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of user code in an exception's traceback; None without one."""
    # Frames of the standard library, of scripts and of this package are not user code.
    standard = sysconfig.get_path("stdlib"), sysconfig.get_path("scripts")
    excluded = [*standard, str(Path(__file__).parents[1]), str(Path(os.__file__).parent)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = "site-packages" in path.parts or any(map(path.is_relative_to, excluded))
        if not is_installed and not frame.filename.startswith("<frozen "):
            return frame
    return None
