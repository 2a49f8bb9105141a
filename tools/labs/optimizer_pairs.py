"""Every method through `mpigossip.Gossip`, against a simulation: equal bits, or a refusal in words.

    mpirun -n 3 python tools/labs/optimizer_pairs.py          # everything
    mpirun -n 3 python tools/labs/optimizer_pairs.py --pairs  # pairwise

Rank 0 prints a line a combination, and ends with 1 where bits differ. Asynchronous ones have no
bits to compare with: they have to end, with finite parameters.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Iterator

import torch

import mpigossip
from mpigossip import algorithms
from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.engine.module import Parameters
from mpigossip.engine.step import Engine
from mpigossip.groups.base import Single
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Layout
from mpigossip.optim.inner import check_plain_sgd, decay, local_step_from_optimizers
from mpigossip.optim.settings import settings
from mpigossip.training import assemble

STEPS = 6
OPTIMIZERS = ("SGD", "AdamW")
MIXERS = ("synchronous", "asynchronous")
WIRES = ("fp32", "bf16", "qsgd", "sign", "top-k", "random-k")
AXES = (tuple(algorithms.BUILDERS), OPTIMIZERS, MIXERS, WIRES)
OPTIONS: dict[str, dict] = {
    **{name: {"graph": "ring"} for name in ("decentlam", "choco")},
    **{name: {"period": 2} for name in ("cpsgd", "gossip-pga", "slowmo", "diloco", "noloco")},
    "adpsgd": {"period": 2, "total": STEPS},
}
"""What a method needs to meet within few steps."""


def model(node: int) -> torch.nn.Module:
    """A network whose first values are the node's own."""
    torch.manual_seed(node)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def optimizer(name: str, made: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, of which one has weight decay."""
    first, *others = made.parameters()
    groups = [{"params": [first], "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return getattr(torch.optim, name)(groups, lr=0.05)


def backward(made: torch.nn.Module, node: int, step: int) -> None:
    """A gradient from the node's data of this step."""
    draw = torch.Generator().manual_seed(1000 * node + step)
    made.zero_grad()
    made(torch.randn(8, 6, generator=draw)).square().mean().backward()


def through_the_door(world, name: str, inner: str, mixer: str, wire: str) -> torch.Tensor:
    """This node's parameters after the steps; JobError where it is rejected."""
    made = model(world.rank)
    gossip = mpigossip.Gossip(
        world, made, optimizer(inner, made), name, wire=wire, mixer=mixer, seed=3,
        **OPTIONS.get(name, {}),
    )  # fmt: skip
    for step in range(STEPS):
        backward(made, world.rank, step)
        gossip.step()
    world.barrier()
    gossip.close()
    return torch.cat([p.detach().reshape(-1) for p in made.parameters()])


class Many(Alone):
    """A world of n nodes in this process."""

    def __init__(self, n: int):
        """``n``: nodes."""
        super().__init__()
        self.size = n


def simulated(n: int, name: str, inner: str, wire: str) -> list[torch.Tensor]:
    """All nodes' parameters by the same engine, over rows and the simulator's mixer."""
    options = dict(OPTIONS.get(name, {}))
    job, graph = settings(
        Many(n), "cpu", name, options.pop("graph", None), None, wire, "synchronous",
        None, options | {"seed": 3},
    )  # fmt: skip
    models = [model(node) for node in range(n)]
    inners = [optimizer(inner, made) for made in models]
    vector = Parameters(models)
    method = assemble.make_method(job, 0, graph, local_step_from_optimizers(vector, inners))
    widths = vector.flat.widths
    layout = Layout(widths, method.vectors, method.scalars, ("cpu",), assemble.make_wire(job))
    mixer = open_mixer(graph, layout, Alone())
    vector.x[0][1:] = vector.x[0][:1]  # all begin with node 0's model
    cadence = assemble.make_cadence(job, method, graph)
    engine = Engine(mixer, Single(), vector, [method], cadence)
    for step in range(STEPS):
        for node, made in enumerate(models):
            backward(made, node, step)
        with torch.no_grad():
            if not method.raw:
                vector.gather()
                for node in range(n) if not algorithms.takes_local(name) else ():
                    decay(vector, inners[node], node)
            engine.step(0.05)
    return [torch.cat([p.detach().reshape(-1) for p in made.parameters()]) for made in models]


def outcome(world, *case: str) -> str:
    """One combination's line; collective."""
    name, inner, mixer, wire = case
    try:
        mine = through_the_door(world, *case)
    except JobError as refusal:
        return f"refused: {refusal}".splitlines()[0]
    rows = world.gather(mine)
    if rows is None:
        return ""
    if mixer == "asynchronous":
        return "ends" if all(row.isfinite().all() for row in rows) else "WRONG: not finite"
    there = simulated(world.size, name, inner, wire)
    same = all(map(torch.equal, rows, there))
    return "equal bits" if same else "WRONG: other bits than simulated"


def refusal(n: int, name: str, inner: str, mixer: str, wire: str) -> str | None:
    """What `Gossip` says to n nodes, without MPI."""
    options = dict(OPTIONS.get(name, {}))
    try:
        settings(Many(n), "cpu", name, options.pop("graph", None), None, wire, mixer, None, options)
        if not algorithms.takes_local(name):
            check_plain_sgd(name, optimizer(inner, model(0)))
    except JobError as error:
        return str(error)
    return None


def pairs(n: int) -> list[tuple[str, ...]]:
    """Few of the combinations that are taken, in which all their pairs of two values occur."""
    every = [case for case in itertools.product(*AXES) if refusal(n, *case) is None]
    missing = {pair for case in every for pair in _pairs(case)}
    chosen = []
    while missing:
        best = max(every, key=lambda case: len(missing & set(_pairs(case))))
        chosen.append(best)
        missing -= set(_pairs(best))
    return chosen


def _pairs(case: tuple[str, ...]) -> Iterator[tuple]:
    return itertools.combinations(enumerate(case), 2)


def main() -> int:
    """All combinations, or those of `--pairs`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with mpigossip.world(60.0) as world:
        for case in pairs(world.size) if options.pairs else itertools.product(*AXES):
            said = outcome(world, *case)
            if world.rank == 0:
                print(f"{world.size} | {' | '.join(case)} | {said}", flush=True)
                found[said.split(":")[0]] += 1
        if world.rank == 0:
            print(dict(found))
    return int(found["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
