"""Train by three members of speed 1 and one that is four times slower, with equal and unequal H.

    python tools/labs/unequal_members.py [--seeds 5] [--step 0.06] [--lines FILE]

Members are threads; computing is a sleep before each step of a small model. The program prints the
wall time in units of the ideal time, in which no member ever waits, and compares the test losses
with the losses for an equal H.
"""

import argparse
import io
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
from mpigossip.runs.members import join as joining  # noqa: E402
from mpigossip.runs.members.replay import replay  # noqa: E402
from mpigossip.studies.seeds import interval  # noqa: E402
from mpigossip.training.assemble import load  # noqa: E402

SPEEDS = (1.0, 1.0, 1.0, 0.25)
"""Speed of each member, relative to the speed of a fast one."""
JOB = [
    "model.name=mlp",
    "algorithm.style=atc",
    "local.name=adamw",
    "schedule.lr=0.001",
    "cadence.name=every",
    "run.evaluate_every=0",
    "checkpoint.every_steps=0",
    "members.lease_s=600",
]
CHUNK_STEPS = 4
"""Number of steps in a chunk, for all settings that are compared."""
AUTO = ("cadence.period=auto", f"cadence.shortest={CHUNK_STEPS}", "cadence.longest=16")
PERIODS = {"auto": AUTO, "4": (f"cadence.period={CHUNK_STEPS}",)}
"""Settings of H that are compared."""


def run(folder: Path, seed: int, options, settings: tuple[str, ...]) -> dict:
    """Train once; return loss, accuracy, wall time, and the lengths of rounds.

    :param folder: new folder of the training
    :param seed: seed of the job
    :param options: options of the command line
    :param settings: settings of H
    :return: "loss" and "accuracy" of the average of the last models; "wall", the wall time divided
        by the ideal time; "rounds of chunks", the number of rounds by their number of chunks
    """
    lock = threading.Lock()
    ready = threading.Barrier(len(SPEEDS))
    assemble = joining.assemble
    speeds = [*SPEEDS]
    begun = []
    results = []

    def paced(*given):
        with lock:  # torch has one random generator for all threads
            made = assemble(*given)
            wait = options.step / speeds.pop()
        step = made.trainer.step
        ready.wait(60)
        begun.append(now := time.monotonic())
        last = [now]

        def late_step(*steps):
            last[0] = max(last[0] + wait, time.monotonic() - wait)
            time.sleep(max(0.0, last[0] - time.monotonic()))
            return step(*steps)

        made.trainer.step = late_step
        return made

    def work():
        words = [*JOB, f"run.seed={seed}", f"run.steps={options.steps}", *settings]
        made = joining.join(folder, load(REPOSITORY / "jobs" / "digits.toml", words), poll_s=0.1)
        results.append(made | {"ended": time.monotonic()})

    joining.assemble = paced
    try:
        threads = [threading.Thread(target=work) for _ in SPEEDS]
        with redirect_stdout(io.StringIO()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        joining.assemble = assemble
    wall = max(one["ended"] for one in results) - min(begun)
    records = [json.loads(path.read_text()) for path in folder.glob("chain/??????/??????")]
    rounds = [record for record in records if record["kind"] == "round"]
    lengths = Counter(record.get("chunks", 1) for record in rounds)
    # The training may end before options.steps, because the job limits its epochs.
    trained_steps = CHUNK_STEPS * sum(chunks * count for chunks, count in lengths.items())
    ideal = trained_steps * options.step / sum(SPEEDS)
    if not options.unrepeated:
        with redirect_stdout(io.StringIO()):
            replay(folder)
    return {
        "loss": results[0]["loss"],
        "accuracy": results[0]["accuracy"],
        "wall": wall / ideal,
        "rounds of chunks": dict(sorted(lengths.items())),
    }


def main() -> int:
    """Print a line for each run, and one for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2600, help="steps of all members together")
    parser.add_argument("--step", type=float, default=0.06, help="seconds of a fast member's step")
    parser.add_argument("--lines", type=Path, help="append a line of JSON per run to this file")
    parser.add_argument("--unrepeated", action="store_true", help="do not replay the runs")
    options = parser.parse_args()
    results: dict[str, list[dict]] = {name: [] for name in PERIODS}
    for seed in range(100, 100 + options.seeds):
        for name, settings in PERIODS.items():
            with tempfile.TemporaryDirectory() as folder:
                made = run(Path(folder) / "run", seed, options, settings)
            results[name].append(made)
            line = json.dumps({"H": name, "seed": seed, **made})
            print(line, flush=True)
            if options.lines:
                with options.lines.open("a") as file:
                    file.write(line + "\n")
    auto = results.pop("auto")
    for name, equal in results.items():
        ratios = [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(auto, equal, strict=True)]
        mean, half = (float(one[0]) for one in interval(np.reshape(ratios, (-1, 1))))
        walls = [float(np.mean([one["wall"] for one in runs])) for runs in (auto, equal)]
        print(
            f"auto compared with H = {name}: loss {mean:+.1f} % [{mean - half:.1f}, "
            f"{mean + half:.1f}], wall time {walls[0]:.3f} and {walls[1]:.3f} of the ideal"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
