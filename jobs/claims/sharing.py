"""Explain why one-peer runs on slow links take longer than on the virtual clock.

    python jobs/claims/sharing.py

The clock assumes that each message has the whole link of its receiver. But if some steps are slow,
a node that is early sends its next message while the receiver still receives the previous message
from a node that is late, and both messages share the receiver's link.

This program computes the times with messages that share the link evenly, for the steps, links and
slow steps of `real_links.py`, and prints them next to its measurements. The variant "admitted"
assumes that a receiver lets a message begin only after it has received the message of the previous
round. Headers are counted: a frame of 1,514 bytes carries 1,448 bytes of a message.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import parts  # noqa: E402
import seconds  # noqa: E402
from real_links import CELLS, LINKS, SEED, Link  # noqa: E402

FRAMES = 1514 / 1448
NODES = seconds.CELL.nodes


def simulated_seconds(
    link: Link, steps: int, vectors: int, ahead: bool, shared: bool, admit: bool
) -> float:
    """Return the seconds of ``steps`` steps on the one-peer graph.

    A step of a node ends when the node has computed, sent and received. As with MPI windows, a node
    may send for round k as soon as its receiver has left round k - 2.

    :param link: the link
    :param steps: number of steps
    :param vectors: number of vectors in the message of a step, each of the size of ResNet-50
    :param ahead: whether a node sends at the beginning of a step; otherwise after its computation
    :param shared: whether messages share the receiver's link
    :param admit: whether a receiver admits a message only after the message of the previous round
    """
    nodes = range(NODES)
    size = 4 * seconds.resnet().count * vectors * link.scale * FRAMES
    rate = link.megabits * 1e6 / 8
    span = (NODES - 1).bit_length()
    draws = parts.paces(NODES, SEED, seconds.SLOW, seconds.TIMES)
    paces = [seconds.EXPONENTIAL.compute_s * one for one in itertools.islice(draws, steps)]
    step = [0] * NODES
    computing = list(paces[0])
    remaining = [size] * NODES
    received: set[tuple[int, int]] = set()  # (receiver, round)
    now = 0.0
    while min(step) < steps:
        flows: dict[int, list[int]] = {}
        for i in nodes:
            k = step[i]
            reader = (i + 2 ** (step[i] % span)) % NODES
            free = step[reader] >= k - 1 and (not admit or k == 0 or (reader, k - 1) in received)
            if k < steps and remaining[i] and (ahead or not computing[i]) and free:
                flows.setdefault(reader, []).append(i)
        speed = {i: rate / (len(to) if shared else 1) for to in flows.values() for i in to}
        spans = [computing[i] for i in nodes if computing[i]]
        wait = min(spans + [remaining[i] / speed[i] for i in speed])
        now += wait
        for reader, to in flows.items():
            for i in to:
                remaining[i] = max(0.0, remaining[i] - speed[i] * wait)
                if remaining[i] < 1e-6 * size:
                    remaining[i] = 0.0
                    received.add((reader, step[i]))
        for i in nodes:
            computing[i] = max(0.0, computing[i] - wait) if computing[i] > wait + 1e-12 else 0.0
            if (
                step[i] < steps
                and not computing[i]
                and not remaining[i]
                and (i, step[i]) in received
            ):
                step[i] += 1
                if step[i] < steps:
                    computing[i] = paces[step[i]][i]
                    remaining[i] = size
    return now


def main() -> int:
    """Print the measured and the computed seconds of each one-peer run of links.jsonl."""
    runs = [json.loads(line) for line in LINKS.read_text("utf-8").splitlines()]
    for link, (method, vectors, ahead) in itertools.product(
        CELLS, (("dmsgd", 2, False), ("dsgd ahead", 1, True))
    ):
        (run,) = [x for x in runs if (x["gbit"], x["method"]) == (link.gbit, method)]
        kinds = {"alone": (False, False), "shared": (True, False), "admitted": (True, True)}
        flows = {
            name: simulated_seconds(link, run["steps"], vectors, ahead, *kind)
            for name, kind in kinds.items()
        }
        times = ", ".join(f"{name} {value:.0f} s" for name, value in flows.items())
        print(
            f"{link.gbit} Gbit/s, {1e3 * link.latency:g} ms, {method}, clock "
            f"{run['clock_s']:.0f} s, measured {run['measured_s']:.0f} s: {times}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
