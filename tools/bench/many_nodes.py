"""Simulating many nodes: a step against its vectorized gradients, seeds at once, irregular graphs.

    python tools/bench/many_nodes.py --before ../older-checkout

Medians of interleaved turns, one thread; MLPs (64-128-10) and LeNet on the digits. `--before`: a
checkout whose steps at 256 nodes are taken in the same run, in turns with this one's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from mpigossip import graphs
from mpigossip.cluster.ranks import Alone
from mpigossip.data.nested import parts
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import Kind, Layout
from mpigossip.training import assemble
from mpigossip.training.loop import Trainer

JOB = {
    "data": {"source": "digits"},
    "algorithm": {"name": "dmsgd"},
    "graph": {"name": "one-peer-exponential"},
    "run": {"epochs": 1000},
}
STEPS = """
import statistics, sys, time
import torch
from mpigossip.cluster.ranks import Alone
from mpigossip.training import assemble
torch.set_num_threads(1)
trainer = assemble.assemble(assemble.load({job}, {settings}), Alone(), {n}).trainer
for _ in range(3): trainer.step()
for line in sys.stdin:
    took = []
    for _ in range(10):
        began = time.perf_counter(); trainer.step(); took.append(time.perf_counter() - began)
    print(statistics.median(took), flush=True)
"""
"""A process that takes ten steps for each line it is sent."""


def trainer(n: int, *settings: str, seed: int = 0) -> Trainer:
    """A job's trainer of n nodes."""
    made = assemble.load(JOB, [f"run.seed={seed}", f"data.batch={_batch(n)}", *settings])
    return assemble.assemble(made, Alone(), n).trainer


def _batch(n: int) -> int:
    return max(1, min(8, 1437 // n))


def medians(turns: int, **work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of each, in turns, so that a busy machine is busy for all."""
    took: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(turns + 1):
        for name, call in work.items():
            began = time.perf_counter()
            call()
            if turn:  # the first warms up
                took[name].append(time.perf_counter() - began)
    return {name: 1e3 * statistics.median(values) for name, values in took.items()}


def step_against_gradients(turns: int) -> None:
    """1,024 MLPs, one-peer exponential: a step, and its vectorized gradients alone."""
    one = trainer(1024, "model.name=mlp", "node.vmap=true")
    replicas = one.replicas
    cuts = [parts(batch, 1) for batch in one.settings.batches(0)]

    def gradients() -> None:
        full, grads = replicas.full[0], replicas.grads[0]
        replicas.vectorized(replicas.modules[0][0], full, grads, cuts, one.settings.precision)

    found = medians(turns, step=one.step, gradients=gradients)
    ratio = found["step"] / found["gradients"]
    print(f"1,024 MLPs: a step {found['step']:.0f} ms, its gradients {found['gradients']:.0f} ms: "
          f"{ratio:.2f} times (bar: 4)", flush=True)  # fmt: skip


def seeds_at_once(turns: int, count: int = 5) -> None:
    """Steps of five seeds in one call, and of five runs."""
    from mpigossip.training.together import Together

    for model in ("mlp", "lenet"):
        for n in (8, 64):
            alone = [trainer(n, f"model.name={model}", seed=seed) for seed in range(count)]
            words = f"model.name={model}", "node.vmap=true"
            together = Together([trainer(n, *words, seed=seed) for seed in range(count)])
            found = medians(turns, alone=lambda a=alone: [one.step() for one in a],
                            together=together.step)  # fmt: skip
            apart = max(
                float((a.replicas.x[0] - b.replicas.x[0]).norm() / a.replicas.x[0].norm())
                for a, b in zip(alone, together.trainers, strict=True)
            )
            ratio = found["alone"] / found["together"]
            bar = "2" if n == 8 else "1"
            print(f"{count} seeds, {n} {model}: runs {found['alone']:.1f} ms, together "
                  f"{found['together']:.1f} ms: {ratio:.2f} x (bar: {bar}), apart {apart:.0e} "
                  f"after {turns + 1} steps", flush=True)  # fmt: skip


def irregular(turns: int) -> None:
    """A round of irregular graphs: groups of rows, and one sparse product."""
    for name, n, options in (("erdos-renyi", 64, {}), ("random-regular", 256, {"degree": 4}),
                             ("star", 64, {}), ("ring", 64, {})):  # fmt: skip
        made, layout = graphs.graph(name, n, **options), Layout((10240,))
        each: dict[str, Callable[[], object]] = {}
        for asked in ("synchronous", "product"):
            mixer = mixer_class(asked, "process")(made, layout)
            mixer.outbox(0)[0][0].normal_()

            def exchange(mixer=mixer) -> None:
                mixer.start(Kind.GOSSIP, 0)
                mixer.finish()

            each[asked] = exchange
        found = medians(turns, **each)
        print(f"a round of 10,240 columns, {name}, {n}: exact {found['synchronous']:.2f} ms, "
              f"product {found['product']:.2f} ms", flush=True)  # fmt: skip


def against(before: Path, turns: int) -> None:
    """256 MLPs: steps of this checkout and another's, in turns, with and without vmap."""
    here = Path(__file__).resolve().parents[2]
    for vmap in ("false", "true"):
        settings = ["model.name=mlp", f"data.batch={_batch(256)}", f"node.vmap={vmap}"]
        program = STEPS.format(job=JOB, settings=settings, n=256)
        both = {name: _started(program, path) for name, path in
                (("before", before.resolve()), ("now", here))}  # fmt: skip
        took: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(turns):
            for name, process in both.items():
                assert process.stdin is not None and process.stdout is not None
                print("go", file=process.stdin, flush=True)
                took[name].append(1e3 * float(process.stdout.readline()))
        for process in both.values():
            process.communicate()
        before_, now = (statistics.median(took[name]) for name in ("before", "now"))
        print(f"256 MLPs, vmap {vmap}: before {before_:.1f} ms, now {now:.1f} ms: "
              f"{before_ / now:.2f} x (bar: 1)", flush=True)  # fmt: skip


def _started(program: str, checkout: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    # its folder, as Python looks there first
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, cwd=checkout,
                            stdout=subprocess.PIPE, text=True, env=environment)  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    step_against_gradients(options.turns)
    seeds_at_once(options.turns)
    irregular(options.turns)
    if options.before:
        against(options.before, options.turns)


if __name__ == "__main__":
    main()
