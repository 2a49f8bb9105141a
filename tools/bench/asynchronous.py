"""Asynchronous against synchronous gossip with slow nodes; start it by mpirun on 8 ranks.

Every rank trains jobs/digits.toml, once waiting for its neighbours and once not. The computing of
a step is lengthened by sleeping to --step-ms (as on a device: the few cores of this machine stay
free), and in slow moments to --times as long. "moving": in each stretch of steps another rank,
drawn from the seed, is slow; "one": rank 0 is slow in half of its stretches; "lasting": rank 0 is
slow for ever; "none": nobody is. Steps per second are summed over ranks, each over its own time;
those of ranks 1, 2, … (a rank, mean) are told beside them. The accuracy is that of the averaged
model. With
--torn N each rank then runs N rounds under random delays, each model published in two halves, and
counts torn copies that were used: there must be none.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

import mpigossip
from mpigossip.graphs import graph
from mpigossip.mixing import open_mixer
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.faults import Faults
from mpigossip.runs.node import wait_for_nodes
from mpigossip.training import assemble
from mpigossip.training.evaluate import evaluate

ROOT = Path(__file__).resolve().parents[2]


def costs(pattern: str, n: int, times: float, stretch: int, t: int) -> np.ndarray:
    """How much longer each rank computes in its step t, (n,)."""
    if pattern == "moving":
        return Faults(n, times=times, steps=stretch).costs(t)
    slow = pattern == "lasting"
    if pattern == "one":
        slow = random.Random(f"{t // stretch}").random() < 0.5
    return np.array([times if slow else 1.0] + [1.0] * (n - 1))


def train(world, mixer: str, pattern: str, options) -> dict:
    """One run: steps per second over all ranks, accuracy, staleness; equal on all ranks."""
    job = assemble.load(
        ROOT / "jobs" / "digits.toml",
        ["data.workers=0", f"node.mixer={mixer}", f"run.epochs={options.epochs}",
         "log.consensus_every=0", *options.settings],
    )  # fmt: skip
    assembly = assemble.assemble(job, world, world.size)
    trainer, steps = assembly.trainer, options.steps or assembly.total_steps
    gradients = trainer._gradients

    def slowed():
        if trainer.resting:
            return gradients()
        begin = time.perf_counter()
        losses = gradients()
        cost = costs(pattern, world.size, options.times, options.stretch, trainer.index)
        rest = begin + options.step_ms / 1e3 * cost[world.rank] - time.perf_counter()
        time.sleep(max(rest, 0))
        return losses

    trainer._gradients = slowed
    stale = []
    world.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        stale += trainer.step().staleness
    own = time.perf_counter() - begin
    wait_for_nodes(trainer, world)
    world.barrier()
    whole = time.perf_counter() - begin
    found = evaluate(trainer.replicas, trainer.mixer, assembly.loader)
    mine = (steps / own, float(np.nanmean(stale)), float(np.nanmax(np.abs(stale))),
            getattr(trainer.mixer, "torn", 0), getattr(trainer.mixer, "skipped", 0))  # fmt: skip
    rates, means, most, torn, skipped = zip(*world.comm.allgather(mine), strict=True)
    assembly.close()
    return {
        "steps_per_second": sum(rates), "others": float(np.mean(rates[1:])),
        "whole_run": world.size * steps / whole,
        "accuracy": found.accuracy, "staleness": float(np.mean(means)), "oldest": max(most),
        "torn": sum(torn), "skipped": sum(skipped), "steps": steps,
    }  # fmt: skip


def torn_copies(world, rounds: int, width: int = 4096) -> tuple[int, int]:
    """Torn copies used and torn copies seen in so many rounds a rank, over all ranks."""
    made = graph("one-peer-exponential", world.size)
    mixer = open_mixer(made, Layout((width,)), world, "asynchronous")
    draw, used, x = random.Random(world.rank), 0, float(world.rank)
    for t in range(rounds):
        ((out,),) = mixer.outbox(t)
        out[:, : width // 2] = x
        if draw.random() < 0.2:
            time.sleep(draw.random() * 1e-3)
        out[:, width // 2 :] = x
        mixer.start(Kind.GOSSIP, t)
        _, ((mixed,),) = mixer.finish()
        used += int(mixed.min() != mixed.max())
        x = float(mixed[0, 0]) + draw.choice((-1, 1))
    torn = mixer.torn
    mixer.close()
    totals = np.array(world.comm.allgather((used, torn))).sum(0)
    return int(totals[0]), int(totals[1])


def main() -> None:
    """Measure and print one JSON object, or lines for people."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--stretch", type=int, default=10, help="steps of a slow moment")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="fewer steps than the epochs have")
    parser.add_argument("--patterns", default="moving,one")
    parser.add_argument("--mixers", default="synchronous,asynchronous")
    parser.add_argument("--torn", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with mpigossip.world() as world:
        rows = {}
        for pattern in filter(None, options.patterns.split(",")):
            for mixer in options.mixers.split(","):
                rows[f"{pattern}, {mixer}"] = train(world, mixer, pattern, options)
        if options.torn:
            used, seen = torn_copies(world, options.torn)
            rows["torn"] = {"rounds": options.torn, "used": used, "seen": seen}
        if world.rank == 0:
            json.dump(rows, sys.stdout) if options.json else show(rows)
            print()


def show(rows: dict) -> None:
    """A line a run."""
    for name, row in rows.items():
        print(f"{name:22}", ", ".join(f"{key} {value:.4g}" for key, value in row.items()))


if __name__ == "__main__":
    main()
