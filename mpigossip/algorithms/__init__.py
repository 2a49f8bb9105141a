"""Algorithms by name: `build` builds an algorithm from the section `[algorithm]` of a job.

`BUILDERS` lists the names of algorithms, and `LOCALS` the names of local steps. Importing this
package does not import torch; the first use of a name in `_HOMES` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpigossip.algorithms.methods import BUILDERS, LOCALS, takes_local

if TYPE_CHECKING:
    from mpigossip.algorithms.base import Algorithm, Step
    from mpigossip.algorithms.by_name import build, over_wire

__all__ = ["BUILDERS", "LOCALS", "Algorithm", "Step", "build", "over_wire", "takes_local"]

_HOMES = {"Algorithm": "base", "Step": "base", "build": "by_name", "over_wire": "by_name"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
