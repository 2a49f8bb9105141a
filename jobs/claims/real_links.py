"""Time until a method reaches the accuracy of parallel SGD, on real links and on the virtual clock.

    python jobs/claims/real_links.py --scratch /tmp/links     # as root, with ip and tc; 20 minutes

16 ranks, each in a network namespace that acts as a host (`tools/labs/net.sh`), train on digits as
in the study "time" of `designs.py`, with one of its seeds. In each step, a rank sleeps for the
computation time that the virtual clock assumes for a node of 8 V100, with the same slow steps.

The links are slower than in the table, and the messages are shorter by the same factor. A message
therefore takes as long as a message of ResNet-50, and two CPU cores suffice. The package's parallel
SGD does not overlap communication with computation, so the virtual clock does not assume that here
either. Each run is a line in links.jsonl; verdicts.py makes the table.
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
"""Methods of the table. DiLoCo is missing, because it does not reach the goal with this seed."""
LIMIT_S = 900
"""Time limit of a run in seconds."""
PARTS = ("compute_s", "node_s", "exchange_s", "idle_s")
"""Columns of the log with the parts of a step's time."""
Line = dict[str, Any]


class Link(NamedTuple):
    """Link of the table, and the rate in Mbit/s of the slower real link that stands for it.

    ``gbit`` is in Gbit/s, and ``latency`` in seconds.
    """

    gbit: float
    latency: float
    megabits: int

    @property
    def scale(self) -> float:
        """Size of a message, divided by the size of a message of ResNet-50."""
        return self.megabits / (1e3 * self.gbit)


CELLS = (Link(1, 50e-6, 50), Link(10, 5e-3, 50))


def settings(line: Line, link: Link) -> list[str]:
    """Return the settings of a run: the settings of the study, but with the model `parts:paced`.

    :param line: stored run of the study
    :param link: the link
    """
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
    """Run a command, and return the log of its run.

    If the exit code of the command means neither success nor a requested stop, this program ends
    with the command's output as its message.

    :param words: words of the command
    :param folder: run directory, which is removed before
    :raises subprocess.TimeoutExpired: if the command takes longer than `LIMIT_S`
    """
    shutil.rmtree(folder, ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(
        [*words, f"run.output={folder}"],
        env=environment,
        timeout=LIMIT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if completed.returncode not in (OK, STOPPED):
        sys.exit(
            f"{' '.join(words)} ended with code {completed.returncode}, not {OK} or {STOPPED}; the "
            f"end of its output is:\n{completed.stdout[-3000:]}"
        )
    return read(folder / "log.h5")


def measure(method: str, link: Link, scratch: Path) -> Line:
    """Run a method on ranks until it reaches the goal; return a line of links.jsonl.

    The line contains the measured seconds, and the seconds of the virtual clock for equal steps.
    The program ends if the losses of the ranks differ from the losses of the simulator.

    :param method: label of the method
    :param link: link of the ranks
    :param scratch: folder for the runs
    """
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
        sys.exit(
            f"{method}: the ranks made {len(log.steps['loss'])} steps, and the losses of the first "
            f"{steps} differ from the simulated losses"
        )
    clock = seconds.end_times(
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
    """Measure the runs that links.jsonl does not contain yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, required=True, help="folder for runs")
    options = parser.parse_args(arguments)
    options.scratch.mkdir(parents=True, exist_ok=True)
    os.environ["MPIGOSSIP_NET_LAB_BURST"] = "32kb"
    stored = {(x["gbit"], x["latency"], x["method"]) for x in lines(LINKS)}
    for link in CELLS:
        rate = f"{link.megabits}mbit"
        ms = "0" if link.latency < 1e-4 else f"{1e3 * link.latency:g}"
        subprocess.run([LAB, "up", str(seconds.CELL.nodes), rate, ms], check=True)
        try:
            for method in METHODS:
                if (link.gbit, link.latency, method) not in stored:
                    result = measure(method, link, options.scratch)
                    with LINKS.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
                    print(result, flush=True)
        finally:
            subprocess.run([LAB, "down"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
