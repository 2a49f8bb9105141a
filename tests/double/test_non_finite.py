"""Check of messages for NaN on the double: the progress thread makes it, and nothing is sent."""

import re
import sys
from collections import Counter

import pytest

from tests.cases import naming, with_world
from tests.double import active
from tests.double.devices import aware

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")

PROGRAM = """
import sys
import torch
import mpigossip
from mpigossip.mixing.transports.messages import Messages
from mpigossip.mixing.transports.windows import Windows

from tests.double.devices import aware

def train(world, way):
    torch.manual_seed(0)
    device = f"cuda:{world.rank}"
    model = torch.nn.Linear(64, 64, device=device)
    local = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = mpigossip.Gossip(world, model, local, algorithm="dsgd", exchange=way)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(1, 64, device=device)).sum().backward()
        if step == 3 and world.rank == 1:
            model.bias.grad[5] = float("nan")
            for kind in (Messages, Windows):
                kind.send = lambda *_: print("SENT", flush=True) or []
        optimizer.step()

with mpigossip.world() as world, aware():
    train(world, sys.argv[1])
"""


@pytest.mark.parametrize("way", ["windows", "messages", "host"])
def test_a_non_finite_message_is_named_and_never_sent(mpirun, way):
    done = mpirun(2, [sys.executable, "-c", PROGRAM, way], timeout=120)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("mpigossip: rank")]
    assert len(said) == 1 and re.search(
        naming("rank 1", "step 3: 1", "node 1", "NaN", "bias"), said[0]
    ), said
    assert "SENT" not in done.stdout and "GPU memory" not in said[0]


@with_world
def waits_of_a_step(world, way):
    """Return the waits of the main thread in a step of a loop, by function."""
    import torch

    import mpigossip
    from tests.double.waits import counted

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, device=f"cuda:{world.rank}")
    local = torch.optim.SGD(model.parameters(), 0.1)
    with aware():
        optimizer = mpigossip.Gossip(world, model, local, algorithm="dsgd", exchange=way)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 64, device=f"cuda:{world.rank}")).sum().backward()
            with counted() as waits:
                optimizer.step()
        optimizer.close()
    return Counter(waits)


@pytest.mark.parametrize("way", ["windows", "host"])
def test_the_main_thread_does_not_wait_to_check_a_message(ranks, way):
    for waits in ranks(2)(waits_of_a_step, way, timeout=120):
        assert "check_message" not in waits, waits
