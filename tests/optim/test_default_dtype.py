"""Programs that change torch's default type of floating-point numbers, in every use of it."""

import io

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.gathered import Gathered
from mpigossip.graphs import graph
from mpigossip.groups.base import Single
from mpigossip.groups.threads import ThreadGroup
from mpigossip.mixing import lossy_wires
from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import decode, encode
from mpigossip.training.precision import Precision
from tests.cases import on_each

STEPS = 6
SIZE = 1024
DEFAULTS = (torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)


def train(default, model_type, algorithm):
    """Return the model and the optimizer after steps with ``default`` as torch's default type."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(model_type)
    torch.set_default_dtype(default)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, algorithm)
    for step in range(STEPS):
        if step == STEPS // 2:  # a state is written and read, too
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file))
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
        optimizer.zero_grad()
        model(x.to(model_type)).float().square().mean().backward()
        optimizer.step()
    with optimizer.averaged():
        model(x.to(model_type))
    return model, optimizer


@on_each("algorithm", ["dsgd", "dsgt", "dmsgd"])
@on_each("model_type", [torch.float32, torch.bfloat16])
@on_each("default", DEFAULTS)
def test_a_loop_does_not_depend_on_the_default_type(algorithm, model_type, default):
    expected, reference = train(torch.float32, model_type, algorithm)
    model, optimizer = train(default, model_type, algorithm)
    assert optimizer.vector.x[0].dtype == torch.float32
    assert torch.equal(optimizer.vector.x[0], reference.vector.x[0])
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.dtype == model_type and torch.equal(p, q)


@on_each("wire", ["bf16", "qsgd", "fp4", "sign", "top-k"])
@on_each("default", DEFAULTS)
def test_messages_do_not_depend_on_the_default_type(wire, default):
    torch.set_default_dtype(default)
    layout = MessageLayout((SIZE,), wire=lossy_wires.wire(wire, density=0.3))
    vector = torch.linspace(-1, 1, SIZE, dtype=torch.float32)[None]
    encoded = torch.zeros(layout.slot_sent_bytes, dtype=torch.uint8)
    encode(layout, [(vector,)], [0], 0, [encoded])  # this also rounds the vector itself
    decoded = decode(layout, encoded, 0, slice(0, SIZE))
    assert decoded.dtype == torch.float32 and torch.equal(decoded, vector)


@on_each("default", DEFAULTS)
def test_memory_of_slots_and_loss_scales_is_float32(default):
    torch.set_default_dtype(default)
    threads = ThreadGroup(2)
    arrays = [*Single().zeros(1, 4), *threads.zeros(1, 4)]
    threads.close()
    arrays += Precision("fp16", ["cpu"], 1).scales
    mixer = Gathered(
        MessageLayout((SIZE,)), Single(), lambda shard: Simulated(graph("identity", 1), shard)
    )
    arrays += mixer.outbox(0)[0]
    assert {array.dtype for array in arrays} == {torch.float32}
