"""Comparison of a rank's mixer with the simulator, round by round."""

import random
import time

import numpy as np
import torch

from mpigossip.graphs import GraphError, graph
from mpigossip.mixing import plan
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from tests.cases import with_world

GRAPHS = (
    "exponential",
    "one-peer-exponential",
    "one-peer-hypercube",
    "ring",
    "complete",
    "identity",
    "star",
    "random-matching",
    "base-3",
)
WEIGHTED = " weighted"
LAYOUT = MessageLayout(widths=(1024, 1024), vectors=2, scalars=1)


def fill(out, step, nodes):
    """Fill the outboxes of nodes with numbers that depend only on the step and the node."""
    for slot, segment in enumerate(out):
        for part, array in enumerate(segment):
            for row, node in enumerate(nodes):
                draw = np.random.default_rng([step, slot, part, node])
                array[row] = torch.from_numpy(draw.standard_normal(array.shape[1]))


def kinds_of(steps, seed):
    """Draw the kinds of exchange of some steps; two of three are GOSSIP."""
    draw = random.Random(seed)
    return [
        draw.choice([ExchangeKind.GOSSIP] * 4 + [ExchangeKind.GLOBAL, ExchangeKind.LOCAL])
        for _ in range(steps)
    ]


def graphs_for(n, names=GRAPHS):
    """Yield name and graph of those that exist for n nodes.

    With " weighted" after its name, node i of a graph has a weight in proportion to i + 1.
    """
    for name in names:
        try:
            made = graph(name.removesuffix(WEIGHTED), n)
            is_weighted = name.endswith(WEIGHTED)
            yield name, made.weighted(range(1, n + 1)) if is_weighted else made
        except GraphError:
            assert name == "one-peer-hypercube" and n & (n - 1)


def count_differences(mixer, kinds, layout=None, first=0, delay=0.004, into=None, also=None):
    """Run the same rounds with a rank's mixer and the simulator, then close it; count differences.

    :param layout: layout of the simulator; None: the mixer's
    :param into: array for the sums of most GOSSIP rounds
    :param also: function of both mixers, the step and whether the round is in flight that returns
        whether something else differs
    """
    (row,), t, differences = mixer.local_nodes, first, 0
    delays = random.Random(row)
    reference = Simulated(mixer.graph, layout or mixer.layout)
    for step, kind in enumerate(kinds):
        for each_mixer in (mixer, reference):
            fill(each_mixer.outbox(t), step, each_mixer.local_nodes)
        for each_mixer in (mixer, reference):
            each_mixer.start(kind, t, step)
            time.sleep(delays.random() * delay * (delays.random() < 0.2))
        differences += also(mixer, reference, step, True) if also else 0
        direct = into is not None and kind is ExchangeKind.GOSSIP and step % 3
        pairs = [*zip(mixer.finish(into if direct else None), reference.finish(), strict=True)]
        if direct and mixer._shared and not plan.is_average(mixer.graph, t):
            differences += pairs[1][0][0][0] is not into
        for got, expected in pairs:
            for segment, rows in zip(got, expected, strict=True):
                for array, every_row in zip(segment, rows, strict=True):
                    differences += not torch.equal(array[0].cpu(), every_row[row])
        time.sleep(delays.random() * delay * (delays.random() < 0.2))
        t += kind is ExchangeKind.GOSSIP
        differences += also(mixer, reference, step, False) if also else 0
    differences += mixer.bytes_sent[0] != reference.bytes_sent[row]
    mixer.close()
    return differences


@with_world
def compare(
    world, names, same_host, steps, first=0, delay=0.004, mutate=None, layout=LAYOUT, into=None
):
    """Compare windows with the simulator on every rank: {graph: number of differences}."""
    from mpigossip.mixing.synchronous import Synchronous

    differences = {}
    for name, made in graphs_for(world.size, names):
        mixer = Synchronous(
            made, layout, world, same_host=same_host, timeout_s=30 if mutate is None else 3
        )
        if same_host == "put" and len(name) % 2:  # otherwise the message is a single chunk
            mixer._transport.set_chunk_size(2048)
        if mutate is not None:
            mutate(mixer)
        differences[name] = count_differences(
            mixer, kinds_of(steps, seed=1), first=first, delay=delay, into=into
        )
    return differences
