"""Train 20 steps on the ranks and compare the parameters with the simulator's."""

from __future__ import annotations

import time

import torch

from mpigossip.analysis.findings import Finding
from mpigossip.cluster.ranks import Alone
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.training import assemble

STEPS = 20
MOST = 64
"""Nodes that rank 0 simulates, at most."""
ROUNDING = 1e-5
"""Relative difference between a GPU's run and the simulator's, at most."""


def compared(world: World, devices: str, graph: str, timeout_s: float) -> Finding:
    """Train a small model on the ranks' nodes; collective, complete on rank 0."""
    n = world.nodes.count
    if n == 1:
        return Finding("training", "one node: there is no exchange to try")
    settings = [f"node.devices={devices}", f"node.ranks_per_node={world.nodes.per_node}"]
    settings += [f"graph.name={graph}", f"node.timeout_s={timeout_s}", "node.precision=fp32"]
    settings += ["data.batch=4", "run.epochs=1", "schedule.scale=none", "log.consensus_every=0"]
    job = assemble.load({"model": {"name": "mlp"}}, settings)
    begin = time.perf_counter()
    mine = _trained(job, world, n)
    seconds = time.perf_counter() - begin
    found = world.gather(mine if world.nodes.first else None)
    if found is None or n > MOST:
        text = f"{STEPS} steps; not compared, as more than {MOST} nodes aren't simulated here"
        return Finding("training", text)
    nodes = torch.cat([rows for rows in found if rows is not None])
    reference = _trained(job, Alone(), n)
    off = float((nodes - reference).double().norm() / reference.double().norm())
    exact = torch.equal(nodes, reference)
    text = f"{STEPS} steps of {n} nodes in {seconds:.1f} s, "
    data = {"seconds": seconds, "difference": off, "exact": exact}
    if exact or (off <= ROUNDING and not devices.startswith("cpu")):
        text += "bitwise identical to" if exact else f"within {off:.1e} of"
        return Finding("training", f"{text} the simulator", data=data)
    remedy = (
        f"the parameters differ from the simulator's by {off:.1e}: exchanges or sums are wrong "
        "here; try another MPI, or node.same_host=put"
    )
    return Finding("training", f"{text}another result than the simulator", "wrong", remedy, data)


def _trained(job: Job, world: World, n: int) -> torch.Tensor:
    """Parameters of the nodes in this process after some steps, (rows, P) on the CPU."""
    assembly = assemble.assemble(job, world, n)
    try:
        for _ in range(STEPS):
            assembly.trainer.step()
        replicas = assembly.trainer.replicas
        return torch.stack([replicas.flat.pack(row).cpu() for row in replicas.full[-1]])
    finally:
        assembly.close()
