"""Order of streams under stress: every way between ranks, with each stream put to sleep in turn.

`stress.py NAME SECONDS [--rehearse]`, started by check.py on several ranks that share the GPU: rank
0 prints one line, "RESULT " and JSON. A wait that is missing shows as old numbers; a mutant without
one has to be caught, or the stress is none. On the double nothing sleeps: there its checker of
orders is what finds the mutant.
"""

import hashlib
import os
import random
import sys
import time
from functools import partial

from first import clock
from ranks import Place, here, said

WIDTHS = (1 << 16, 3 << 14)


def naps(place: Place, seed: int):
    """A function that lets the current stream sleep for 1 to 20 ms, not every time."""
    import torch

    draw = random.Random(seed)
    cycles = 0.0 if place.rehearsed else clock(place)

    def nap() -> None:
        if cycles and draw.random() < 0.7:
            torch.cuda._sleep(int(cycles * draw.uniform(0.001, 0.02)))

    return nap


def rounds(place: Place, w, memory: str, count: int, mutate=lambda mixer: None):
    """Wrong arrays in so many rounds by one way, the rounds that were run, and the way."""
    import torch

    from mpigossip.graphs import graph
    from mpigossip.mixing.base import Kind, Layout
    from mpigossip.mixing.simulated import Simulated
    from mpigossip.mixing.windows import Windows

    options = {"vectors": 2, "scalars": 1}
    made, devices = graph("exponential", w.size), (place.device,) * len(WIDTHS)
    layout = Layout(WIDTHS, devices=devices, **options)
    mixer = Windows(made, layout, w, gpu_window=memory, timeout_s=40, on_devices=True)
    reference, nap = Simulated(made, Layout(WIDTHS, **options)), naps(place, w.rank)
    mutate(mixer)
    ends, wrong, ran, t = time.monotonic() + place.seconds / 3, 0, 0, 0
    for step in range(count):
        if w.agree(int(time.monotonic() > ends)):
            break
        kind = (Kind.GOSSIP, Kind.GOSSIP, Kind.GLOBAL, Kind.LOCAL)[step % 4]
        mine, every = mixer.outbox(t), reference.outbox(t)
        pairs = []
        for slot, parts in enumerate(every):
            for part, array in enumerate(parts):
                draw = torch.Generator().manual_seed(1000 * step + 10 * slot + part)
                array.copy_(torch.randn(array.shape, generator=draw, dtype=array.dtype))
                row = array[w.rank : w.rank + 1].to(place.device)
                pairs.append((mine[slot][part], row))
        nap()  # what fills the outbox comes late, and the host doesn't wait for it
        for target, row in pairs:
            target.copy_(row)
        for lane in mixer._slots.lanes:
            for stream in (lane.out, lane.into):
                with torch.cuda.stream(stream):
                    nap()
        for one in (mixer, reference):
            one.start(kind, t, step)
        nap()
        found, expected = mixer.finish()[1], reference.finish()[1]
        for got, rows in zip(found, expected, strict=True):
            for array, row in zip(got, rows, strict=True):
                wrong += not torch.equal(array[0].cpu(), row[w.rank])
        ran, t = step + 1, t + (kind is Kind.GOSSIP)
    return wrong, ran, next(iter(mixer.routes.values())).partition(" ")[0], mixer


def stress(place: Place, memory: str):
    """Wrong arrays of all ranks by one way."""
    from mpigossip.cluster.ranks import world

    with world() as w:
        wrong, ran, way, mixer = rounds(place, w, memory, place.size(60, 8))
        everyone = w.gather(wrong)
        said([sum(everyone) if everyone else 0, ran, way], w)
        mixer.close()


def mutant(place: Place):
    """The same without the wait for what fills the outbox: what gave it away, or nothing."""
    import torch

    from mpigossip.cluster.ranks import world

    def forget(mixer) -> None:
        """The event is recorded on a stream where nothing is under way."""
        for lane in mixer._slots.lanes:
            quiet = torch.cuda.Stream(lane.device)
            lane.ready = quiet.record_event

    with world() as w:
        try:
            wrong, ran, _, _ = rounds(place, w, "auto", place.size(20, 4), forget)
            found = [f"{wrong} wrong arrays on rank 0 in {ran} rounds", wrong > 0]
        except RuntimeError as error:
            found = [str(error)[:120], "nothing stands between them" in str(error)]
        said(found, w)
        time.sleep(2)  # the other rank finds it, too
        os._exit(0)  # its memory is in no known state


def digests(place: Place):
    """Parameters after some steps by each way: the same bits on every way, for two methods."""
    from mpigossip.cluster.ranks import world
    from tests.test_gpu import settings_of, trained

    found = {}
    with world() as w:
        for name in ("dmsgd", "sgp"):
            for way in ("auto", "host"):
                settings = [*settings_of(name), f"node.gpu_window={way}"]
                full = trained(w, w.size, "mlp", place.slots(1), settings, place.size(20, 4))
                every = w.gather(hashlib.sha256(full.numpy().tobytes()).hexdigest())
                found[f"{name} {way}"] = hashlib.sha256("".join(every or ()).encode()).hexdigest()
        said(found, w)


STRESSED = {
    "stress-auto": partial(stress, memory="auto"),
    "stress-host": partial(stress, memory="host"),
    "mutant": mutant,
    "digests": digests,
}


if __name__ == "__main__":
    STRESSED[sys.argv[1]](here(float(sys.argv[2])))
