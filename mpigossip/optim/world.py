"""Start of MPI for a custom program."""

import atexit

from mpigossip.cluster import launcher, mpi_world
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.cluster.process import TIMEOUT_S, report_unused
from mpigossip.config import JobError
from mpigossip.config.readable import print_note


def world(timeout_s: float = TIMEOUT_S, ranks_per_node: int | str = 1) -> MPIWorld:
    """Start MPI, unless it runs already, and join all ranks of the job; call it on every rank.

    Under a launcher (srun, mpirun) the world has the launcher's ranks; otherwise it has this
    process only. The function changes the following in the process; all but the last are undone
    when the world closes:

    * If transformers, Lightning or Accelerate has been imported, variables of the launcher that
      they would misread are removed from ``os.environ``.
    * The interpreter's thread switch interval is shortened, because waits need threads to be
      switched within 0.1 ms.
    * ``sys.exit`` is replaced by a function that stores the exit status and calls the original
      function, because other ranks that wait for this rank exit with the same status.

    :param timeout_s: seconds that each wait for other ranks may take, also in `Averager`, and in
        `Gossip` unless that is given ``timeout_s``
    :param ranks_per_node: 1: each rank is a node; "host": all ranks of a host form a node; K: each
        K consecutive ranks of a host form a node, in which each rank exchanges a shard of the model
    :raises LaunchError: if MPI cannot be loaded, or does not join the processes that were started
    :raises JobError: if ``ranks_per_node`` is invalid; on all ranks, if the ranks of a host cannot
        be grouped into nodes like this
    """
    if ranks_per_node != "host" and (not isinstance(ranks_per_node, int) or ranks_per_node < 1):
        raise JobError(
            f'ranks_per_node = {ranks_per_node!r}: must be 1, "host", or the number of ranks of a '
            "host that form a node"
        )
    opened = mpi_world.open_world(timeout_s)
    opened.group_into_nodes(ranks_per_node)
    hidden = launcher.hide()
    if opened.nodes.count > 1 and opened.rank == 0:
        atexit.register(report_unused, opened.nodes.count)
    opened.after_close.callback(launcher.restore, hidden)
    of_torch = [name for name in hidden if name in launcher.TORCH]
    if of_torch and opened.rank == 0:
        text = f"{', '.join(of_torch)} are hidden, so that frameworks see one process per rank"
        print_note(f"{text}; read them before mpigossip.world()")
    return opened
