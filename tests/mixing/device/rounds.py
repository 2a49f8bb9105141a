"""Comparison of windows for GPU memory with the simulator, round by round."""

from dataclasses import replace

import torch

from mpigossip.mixing.base import MessageLayout
from mpigossip.mixing.lossy_wires import wire
from tests.cases import with_world
from tests.mixing.rounds import count_differences, graphs_for, kinds_of

WIDTHS = (2048, 2048)


def compare(*args, **kwargs):
    """Call `compared`, then restore the package, because the rank's process runs other tests."""
    from mpigossip.mixing import synchronous
    from mpigossip.mixing.device import buffers
    from mpigossip.mixing.transports import probe

    proven = probe.gpu_mpi_works
    sizes = (synchronous.STAGING_BYTES, buffers.SHARE)
    try:
        return compare_on_device(*args, **kwargs)
    finally:
        probe.gpu_mpi_works = proven
        synchronous.STAGING_BYTES, buffers.SHARE = sizes


def other_mean(mixer, reference, step, on_its_way):
    """Return whether vectors of odd lengths have another average; only some steps test this."""
    if step % 6 != (1 if on_its_way else 4):
        return False
    device = mixer.layout.devices[0]
    size, target = ((1, "cpu"), (2501, device), (7, device))[step // 2 % 3]
    rows = torch.randn(mixer.n, size, generator=torch.Generator().manual_seed(step))
    got = mixer.mean(rows[list(mixer.local_nodes)].to(target))
    return got.device != torch.device(target) or not torch.equal(got.cpu(), reference.mean(rows))


@with_world
def compare_on_device(
    world, names, memory, steps, wire_name="fp32", chunk=4096, first=0, device="cpu", proofs=None
):
    """Return the number of differences by graph, and the transports to the neighbours."""
    from mpigossip.mixing import synchronous
    from mpigossip.mixing.device import buffers
    from mpigossip.mixing.synchronous import Synchronous
    from mpigossip.mixing.transports import probe

    synchronous.STAGING_BYTES = chunk
    buffers.SHARE = 6000
    able = {memory} & {"windows", "messages"} if proofs is None else proofs
    if device == "cpu":  # the CPU replaces a device whose memory MPI accesses
        probe.gpu_mpi_works = lambda comm, devices, way, limit_s: (way in able, "the CPU stands in")
    options = {"vectors": 2, "scalars": 1, "wire": wire(wire_name, 127, 0.1, 3)}
    layout = MessageLayout(WIDTHS, **options)
    device_layout = replace(layout, devices=(device.format(rank=world.rank),) * len(WIDTHS))
    differences = {}
    routes = {}
    for name, made in graphs_for(world.size, names):
        mixer = Synchronous(
            made, device_layout, world, exchange=memory, timeout_s=30, on_devices=True
        )
        routes |= mixer.routes
        differences[name] = count_differences(
            mixer, kinds_of(steps, seed=2), layout, first, also=other_mean
        )
        mixer.close()  # a second time
    return differences, routes
