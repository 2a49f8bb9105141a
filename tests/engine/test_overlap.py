"""Adapt-then-combine by blocks of layers gives the bits of whole messages, and travels early."""

import random
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.engine.overlap import Blocks
from mpigossip.engine.vector import flatten
from mpigossip.graphs import graph
from mpigossip.mixing import codes, plan
from mpigossip.mixing import wire as wires
from mpigossip.mixing.base import ByBlocks, Kind, Layout
from mpigossip.mixing.simulated import Simulated
from mpigossip.training import assemble
from tests.mixing.test_windows import fill
from tests.runs.test_run import job

CHUNK, SIZE = 4096, 4096
"""Columns and bytes of a piece, as short as can be, so that small messages have several."""
SETTINGS = [
    "algorithm.name=dmsgd log.consensus_every=3",
    "algorithm.name=dmsgd-vanilla algorithm.local=nesterov algorithm.weight_decay=1e-3 "
    "algorithm.decay_all=false algorithm.accumulate=2",
    "algorithm.name=dsgd algorithm.local=adamw schedule.lr=0.01 algorithm.decoupled_decay=0.01 "
    "node.wire=bf16 cadence.name=gossip-pga cadence.period=3",
    "algorithm.name=dsgt graph.name=exponential node.wire=qsgd",
    "algorithm.name=slowmo graph.name=complete cadence.name=gossip-pga cadence.period=2",
]


@contextmanager
def short_chunks():
    kept, plan.CHUNK = plan.CHUNK, CHUNK
    wires.CHUNK = CHUNK
    try:
        yield
    finally:
        plan.CHUNK = wires.CHUNK = kept


# -- the mixer ---------------------------------------------------------------------------------


def filled_late(comm, wire, name):
    """Rounds whose blocks are filled one by one, or not at all before finish, some as a whole."""
    from mpigossip.cluster.ranks import World
    from mpigossip.mixing.windows import Windows

    torch.set_num_threads(1)
    layout = Layout((17 * 512 + 4096,), vectors=2, wire=codes.wire(wire))
    delays, wrong, made = random.Random(comm.rank), 0, graph(name, comm.size)
    with short_chunks():
        world = World(comm)
        mixer = Windows(made, layout, world, same_host="put", timeout_s=30)
        mixer._slots.cut(SIZE)
        reference = Simulated(made, layout)
        assert isinstance(mixer, ByBlocks) and not isinstance(reference, ByBlocks)
        assert len(mixer.blocks) > 2 and mixer.blocks[-1].stop == layout.widths[0]
        for t in range(12):
            order = random.Random(t).sample(range(len(mixer.blocks)), len(mixer.blocks))
            (mine,), everyone = mixer.outbox(t), reference.outbox(t)
            fill(everyone, t, range(comm.size))
            own = [part[comm.rank].clone() for part in everyone[0]]
            if t % 4 == 3:
                fill([mine], t, [comm.rank])
                mixer.start(Kind.GOSSIP, t)
            else:
                mixer.start_by_blocks(t, t, order)
                for block in order:
                    for part, values in zip(mine, own, strict=True):
                        part[0, mixer.blocks[block]] = values[mixer.blocks[block]]
                    if t % 4:
                        mixer.filled(block)
                    time.sleep(delays.random() * 0.004 * (delays.random() < 0.5))
            reference.start(Kind.GOSSIP, t)
            (_, (mixed,)), (_, (expected,)) = mixer.finish(), reference.finish()
            for array, rows in zip(mixed, expected, strict=True):
                wrong += not torch.equal(array[0], rows[comm.rank])
        wrong += mixer.bytes_sent[0] != reference.bytes_sent[comm.rank]
        mixer.outbox(12)
        mixer.start_by_blocks(12, 12, order)  # a run that stops in mid-backward can close
        mixer.filled(order[0])
        mixer.close()
        world.close()
    return wrong


@pytest.mark.parametrize("name", ["exponential", "complete"])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_rounds_filled_block_by_block_equal_the_simulator(ranks, wire, name):
    assert ranks(3)(filled_late, wire, name) == [0, 0, 0]


# -- training ------------------------------------------------------------------------------------


def by_blocks(comm, settings, overlap):
    """Parameters after some steps, and how many blocks were sent during each backward."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    with short_chunks():
        world = World(comm)
        node = f"node.same_host=put node.timeout_s=30 node.overlap={overlap}"
        assembly = assemble.assemble(job(settings, node), world, comm.size)
        trainer = assembly.trainer
        mixer = trainer.mixer
        mixer._slots.cut(SIZE)
        filled, early = mixer.filled, []
        mixer.filled = lambda block: (early.append(trainer.index), filled(block))
        for _ in range(5):
            trainer.step()
        full = trainer.replicas.full[0].clone().numpy()
        blocks = len(mixer.blocks)
        assembly.close()
        world.close()
    return full, [early.count(step) for step in range(5)], blocks


@pytest.mark.parametrize("settings", SETTINGS)
def test_layers_sent_during_backward_train_to_the_same_bits(ranks, settings):
    n = 3
    assembly = assemble.assemble(job(settings), Alone(), n)
    for _ in range(5):
        assembly.trainer.step()
    expected = assembly.trainer.replicas.full[0].clone().numpy()
    assembly.close()
    got = ranks(n)(by_blocks, settings, "true")
    assert (np.concatenate([full for full, _, _ in got]) == expected).all()
    for _, early, blocks in got:
        assert blocks > 4
        # none in steps that measure the whole gradient, nor in global rounds
        assert set(early) == {0, blocks} and early[4] == blocks, early


def test_without_overlap_nothing_is_sent_during_backward(ranks):
    (with_it, _, _), *_ = ranks(2)(by_blocks, SETTINGS[0], "true")
    (without, early, _), *_ = ranks(2)(by_blocks, SETTINGS[0], "false")
    assert early == [0] * 5 and (with_it == without).all()


# -- which gradient is final when ------------------------------------------------------------------


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.use, self.again = (0, 1, 2), False

    def forward(self, x):
        layers = self.first, self.second, self.last
        for k in self.use:
            x = layers[k](x)
        return x


class Nothing:
    def __init__(self, blocks):
        self.blocks = blocks


def watched(module, passes=1):
    """The blocks in the order in which they were ready, and those said beforehand."""
    flat = flatten(module)
    row, gradient = torch.randn(1, flat.size), torch.zeros(1, flat.size)
    flat.attach(module, row[0], gradient[0])
    # a block a layer, then the columns of the last bias and of the padding
    ends = [flat.offsets[2], flat.offsets[4], flat.offsets[5], flat.size]
    columns = tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))
    found = Blocks(Nothing(columns), [None] * 4, flat, module)
    ready, values = [], []
    with found.watched(passes, lambda b: (ready.append(b), values.append(gradient.clone()))):
        for _ in range(passes):
            module(torch.ones(4, 16)).sum().backward()
    for block, then in zip(ready, values, strict=True):
        assert torch.equal(then[:, columns[block]], gradient[:, columns[block]])
    found.close()
    module(torch.ones(4, 16)).sum().backward()
    assert len(ready) == 4
    return ready, found.order


def test_blocks_are_ready_in_backward_order_and_each_once():
    for passes in (1, 3):
        ready, order = watched(Three(), passes)
        assert sorted(ready) == [0, 1, 2, 3] and set(ready[:2]) == {2, 3} and ready[2:] == [1, 0]
        assert order == (3, 2, 1, 0)


def test_layers_that_get_no_gradient_are_ready_at_the_end():
    module = Three()
    module.use = (0, 2)
    ready, _ = watched(module)
    assert ready[-1] == 1 and len(ready) == 4


def test_a_gradient_that_changes_after_it_was_sent_is_an_error():
    module = Three()
    flat = flatten(module)
    row, gradient = torch.randn(1, flat.size), torch.zeros(1, flat.size)
    flat.attach(module, row[0], gradient[0])
    found = Blocks(Nothing((slice(0, 64), slice(64, flat.size))), [None] * 2, flat, module)
    with (
        pytest.raises(JobError, match=r"last.bias changed.*node.overlap = false"),
        found.watched(1, lambda block: None),
    ):
        for _ in range(2):
            module(torch.ones(4, 16)).sum().backward()
