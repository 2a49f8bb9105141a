"""Where a user's own program begins."""

from __future__ import annotations

import sys

from mpigossip.cluster import apart, ranks
from mpigossip.cluster.process import TIMEOUT_S


def world(timeout_s: float = TIMEOUT_S) -> ranks.World:
    """Starts MPI, unless it runs already, and joins all ranks of the job; call it on every rank.

    Under a launcher (srun, mpirun) the world has its ranks; without one, a world of one.
    ``timeout_s`` limits waiting in ``barrier`` and ``agree``. LaunchError where MPI can't be
    loaded, or where several processes were started that MPI doesn't join.

    Where transformers, Lightning or Accelerate was imported before, the launcher's variables that
    they would misread are taken out of ``os.environ``: see :mod:`mpigossip.cluster.apart`.
    """
    made = ranks.world(timeout_s)
    hidden = apart.hide()
    if hidden and made.rank == 0:
        text = f"mpigossip: {', '.join(hidden)} are hidden, so that frameworks see one process a "
        print(f"{text}rank; read them before mpigossip.world()", file=sys.stderr, flush=True)
    return made
