"""What every route keeps (`stream.Route`), each alone between ranks, the CPU in a GPU's place."""

from functools import partial

import pytest
import torch

from mpigossip.mixing.base import Layout
from tests.mixing.device.test_windows import Messages

WIDTHS, ROUNDS = (512, 1024), 5
SPANS = [slice(0, 1024), slice(1024, 4096)]
"""Two pieces; the first area ends inside of the second one."""


def opened(comm, way):
    """A route to the right and from the left; the places at both; the areas to send."""
    from mpigossip.mixing.device import nccl
    from mpigossip.mixing.device.push import BySlot, DevicePush, Lane
    from mpigossip.mixing.host.push import PushWindow

    layout = BySlot(WIDTHS, devices=("cpu",) * len(WIDTHS))
    sizes = [layout.of(slot).sent_bytes for slot in range(len(WIDTHS))]
    lanes = [Lane(torch.device("cpu")) for _ in WIDTHS]
    areas = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    if way == "put":
        route = PushWindow(comm, sizes, 1, 20, outbox=False)
    else:
        nccl.Links = Messages
        made = {"device": DevicePush, "nccl": nccl.NcclPush}[way]
        route = made(comm, layout, lanes, 1, 20)
    return route, ((comm.rank + 1) % comm.size, 0), ((comm.rank - 1) % comm.size, 0), areas


def filled(areas, rank, t):
    for k, area in enumerate(areas):
        area.fill_((31 * rank + 7 * t + k) % 251 + 1)


def kept(comm, way):
    """Rounds to the right and from the left; what went against the contract."""
    from mpigossip.mixing.device import nccl

    links = nccl.Links
    route, to, (source, place), areas = opened(comm, way)
    nccl.Links, wrong, many = links, [], len(SPANS)
    signals, expected = route.signals, [torch.empty_like(area) for area in areas]
    signals.count_in_pieces(many)
    for t in range(ROUNDS):
        filled(areas, comm.rank, t)
        filled(expected, (comm.rank - 1) % comm.size, t)
        comm.Barrier()
        if signals.arrived(source, t * many):
            wrong.append(f"there before it was sent, round {t}")
        comm.Barrier()
        if hasattr(route, "begin"):
            route.begin(areas, [to], [source], t)
        for k, span in enumerate(SPANS):
            number = t * many + k
            flying = list(route.put(areas, span, [to], number))
            while any(request for request in flying if not request.Test()):
                pass
            route.sent([to], number)
            awaited(partial(signals.arrived, source, number))
            route.sync(number)
            for area, whole in enumerate(expected):
                if not torch.equal(route.inbox(t, place, area)[span], whole[span]):
                    wrong.append(f"bytes of round {t}, piece {k}, area {area}")
        wrong += freed(comm, route, to[0], source, t)
    route.close()
    return wrong


def awaited(there):
    from mpigossip.cluster.deadline import Deadline

    Deadline(20).wait(there, lambda: "a signal didn't come")


def freed(comm, route, reader, source, t):
    """The place of this round may be written again once its reader says so, and not before."""
    awaited(partial(route.signals.room, reader, t + 1))
    comm.Barrier()
    early = route.signals.room(reader, t + 2)
    comm.Barrier()
    route.signals.free([source], t + 2)
    if t == ROUNDS - 1:  # what nobody is going to ask for is taken in, as a mixer's end does
        route.signals.take_in_free([reader], t + 2)
    return [f"room for round {t + 2} that nobody gave"] if early else []


@pytest.mark.parametrize("way", ["put", "device", "nccl"])
def test_a_route_brings_pieces_in_order_between_signals(ranks, way):
    assert ranks(3)(kept, way) == [[], [], []]


def test_a_layout_by_slots_has_the_areas_of_the_test():
    assert [4 * width for width in WIDTHS] == [2048, 4096]
    assert Layout(WIDTHS).nbytes == 6144 and SPANS[0].stop < 2048 < SPANS[1].stop
