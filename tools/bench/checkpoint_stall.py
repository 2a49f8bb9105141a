"""Measure by how much checkpoints slow down a training; runs with and without them alternate.

  mpiexec -n 4 python tools/bench/checkpoint_stall.py [--megabytes 100] [--every 20] [--batch 32] …

Each rank trains a network with ``--megabytes`` MB of parameters. The time of a run begins at the
end of the first step and ends at the end of the last step; it includes snapshots and writing in the
background. The last line compares the rate of writing a node's checkpoint file with the rate of a
plain file of the same size (write, fsync and rename), measured in the same launch.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from mpigossip.analysis import bench  # noqa: E402
from mpigossip.cluster.mpi_world import open_world  # noqa: E402
from mpigossip.runs.hooks import Hook  # noqa: E402
from mpigossip.runs.job import JobNode, train  # noqa: E402
from mpigossip.training import assemble  # noqa: E402


class Stamps(Hook):
    """Hook that appends to ``at`` the time, in seconds, at which each step ended."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def step(self, progress, record) -> None:
        """Record the current time as the end of a step."""
        self.at.append(time.perf_counter())


def seconds(ranks, folder: Path, options: argparse.Namespace, every: int) -> float:
    """Run a training; return its seconds from the end of the first step to the end of the last.

    :param ranks: all ranks, which call this function; the time of the slowest one is returned
    :param folder: new run directory
    :param options: options of the command line
    :param every: steps between two checkpoints; 0: no checkpoints
    """
    hidden = options.megabytes * 1_000_000 // 4 // 3_082
    settings = ["model.name=mlp", f"model.hidden=[{hidden}]", "data.source=synthetic"]
    settings += [f"data.batch={options.batch}", f"data.samples={4 * options.batch * ranks.size}"]
    settings += ["data.workers=0", "algorithm.name=dsgd", "local.name=sgd", "run.epochs=1000"]
    settings += [f"run.steps={options.steps}", "run.evaluate_every=0", "log.consensus_every=0"]
    settings += ["checkpoint.keep=1", f"checkpoint.every_steps={every}", f"run.output={folder}"]
    job = assemble.load({}, settings)
    assembly = assemble.assemble(job, ranks, ranks.size)
    stamps = Stamps()
    # All runs evaluate and save after the last step, which is not measured.
    train(JobNode(assembly, ranks), hooks=[stamps])
    assembly.close()
    return ranks.agree(int(1e6 * (stamps.at[-1] - stamps.at[0]))) / 1e6


def main() -> None:
    """Alternate runs with and without checkpoints, measure the disk, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms: dict[int, list[float]] = {0: [], options.every: []}
    with open_world() as ranks:
        top = ranks.broadcast(
            tempfile.mkdtemp(dir=options.folder, prefix="stall-") if ranks.rank == 0 else None
        )
        for repeat in range(options.repeats):
            for every, times in arms.items():
                times.append(seconds(ranks, Path(top) / f"{repeat}-{every}", options, every))
                if ranks.rank == 0:
                    step = times[-1] / (options.steps - 1)
                    what = f"a checkpoint every {every} steps" if every else "no checkpoints"
                    print(f"{step:.3f} s per step with {what}", flush=True)
        bench_options = SimpleNamespace(
            sizes=[options.megabytes * 1_000_000], folder=top, seconds=15
        )
        rows = list(bench.checkpoint(ranks, bench_options))
        ranks.barrier()  # Wait until all ranks have emptied their folders.
        if ranks.rank == 0:
            without, with_them = (statistics.median(times) for times in arms.values())
            fastest = min(arms[options.every]) / min(arms[0]) - 1
            slowdown = with_them / without - 1
            print(
                f"checkpoints change the median time of {options.repeats} runs by {slowdown:+.1%}"
            )
            print(
                f"they change the time of the fastest run, which other programs disturb least, by "
                f"{fastest:+.1%}"
            )
            shutil.rmtree(top, ignore_errors=True)
            print(
                f"checkpoint files are written at {1 / rows[0]['times_limit']:.2f} x the rate of a "
                "plain file"
            )


if __name__ == "__main__":
    main()
