"""Start of a custom program: MPI, and torch's process groups inside a node."""

from __future__ import annotations

import atexit

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mpigossip.cluster import launcher, ranks
from mpigossip.cluster.process import TIMEOUT_S, report_unused
from mpigossip.cluster.process_groups import node_group
from mpigossip.config import JobError
from mpigossip.config.readable import note


class World(ranks.World):
    """The ranks of a custom program, with torch's process group and device mesh of a node."""

    def node_group(self, backend: str | None = None) -> ProcessGroup:
        """Return the torch process group of this rank's node, for DDP; collective.

        ``backend``: unset, "nccl" where there are GPUs, else "gloo". It is the world of
        torch.distributed, whose ranks are those in the node. JobError where that runs with others.
        """
        return node_group(self, backend or _backend(), self.timeout_s)

    def node_mesh(self, backend: str | None = None) -> DeviceMesh:
        """Return it as a DeviceMesh of one dimension, "node"; collective."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        group = self.node_group(backend)
        return DeviceMesh.from_group(group, device, mesh_dim_names=("node",))


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def world(timeout_s: float = TIMEOUT_S, ranks_per_node: int | str = 1) -> World:
    """Start MPI, unless it runs already, and join all ranks of the job; call it on every rank.

    Under a launcher (srun, mpirun) the world has its ranks; without one, a world of one.
    ``timeout_s`` limits waiting in ``barrier`` and ``agree``. LaunchError where MPI can't be
    loaded, or where several processes were started that MPI doesn't join.

    ``ranks_per_node``: 1, each rank is a node; "host", all ranks of a host are one; K, every K of
    a host are, and exchange a part of the model each. JobError on all ranks where hosts don't have
    the ranks for it.

    Where transformers, Lightning or Accelerate was imported before, the launcher's variables that
    they would misread are taken out of ``os.environ``, as
    :mod:`mpigossip.cluster.launcher` says.
    """
    if ranks_per_node != "host" and (not isinstance(ranks_per_node, int) or ranks_per_node < 1):
        raise JobError(
            [f'ranks_per_node = {ranks_per_node!r}: give 1, "host", or how many ranks of a host '
             "are a node"]
        )  # fmt: skip
    made = ranks.world(timeout_s, World)
    assert isinstance(made, World)
    made.arrange(ranks_per_node)
    hidden = launcher.hide()
    if made.nodes.count > 1 and made.rank == 0:
        atexit.register(report_unused, made.nodes.count)
    if hidden and made.rank == 0:
        text = f"{', '.join(hidden)} are hidden, so that frameworks see one process a rank"
        note(f"{text}; read them before mpigossip.world()")
    return made
