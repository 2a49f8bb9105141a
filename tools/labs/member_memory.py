"""Measure the memory of each rank of members whose model FSDP2 shards inside the node.

    python tools/labs/member_memory.py [--megabytes 400] [--ranks 4] [--members 2] [--chunks 6]

The members are programs with `mpigossip.join`, each under its own launcher (gloo, CPU), in a new
folder. For each rank, a line shows the largest increase of its resident memory in each phase, from
the time before its model was built. It also shows the sizes whose sum is the bar: the rank's shard
of the parameters and of the optimizer's state, one message (the part of the model that it
publishes: parameters and optimizer's state), and the largest layer. With ``--alone``, the same
program trains without `join`, which shows how much memory torch itself needs.
"""

import argparse
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
WIDTH = 2048
"""Number of rows and columns of the matrix of a layer."""
MEGA = 1e6
STEPS = 1
"""Number of steps in a chunk."""
LIMIT_S = 900
"""Seconds after which the members are killed."""


def resident(field: str) -> int:
    """Return a value of /proc/self/status in bytes: "VmRSS", or its peak "VmHWM"."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Phases:
    """Peaks of the resident memory in each phase of a program, above its value at the start."""

    def __init__(self, reports: bool) -> None:
        """Begin to measure.

        :param reports: whether to print each peak at once
        """
        gc.collect()
        self._reports = reports
        self.start = resident("VmRSS")
        self.peaks: dict[str, int] = {}
        self._reset()

    def _reset(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self, name: str) -> None:
        """End a phase, and keep the largest peak of all phases with this name."""
        peak = resident("VmHWM") - self.start
        self.peaks[name] = max(peak, self.peaks.get(name, 0))
        if self._reports:
            print(f"{name}: {peak / MEGA:.0f} MB", file=sys.stderr, flush=True)
        self._reset()


def build(world, layers: int, width: int):
    """Return a model of ``layers`` sharded matrices, and its optimizer.

    The whole model is never in memory.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    mesh = world.node_mesh()
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(world.rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, width**-0.5, generator=generator)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4)


def train_chunk(world, model, optimizer, chunk: int) -> None:
    """Train ``STEPS`` steps on the samples of a chunk, one for each rank."""
    import torch

    width = model[0].in_features
    seed = torch.Generator().manual_seed(chunk * world.size + world.rank)
    inputs = torch.randn(1, width, generator=seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()


def train(options, world) -> str:
    """Train as one rank of a member, or without `join`; return a line of the table."""
    import mpigossip

    # Torch and this package load modules, and open connections, when they are used first.
    for alone in (True, options.alone):
        model, optimizer = build(world, 2, 64)
        if alone:
            for chunk in range(2):
                train_chunk(world, model, optimizer, chunk)
        else:
            with mpigossip.join(
                f"{options.folder}-first",
                model,
                optimizer,
                chunks=2,
                lease_s=600,
                poll_s=0.2,
                replay=options.replay,
                world=world,
            ) as member:
                for chunk in member:
                    train_chunk(world, model, optimizer, chunk)
    del model, optimizer
    world.barrier()
    phases = Phases(options.reports and world.rank == 0)
    layers = max(1, round(options.megabytes * MEGA / (4 * WIDTH * WIDTH)))
    model, optimizer = build(world, layers, WIDTH)
    phases.end("build")
    if options.alone:
        for chunk in range(options.chunks):
            train_chunk(world, model, optimizer, chunk)
            phases.end("train")
    else:
        with mpigossip.join(
            options.folder,
            model,
            optimizer,
            chunks=options.chunks,
            lease_s=600,
            poll_s=0.2,
            replay=options.replay,
            world=world,
        ) as member:
            phases.end("join")
            for chunk in member:
                phases.end("exchange" if "train" in phases.peaks else "start")
                train_chunk(world, model, optimizer, chunk)
                phases.end("train")
        phases.end("end")
        assert member.finished, "the member has not finished"
    local = [p.to_local() for p in model.parameters()]
    parameters = sum(p.nbytes for p in local)
    states = [value for state in optimizer.state.values() for value in state.values()]
    state = sum(value.to_local().nbytes for value in states if hasattr(value, "to_local"))
    layer = 4 * WIDTH * WIDTH
    message = parameters + state
    bar = parameters + state + message + layer
    peak = max(phases.peaks.values())
    values = {"shard": parameters, "state": state, "message": message, "layer": layer, "bar": bar}
    columns = values | {"peak": peak} | phases.peaks
    text = "  ".join(f"{name} {nbytes / MEGA:.0f}" for name, nbytes in columns.items())
    return f"rank {world.rank}: {text}; {'met' if peak <= bar else 'EXCEEDED'}"


def run_rank(options) -> None:
    """Run as one rank; rank 0 prints the lines of all ranks, in their order."""
    import mpigossip

    with mpigossip.world(ranks_per_node="host") as world:
        lines = world.gather(train(options, world))
        if lines:
            sys.stdout.write("\n".join(lines) + "\n")
            sys.stdout.flush()


def main() -> None:
    """Start the members, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=400, help="size of the model")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each member")
    parser.add_argument("--members", type=int, default=2, help="members that train together")
    parser.add_argument("--chunks", type=int, default=6, help="chunks of the whole training")
    parser.add_argument("--folder", help="folder of the training; default: a new temporary one")
    parser.add_argument("--alone", action="store_true", help="train without join")
    parser.add_argument("--replay", action="store_true", help="repeat the training in --folder")
    parser.add_argument("--reports", action="store_true", help="print each peak of rank 0 at once")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options)
        return
    from tests.launch import found_launcher

    folder = Path(options.folder or tempfile.mkdtemp(prefix="member-memory-"))
    passed = [f"--megabytes={options.megabytes}", f"--chunks={options.chunks}"]
    passed += [f"--folder={folder}/run" if not options.folder else f"--folder={folder}"]
    passed += ["--alone"] * options.alone + ["--replay"] * options.replay
    passed += ["--reports"] * options.reports + ["--as-rank"]
    command = [*found_launcher(), "-n", str(options.ranks), sys.executable, __file__, *passed]
    # By default, glibc keeps freed blocks of up to 32 MB, such as layers that FSDP2 has gathered.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    print("MB above the memory before the model was built (peaks of phases after 'peak')")
    try:
        members = [
            subprocess.Popen(command, env=environment, start_new_session=True, cwd=REPOSITORY)
            for _ in range(1 if options.alone or options.replay else options.members)
        ]
        codes = [member.wait(LIMIT_S) for member in members]
    finally:
        for member in members:
            member.kill()
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    if any(codes):
        sys.exit(f"members ended with the codes {codes}: read their errors above")


if __name__ == "__main__":
    main()
