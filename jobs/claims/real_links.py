"""Seconds until parallel's accuracy on real links of a given rate, compared with the virtual clock.

    python jobs/claims/real_links.py --scratch /tmp/links     # as root, with ip and tc; 20 minutes

16 ranks on hosts of their own (`tools/labs/net.sh`) train the digits as in the study "time" of
`designs.py`, with one of its seeds. A step sleeps for the computing time that the virtual clock
assumes for a node of 8 V100, with the same slow steps. The links are slower than in the
table, and the messages shorter by the same factor, so that a message takes as long as one of
ResNet-50, and two CPU cores are sufficient. Parallel hides no communication here, because ranks of
this package do not, nor does it in the clock's value for comparison. Each run is a line in
links.jsonl; verdicts.py makes the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import seconds  # noqa: E402
from designs import JOB  # noqa: E402
from run_queue import RUNS, lines  # noqa: E402

from mpigossip import models  # noqa: E402
from mpigossip.config.errors import OK, STOPPED  # noqa: E402
from mpigossip.store.log import read  # noqa: E402
from mpigossip.store.log_reading import Log  # noqa: E402
from mpigossip.studies.running import RunResult  # noqa: E402

LINKS = HERE / "links.jsonl"
LAB = HERE.parents[1] / "tools" / "labs" / "net.sh"
SEED = 3
"""Seed with which `METHODS` reach the goal in the fewest steps."""
METHODS = ("parallel", "dmsgd", "dsgd ahead", "ADPSGD")
"""Methods of the table; DiLoCo reaches the goal with another seed only."""
LIMIT_S = 900
PARTS = ("compute_s", "node_s", "exchange_s", "idle_s")
"""Columns of the log that add up to a step."""
Line = dict[str, Any]


class Link(NamedTuple):
    """Link of the table, and the Mbit/s of the slower link that represents it."""

    gbit: float
    latency: float
    megabits: int

    @property
    def scale(self) -> float:
        """Size of a message as a fraction of ResNet-50's."""
        return self.megabits / (1e3 * self.gbit)


CELLS = (Link(1, 50e-6, 50), Link(10, 5e-3, 50))


def settings(line: Line, link: Link) -> list[str]:
    """Return the settings of a run: the study's, with a slower model of more bytes."""
    count = sum(p.numel() for p in models.mlp((1, 8, 8), 10).parameters())
    model = {
        "name": "parts:paced",
        "padding": round(link.scale * seconds.resnet().count) - count,
        "compute_s": seconds.EXPONENTIAL.compute_s,
        "slow": seconds.SLOW,
        "times": seconds.TIMES,
        "draw": SEED,
    }
    other = [
        setting for setting in line["settings"] if not setting.startswith(("model.", "node.vmap"))
    ]
    return [*other, "data.workers=0", *(f"model.{name}={value}" for name, value in model.items())]


def run(words: list[str], folder: Path) -> Log:
    """Return the log of a run of this command."""
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, f"run.output={folder}"],
        env=environment,
        timeout=LIMIT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode not in (OK, STOPPED):
        sys.exit(f"{' '.join(words)}: code {done.returncode}\n{done.stdout[-3000:]}")
    return read(folder / "log.h5")


def measured(method: str, link: Link, scratch: Path) -> Line:
    """Run until the goal is reached; return the seconds of the run and of the virtual clock."""
    stored = seconds.finals(lines(RUNS))
    job_settings = settings(stored[method][SEED], link)
    cell = seconds.CELL
    program = [sys.executable, "-m", "mpigossip"]
    nodes = str(cell.nodes)
    simulated = run(
        [*program, "simulate", JOB, *job_settings, "--nodes", nodes], scratch / "simulated"
    )
    curve = zip(*map(RunResult(simulated).curve, ("step", "accuracy")), strict=True)
    steps = int(next(t for t, accuracy in curve if accuracy >= seconds.goal_of(stored)))
    job_settings += ["run.evaluate_every=0", "run.evaluate_steps=0", "log.consensus_every=0"]
    words = [str(LAB), "run", nodes, *program, "train", JOB, *job_settings, f"model.stop={steps}"]
    log = run(words, scratch / "ranks")
    if not np.array_equal(log.steps["loss"][:steps], simulated.steps["loss"][:steps]):
        sys.exit(f"{method}: {len(log.steps['loss'])} steps differ from the simulator's {steps}")
    clock = seconds.ends(
        method,
        np.flatnonzero(simulated.steps["kind"][:, 0]).tolist(),
        len(simulated.steps["step"]),
        cell.nodes,
        seconds.machine(link.gbit, link.latency),
        SEED,
        steps,
        overlap=False,
    )
    spent = {name: log.steps[name][:steps].sum(0) for name in PARTS}
    figures = {"clock_s": clock[-1], "measured_s": sum(spent.values()).max()}
    figures |= {name: each.mean() for name, each in spent.items()}
    return {
        **link._asdict(),
        "method": method,
        "seed": SEED,
        "steps": steps,
        **{name: round(float(value), 3) for name, value in figures.items()},
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure what is not in links.jsonl yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, required=True, help="folder for runs")
    options = parser.parse_args(arguments)
    options.scratch.mkdir(parents=True, exist_ok=True)
    os.environ["MPIGOSSIP_NET_LAB_BURST"] = "32kb"
    done = {(x["gbit"], x["latency"], x["method"]) for x in lines(LINKS)}
    for link in CELLS:
        rate = f"{link.megabits}mbit"
        ms = "0" if link.latency < 1e-4 else f"{1e3 * link.latency:g}"
        subprocess.run([LAB, "up", str(seconds.CELL.nodes), rate, ms], check=True)
        try:
            for method in METHODS:
                if (link.gbit, link.latency, method) not in done:
                    result = measured(method, link, options.scratch)
                    with LINKS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
                    print(result, flush=True)
        finally:
            subprocess.run([LAB, "down"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
