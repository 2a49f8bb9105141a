"""What a user brings along: models, algorithms, data and hooks named "package.module:factory"."""

import importlib
import re
from collections.abc import Callable

from mpigossip.config.choices import OWN
from mpigossip.config.errors import JobError


def is_own(name: str) -> bool:
    """Whether a name in a job means something to import."""
    return re.fullmatch(OWN, name) is not None


def imported(setting: str, name: str, form: str) -> Callable:
    """The callable that "package.module:factory" names.

    `setting` and `form` (what it is called with and returns) are for the message. Raises JobError
    where it can't be imported, isn't there or can't be called.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise JobError(
            [f'{setting} = "{name}": {module} can\'t be imported ({error}); is its folder on '
             "PYTHONPATH?"]
        ) from error  # fmt: skip
    except AttributeError as error:
        raise JobError([f'{setting} = "{name}": {module} has no {attribute}']) from error
    if not callable(found):
        raise JobError(
            [f'{setting} = "{name}" is a {type(found).__name__}; it should be a function of {form}']
        )
    return found
