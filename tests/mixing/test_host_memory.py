"""Memory of messages on the host: which arrays are the same memory in which case."""

from types import SimpleNamespace

import pytest
import torch

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.host_memory import host_buffers
from mpigossip.mixing.lossy_wires import wire
from mpigossip.mixing.plan import chunks
from tests.cases import on_each


def memory(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def opened(name, *, shared, transport, outbox):
    """Open buffers of one vector; return them with the shared and the transport's memory."""
    layout = MessageLayout((1024,), wire=wire(name))
    areas = SimpleNamespace(own=memory(layout.nbytes), result=memory(layout.nbytes))
    sender = SimpleNamespace(outbox=memory(layout.sent_bytes) if outbox else None)
    buffers = host_buffers(layout, 0, 2, areas if shared else None, sender if transport else None)
    return layout, buffers, areas, sender.outbox


def address(array):
    return array.data_ptr()


CASES = [
    # wire, shared memory, transport, outbox of the transport
    ("fp32", True, False, False),
    ("fp32", True, True, False),
    ("fp32", False, True, False),
    ("fp32", False, True, True),
    ("qsgd", True, False, False),
    ("qsgd", True, True, False),
    ("qsgd", True, True, True),
    ("qsgd", False, True, False),
    ("qsgd", False, True, True),
]


@pytest.mark.parametrize("name, shared, transport, outbox", CASES)
def test_buffers_share_the_memory_that_the_table_states(name, shared, transport, outbox):
    layout, buffers, areas, sender_outbox = opened(
        name, shared=shared, transport=transport, outbox=outbox
    )
    lossy = name != "fp32"
    expected_own = areas.own if shared else sender_outbox if outbox and not lossy else None
    assert expected_own is None or address(buffers.own) == address(expected_own)
    assert address(buffers.out[0][0]) == address(buffers.own)
    assert (buffers.encoded is not None) == (lossy and transport)
    (sent,) = buffers.sent
    if lossy and transport:
        assert address(sent) == address(buffers.encoded[0]) != address(buffers.own)
        assert not outbox or address(sent) == address(sender_outbox)
    else:
        assert address(sent) == address(buffers.own)

    received = [memory(layout.sent_bytes)]
    if not lossy:
        buffers.add([0.5, 0.5], [received], chunks(layout, float("inf"))[0])
        result = areas.result if shared else received[0]
        assert address(buffers.result[0][0]) == address(result)
    if shared:
        assert address(buffers.memory) == address(areas.result)
    else:
        assert address(buffers.memory) not in map(address, [buffers.own, sent, *received])


@on_each("n", [2, 3, 6, 8, 64, 1024])
@pytest.mark.parametrize("name", ["bf16", "qsgd"])
def test_an_average_of_encoded_messages_receives_into_less_than_two_messages(name, n):
    """The encoded messages of all ranks are only gathered while they are few."""
    layout = MessageLayout((1 << 16,), wire=wire(name))
    received = []

    def swap(sent, into):
        storages = {a.untyped_storage().data_ptr(): a.untyped_storage() for a in into.values()}
        received.append(sum(storage.nbytes() for storage in storages.values()))
        for array in into.values():
            array.zero_()
        return 0.0

    buffers = host_buffers(layout, 0, n, None, SimpleNamespace(outbox=None))
    buffers.own.zero_()
    buffers.begin(0, average=True)
    buffers.average(SimpleNamespace(swap=swap), [1 / n] * n)
    assert 0 < max(received) < 2 * layout.nbytes
    gathers = len(received) == 1
    assert gathers == (n * layout.sent_bytes < 2 * layout.nbytes)
