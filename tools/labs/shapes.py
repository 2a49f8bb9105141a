"""Nodes of several ranks against one rank a node and the simulator: the same digests.

    python tools/labs/shapes.py [--mpiexec PATH …] [--most 60] [--product] [--json]

The jobs are a covering of pairs of algorithm, wire, MPI library, node.same_host and shape, chosen
greedily, at most `--most`; with `--product` those of dmsgd in every combination. A shape is the
number of nodes, of ranks in each, and of slots in each rank. Each job is trained for some steps on
the digits by the simulator and by one rank a node, both with a slot for each of the node's, and by
the ranks as nodes. Launchers are those of `--mpiexec`, else the one that
tools/labs/compare_checkouts.py would take. Exit code 1 where any digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SHAPES = ((1, 8, 1), (4, 2, 1), (2, 4, 1), (3, 2, 1), (2, 2, 2))
"""Nodes, ranks of each, slots of each rank."""
STEPS = 5
COMMON = [
    "data.batch=2", "run.epochs=1", "model.name=mlp", "schedule.scale=none", "schedule.lr=0.05",
    "node.timeout_s=60", "node.levels=7", "node.kept=0.2", "log.consensus_every=2",
]  # fmt: skip


class Case(NamedTuple):
    """One job: its place in the table."""

    algorithm: str
    wire: str
    mpi: int
    same_host: str
    shape: tuple[int, int, int]

    def settings(self) -> list[str]:
        """Of the job, without its shape."""
        graph = dict.fromkeys(("choco", "d2", "decentlam"), ["graph.name=ring"])
        return [*COMMON, f"algorithm.name={self.algorithm}", f"node.wire={self.wire}",
                f"node.same_host={self.same_host}", *graph.get(self.algorithm, [])]  # fmt: skip


def fits(case: Case) -> bool:
    """Whether the package takes the job: what it refuses is no pair to be covered."""
    from mpigossip.training import assemble

    try:
        job = assemble.load({}, case.settings())
        return not assemble.mistakes(job, case.shape[0])
    except ValueError:
        return False


def pairs(case: Case) -> set:
    """The pairs of values that a job covers."""
    return {frozenset(two) for two in itertools.combinations(enumerate(case), 2)}


def covering(most: int, mpis: int) -> tuple[list[Case], int, int]:
    """Jobs that cover most pairs, how many pairs they cover, and how many there are."""
    from mpigossip.algorithms import BUILDERS
    from mpigossip.mixing.codes import WIRES

    able: dict[tuple, bool] = {}
    cases = []
    every = itertools.product(BUILDERS, WIRES, range(mpis), ("read", "put"), SHAPES)
    for case in map(Case._make, every):
        key = case.algorithm, case.wire, case.shape
        if key not in able:
            able[key] = fits(case)
        if able[key]:
            cases.append(case)
    wanted = set().union(*map(pairs, cases))
    left, chosen = set(wanted), []
    while left and len(chosen) < most:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        chosen.append(best)
        left -= pairs(best)
    return chosen, len(wanted) - len(left), len(wanted)


def product(mpis: int) -> list[Case]:
    """Every combination that there is of dmsgd."""
    from mpigossip.mixing.codes import WIRES

    every = itertools.product(["dmsgd"], WIRES, range(mpis), ("read", "put"), SHAPES)
    return [case for case in map(Case._make, every) if fits(case)]


def trained(world, n: int, settings: list[str]) -> str | None:
    """The digest after some steps: of all nodes' parameters in node order; on rank 0."""
    from mpigossip.training import assemble

    assembly = assemble.assemble(assemble.load({}, settings), world, n)
    for _ in range(STEPS):
        assembly.trainer.step()
    replicas, rows = assembly.trainer.replicas, assembly.trainer.mixer.rows
    own = {
        node: hashlib.sha256(replicas.full[0][row].numpy().tobytes()).hexdigest()
        for row, node in enumerate(rows)
    }
    gathered = world.gather(own)
    assembly.close()
    if gathered is None:
        return None
    found: dict[int, set[str]] = {}
    for of_rank in gathered:
        for node, text in of_rank.items():
            found.setdefault(node, set()).add(text)
    words = ["+".join(sorted(found[node])) for node in sorted(found)]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def work(file: Path) -> None:
    """Train all jobs of a file on the ranks that there are; digests into the file, from rank 0."""
    import torch

    from mpigossip.cluster.ranks import world

    torch.set_num_threads(1)
    asked = json.loads(file.read_text())
    with world(120) as ranks:
        ranks.arrange(asked["per"])
        found = [trained(ranks, ranks.nodes.count, settings) for settings in asked["jobs"]]
        if ranks.rank == 0:
            file.with_suffix(".out").write_text(json.dumps(found))


def launched(mpiexec: str, ranks: int, per: int, jobs: list[list[str]]) -> list[str]:
    """Digests of jobs trained by so many ranks, of which so many are a node."""
    from checkouts import at_ease

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "jobs.json"
        file.write_text(json.dumps({"per": per, "jobs": jobs}))
        os.environ["MPIGOSSIP_MPIEXEC"] = mpiexec
        env = os.environ | at_ease() | {"OMP_NUM_THREADS": "1"}
        words = [mpiexec, "-n", str(ranks), sys.executable, __file__, "--work", str(file)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=1500)
        if done.returncode:
            raise SystemExit(
                f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}"
            )
        return json.loads(file.with_suffix(".out").read_text())


def main() -> int:
    """Run the table and print it."""
    from checkouts import launcher

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mpiexec", nargs="+", default=launcher())
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--product", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    from mpigossip.cluster.ranks import Alone

    began, mpis = time.perf_counter(), len(options.mpiexec)
    cases, covered, there = (
        (product(mpis), 0, 0) if options.product else covering(options.most, mpis)
    )
    groups: dict[tuple, list[Case]] = {}
    for case in cases:
        groups.setdefault((case.mpi, case.shape), []).append(case)
    lines, simulated = [], {}
    for (mpi, (n, per, own)), some in sorted(groups.items()):
        slots, mpiexec = [f"node.devices=cpu:{per * own}"], options.mpiexec[mpi]
        ranks = [f"node.devices=cpu:{own}", f"node.ranks_per_node={per}"]
        one = launched(mpiexec, n, 1, [[*case.settings(), *slots] for case in some])
        several = launched(mpiexec, n * per, per, [[*case.settings(), *ranks] for case in some])
        for case, *digests in zip(some, one, several, strict=True):
            key = case.algorithm, case.wire, case.shape
            if key not in simulated:
                with Alone() as alone:
                    simulated[key] = trained(alone, n, [*case.settings(), *slots])
            equal = {simulated[key], *digests} == {simulated[key]}
            lines.append({"case": case._asdict(), "digest": simulated[key], "equal": equal})
            if not options.json:
                print("equal " if equal else "DIFFERS", *case, simulated[key], *digests, flush=True)
    wrong = [line for line in lines if not line["equal"]]
    seconds = time.perf_counter() - began
    if options.json:
        print(json.dumps({"jobs": lines, "pairs": there, "covered": covered, "seconds": seconds}))
    else:
        shapes = Counter(str(case.shape) for case in cases)
        print(
            f"{len(lines)} jobs, {len(wrong)} differ; {covered} of {there} pairs; {seconds:.0f} s"
        )
        print(", ".join(f"{shape}: {count}" for shape, count in sorted(shapes.items())))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
