"""User code: models, algorithms, data and hooks named "package.module:factory"."""

import importlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpigossip.config.choices import OWN
from mpigossip.config.errors import JobError, UserError


def is_user_code(name: str) -> bool:
    """Return whether a name in a job is something to import."""
    return re.fullmatch(OWN, name) is not None


MISSING = object()


def import_object(setting: str, name: str, form: str) -> Callable:
    """The callable that "package.module:factory" names.

    `setting` and `form` (what it is called with and returns) are for the message. Raises JobError
    where it can't be imported, isn't there or can't be called.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, MISSING)
    except ImportError as error:
        raise JobError(
            f'{setting} = "{name}": {module} can\'t be imported ({error}); is its folder on '
            "PYTHONPATH?"
        ) from error
    except PermissionError:
        raise  # the command line has a remedy
    except (Exception, SystemExit) as error:
        raise JobError(f'{setting} = "{name}": {describe_exception(error)}') from error
    if found is MISSING:
        raise JobError(f'{setting} = "{name}": {module} has no {attribute}')
    if not callable(found):
        raise JobError(
            f'{setting} = "{name}" is a {type(found).__name__}; it should be a function of {form}'
        )
    return found


def parameters(make: Callable) -> tuple[set[str], set[str]]:
    """Names of the parameters that can be given by name, and of those that have no default."""
    try:
        found = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # made in C: says nothing
        return set(), {"?"}
    named = [p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name for p in named}, {p.name for p in named if p.default is p.empty}


def call_factory(
    make: Callable, known: Mapping[str, Any], options: Mapping[str, Any], otherwise: tuple = ()
) -> Any:
    """Call a user's factory with its options, and of `known` what its parameters name.

    Where it can't be called so, `otherwise` goes before the options (by default all that is known);
    if that is wrong, too, Python says what is missing.
    """
    names, needed = parameters(make)
    if needed <= known.keys() | options.keys():
        named = {name: value for name, value in known.items() if name in names}
        return make(**{**named, **options})
    return make(*(otherwise or known.values()), **options)


def build_checked(
    setting: str, name: str, kind: type, make: Callable, *given: Any, **options: Any
) -> Any:
    """Return the `kind` that a user's factory makes; JobError where it doesn't."""
    try:
        found = make(*given, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        told = f" with the options {options}" if options else ""
        raise JobError(f'{setting} = "{name}"{told}: {describe_exception(error)}') from error
    if not isinstance(found, kind):
        what = f"returned {type(found).__name__}; it should return a"
        raise JobError(f'{setting}: "{name}" {what} {kind.__module__}.{kind.__qualname__}')
    return found


def describe_exception(error: BaseException) -> str:
    """Describe an exception of user code in a sentence, with the innermost line of that code."""
    frame = user_frame(error)
    where = f" at {frame.filename}:{frame.lineno}" if frame else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{where}: {text[:300] or 'without a word'}"


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost place in user code that an exception came through, if there is one."""
    # this package, Python's own modules, and what is installed
    places = sysconfig.get_path("stdlib"), sysconfig.get_path("scripts")
    others = [*places, str(Path(__file__).parents[1]), str(Path(os.__file__).parent)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = "site-packages" in path.parts or any(map(path.is_relative_to, others))
        if not installed and not frame.filename.startswith("<frozen "):
            return frame
    return None
