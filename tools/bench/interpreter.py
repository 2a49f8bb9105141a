"""What one interpreter for all slots of a node costs, against one a slot: seconds of a step.

    python tools/bench/interpreter.py [--slots 2 8] [--steps 60] [--rounds 5] [--json]

One node trains resnet20 on single 8 x 8 images on CPUs, so that nearly all of a step is Python:
by one rank with a thread for each slot, and by a rank for each slot (node.ranks_per_node). Runs
alternate; of each the fastest median of a step counts. With more slots than cores, ranks and
threads share them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = ["model.name=resnet20", "data.batch=1", "node.timeout_s=120", "log.consensus_every=0"]


def work(per: int, slots: int, steps: int) -> None:
    """Train as a rank; rank 0 prints the median of a step's seconds."""
    import torch

    from mpigossip.cluster.ranks import world
    from mpigossip.training import assemble

    torch.set_num_threads(1)
    shape = [f"node.ranks_per_node={per}", f"node.devices=cpu:{slots // per}"]
    with world(120) as ranks:
        ranks.arrange(per)
        job = assemble.load({}, [*SETTINGS, *shape])
        assembly, taken = assemble.assemble(job, ranks, 1), []
        for _ in range(steps):
            began = time.perf_counter()
            assembly.trainer.step()
            taken.append(time.perf_counter() - began)
        assembly.close()
        if ranks.rank == 0:
            print(json.dumps(statistics.median(taken[steps // 3 :])))


def step(per: int, slots: int, steps: int) -> float:
    """Seconds of a step by so many ranks."""
    mpiexec = os.environ.get("MPIGOSSIP_MPIEXEC") or Path(sys.executable).parent / "mpiexec"
    words = [mpiexec, "-n", per, sys.executable, __file__, "--work", per, slots, steps]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, words)), env=env, capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=int, nargs=3)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    rows = []
    for slots in options.slots:
        found: dict[int, list[float]] = {1: [], slots: []}
        for _ in range(options.rounds):
            for per in found:
                found[per].append(step(per, slots, options.steps))
        one, several = min(found[1]), min(found[slots])
        rows.append({"slots": slots, "one_rank_s": one, "ranks_s": several})
        if not options.json:
            print(f"{slots} slots: one rank {one * 1e3:.0f} ms a step, {slots} ranks "
                  f"{several * 1e3:.0f} ms ({one / several:.2f} x)", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({"cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
