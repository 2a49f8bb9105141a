"""Train PyTorch models across the nodes of a supercomputer by averaging with neighbours.

A custom loop needs three names only: `world()`, `Gossip` and `graph()`. `Averager` is the exchange
alone, for arrays, and `Window` the one-sided exchange of arrays; `join()` trains as one of several
programs that may join and leave at any time; `study()` simulates grids of jobs. Importing the
package imports nothing else: torch, MPI and numpy are imported when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpigossip.graphs import graph
    from mpigossip.mixing.arrays.averager import Averager
    from mpigossip.mixing.arrays.window import Window
    from mpigossip.optim.gossip import Gossip
    from mpigossip.optim.join import join
    from mpigossip.optim.world import world
    from mpigossip.studies import study

__version__ = "0.2.0"
__all__ = ["Averager", "Gossip", "Window", "graph", "join", "study", "world"]

_HOMES = {
    "Averager": "mpigossip.mixing.arrays.averager",
    "Gossip": "mpigossip.optim.gossip",
    "Window": "mpigossip.mixing.arrays.window",
    "graph": "mpigossip.graphs",
    "join": "mpigossip.optim.join",
    "study": "mpigossip.studies",
    "world": "mpigossip.optim.world",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
