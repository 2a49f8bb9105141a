#!/usr/bin/env python
"""What of exchanges by fragments is hidden behind the next steps, compute stood for by sleep.

    tools/labs/net.sh up 8 200mbit
    tools/labs/net.sh run 8 python tools/bench/fragments.py
    tools/labs/net.sh down

A step of the slowest rank with no exchange, with fragments that are waited for, and with fragments
that are taken in some steps later. Hidden: the share of waiting for others that is gone, and of the
step's time, copies and sums included, which ranks that share a core do one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import mpigossip

WAYS = {
    "neighbours": {"algorithm": "dsgd", "cadence": "every"},
    "all": {"algorithm": "diloco", "cadence": "cpsgd"},
}


def step_s(world, options, args, **cadence) -> tuple[float, float]:
    """Seconds of a step of the slowest rank, and the most that one waits for others in it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(args.parameters // 1000, 1000, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = mpigossip.Gossip(world, model, inner, **options, **cadence)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(args.period):
        optimizer.step()
    world.agree(0)
    began, idle = time.perf_counter(), 0.0
    for _ in range(args.periods * args.period):
        time.sleep(args.sleep)
        optimizer.step()
        idle += optimizer.record.seconds["idle_s"]
    mine = time.perf_counter() - began
    optimizer.close()
    each = 1e6 * args.periods * args.period
    return world.agree(int(1e6 * mine)) / each, world.agree(int(1e6 * idle)) / each


def main() -> None:
    """A line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--period", type=int, default=16)
    parser.add_argument("--delay", type=int, default=4)
    parser.add_argument("--periods", type=int, default=3, help="measured")
    parser.add_argument("--sleep", type=float, default=0.05, help="seconds of a step's compute")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    with mpigossip.world() as world:
        for name in args.ways:
            options = WAYS[name]
            rhythm = {"period": args.period, "fragments": args.fragments}
            found = []
            for _ in range(args.repeats):
                none, _ = step_s(world, {"algorithm": "dsgd", "cadence": "never"}, args)
                waited, idle = step_s(world, options, args, **rhythm)
                later, left = step_s(world, options, args, **rhythm, delay=args.delay)
                gone = (waited - later) / (waited - none)
                found.append((none, waited, later, idle, left, 1 - left / idle, gone))
            none, waited, later, idle, left, hidden, gone = map(
                statistics.median, zip(*found, strict=True)
            )
            if world.rank == 0:
                print(
                    f"{name}: {world.size} nodes, {1000 * none:.1f} ms a step without exchange, "
                    f"{1000 * waited:.1f} waited for ({1000 * idle:.1f} idle), {1000 * later:.1f} "
                    f"with a delay ({1000 * left:.2f} idle); hidden {100 * hidden:.1f} % of "
                    f"the waiting, {100 * gone:.1f} % of the step's lengthening",
                    flush=True,
                )


if __name__ == "__main__":
    main()
