"""Mixer of a node whose ranks all hold the whole model: its memory and its result."""

import pytest
import torch

from mpigossip.engine.gathered import Gathered
from mpigossip.graphs import graph
from mpigossip.groups.base import Single
from mpigossip.mixing import lossy_wires
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated

SIZE = 1024
VECTOR_BYTES = 4 * SIZE


@pytest.mark.parametrize("wire, vectors_held", [("fp32", 2), ("bf16", 3)])
def test_only_lossy_wires_hold_the_whole_vector_that_was_sent(wire, vectors_held):
    layout = MessageLayout((SIZE,), wire=lossy_wires.wire(wire))
    mixer = Gathered(layout, Single("cpu"), lambda shard: Simulated(graph("identity", 1), shard))
    own = torch.linspace(-1, 1, SIZE)
    mixer.outbox(0)[0][0][0] = own
    mixer.start(ExchangeKind.GOSSIP, 0)
    (sent,), (mixed,) = mixer.finish()
    expected = own if wire == "fp32" else own.bfloat16().float()
    assert torch.equal(sent[0][0], expected) and torch.equal(mixed[0][0], expected)
    assert mixer.memory()["gathered"] == vectors_held * VECTOR_BYTES
    mixer.close()
