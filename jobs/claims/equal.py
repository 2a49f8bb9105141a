"""Check that ranks and the simulator agree bitwise for every algorithm, graph and wire format.

    mpiexec -n 4 python jobs/claims/equal.py    # prints the combinations that differ

`measure.py` runs this program with n = 1, 2, 3, 4 and 6 ranks. Combinations that a job file may not
contain are skipped.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from table import Row

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

SIZES = (1, 2, 3, 4, 6)
STEPS = 5
"""Number of steps of each combination. There are two inboxes, for even and odd rounds, and each has
to be used at least twice."""


def combinations(n: int, part: int = 0, parts: int = 1) -> Iterator[str]:
    """Yield the settings of all combinations that are valid for n nodes, or of one part of them.

    :param n: number of nodes
    :param part: number of the part, from 0 to ``parts`` − 1
    :param parts: number of parts
    """
    from mpigossip import algorithms, config, graphs
    from mpigossip.mixing.lossy_wires import WIRES
    from mpigossip.training import assemble
    from tests.battery import job

    combined = itertools.product(algorithms.BUILDERS, graphs.BUILDERS, WIRES)
    for names in itertools.islice(combined, part, None, parts):
        settings = "algorithm.name={} graph.name={} node.wire={}".format(*names)
        try:
            fits = not assemble.mistakes(job(settings), n)
        except config.JobError:
            continue
        if fits:
            yield settings


def main() -> int:
    """Train all combinations on the ranks, and compare each with the simulator.

    Each rank simulates a part of the combinations. Rank 0 prints a JSON object: the number of
    "combinations", and a list of the "different" ones.
    """
    from mpi4py import MPI

    from mpigossip.cluster.mpi_world import MPIWorld
    from tests.battery import Driver, on_ranks

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    settings = comm.allreduce(list(combinations(comm.size, comm.rank, comm.size)))
    world = MPIWorld(comm)
    results = {}
    different = []
    for way in ("read", "put"):
        models = [d.whole().numpy()[0] for d in on_ranks(settings, world, way, STEPS)]
        results[way] = np.stack(comm.allgather(np.stack(models)), axis=1)
    world.close()
    for index in range(comm.rank, len(settings), comm.size):
        expected = Driver(settings[index], comm.size, noise=0.1).run(STEPS).whole().numpy()
        different += [
            f"{settings[index]} ({way})"
            for way, models in results.items()
            if not np.array_equal(models[index], expected, equal_nan=True)
        ]
    different = comm.reduce(different)
    if comm.rank == 0:
        print(json.dumps({"combinations": len(settings), "different": different}))
    return 0


def equal(options) -> Iterator[Row]:
    """Compare ranks with the simulator, for all combinations and each number of ranks.

    Each combination is run twice: with `node.same_host` = "read" and "put".

    :raises RuntimeError: if the program fails on any number of ranks
    """
    from tests.launch import mpirun

    counts = []
    different = []
    for n in SIZES:
        ran = mpirun(n, [sys.executable, __file__], timeout=1500)
        if ran.returncode:
            raise RuntimeError(
                f"{__file__} on {n} ranks ended with code {ran.returncode}; its last messages "
                f"are:\n{ran.stderr[-2000:]}"
            )
        result = json.loads(ran.stdout.strip().splitlines()[-1])
        counts.append(f"n = {n}: {result['combinations']}")
        different += [f"n = {n}: {case}" for case in result["different"]]
    yield Row(
        "every algorithm x graph x wire format that a job may name: simulated = ranks",
        "requirement of this project",
        "bitwise identical, with neighbours read in place and by put",
        f"combinations {', '.join(counts)}; different: {'; '.join(different) or 'none'}",
        not different,
    )


CLAIMS = (equal,)

if __name__ == "__main__":
    sys.exit(main())
