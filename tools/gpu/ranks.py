"""What check.py measures on several ranks, started by it.

`ranks.py NAME SECONDS [--rehearse]`: rank 0 prints one line, "RESULT " and JSON.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where measurements run, and how large they are."""

    device: str
    rehearsed: bool
    """on the CPU, or on the double of a GPU: small, and without a bar"""
    seconds: float = 60.0
    """what a measurement may take"""

    def size(self, real: int, small: int) -> int:
        """``real``, or ``small`` in a rehearsal."""
        return small if self.rehearsed else real

    def synchronize(self) -> None:
        """Wait for the GPU."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def slots(self, count: int) -> str:
        """`node.devices` of so many slots here."""
        return f"cpu:{count}" if self.device == "cpu" else "cuda:" + ",".join("0" * count)


def here(seconds: float) -> Place:
    """The place that the command line names: this GPU; small on the double; smallest on a CPU."""
    rehearsed = "--rehearse" in sys.argv
    on_cpu = rehearsed and "MPIGOSSIP_DOUBLE" not in os.environ
    return Place("cpu" if on_cpu else "cuda:0", rehearsed, seconds)


def median_seconds(work: Callable[[], None], repeats: int, before: Callable = lambda: None):
    """Median time of a call, after two that don't count."""
    times = []
    for k in range(repeats + 2):
        before()
        began = time.perf_counter()
        work()
        times += [time.perf_counter() - began] * (k >= 2)
    return sorted(times)[len(times) // 2]


def rank_accuracy(place: Place):
    """Worst relative difference from the CPU reference: all algorithms, L = 1 and 2.

    Whose it is, the difference, how many were compared in time, and how many there are.
    """
    import torch

    from mpigossip import algorithms
    from mpigossip.cluster.ranks import Alone, world
    from tests.test_gpu import STEPS, difference, settings_of, trained

    ends = time.monotonic() + place.seconds - 10
    found, steps = {}, place.size(STEPS, 2)
    names = list(algorithms.BUILDERS)[: place.size(100, 3)]
    cases = [(n, m, slots) for n in names for m in ("mlp", "lenet") for slots in (1, 2)]
    with world() as w:
        for name, model, slots in cases:
            if w.agree(int(time.monotonic() > ends)):
                break
            full = trained(w, w.size, model, place.slots(slots), settings_of(name), steps)
            all_rows = w.gather(full)
            if w.rank:
                continue
            cpu = f"cpu:{slots}"
            expected = trained(Alone(), w.size, model, cpu, settings_of(name), steps)
            key = f"{name}, {model}, L = {slots}"
            found[key] = difference(torch.cat(all_rows), expected)
        worst = max(found.items(), key=lambda pair: pair[1], default=("none", 0.0))
        said([*worst, len(found), len(cases)], w)


def rank_exchange(place: Place, memory: str):
    """Seconds of exchanges of one vector between two ranks, and of the copies that bound them."""
    import torch

    from mpigossip.cluster.ranks import world
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import Kind, Layout
    from mpigossip.mixing.windows import Windows

    with world() as w:
        # two messages a rank lie in shared memory, which is small in some containers
        room = int(shutil.disk_usage("/dev/shm").free * 0.9) // (2 * 4 * w.size)
        width = min(place.size(100 << 20, 1 << 18), w.broadcast(room) // 512 * 512)
        pair = graph("one-peer-exponential", w.size)
        one = torch.ones(width, device=place.device)
        two = torch.empty_like(one)
        host = torch.empty(width, pin_memory=not place.rehearsed)

        def timed(work):
            def whole():
                work()
                place.synchronize()

            return median_seconds(whole, place.size(9, 2), w.barrier)

        found = {"bytes": 4 * width, "copy": timed(lambda: two.copy_(one))}
        found["pinned"] = timed(lambda: host.copy_(one, non_blocking=True))
        layout = Layout((width,), devices=(place.device,))
        mixer = Windows(pair, layout, w, gpu_window=memory, on_devices=True)
        clock = iter(range(1000))

        def round_of():
            t = next(clock)
            mixer.outbox(t)
            mixer.start(Kind.GOSSIP, t)
            mixer.finish()

        found["round"], found["route"] = timed(round_of), mixer.routes[1 - w.rank]
        said(found, w)
        mixer.close()


def rank_overlap(place: Place, model: str):
    """Median step of a model with an `ahead` method, with and without an exchange."""
    from single import model_of

    from mpigossip.cluster.ranks import world
    from mpigossip.training import assemble

    found = {}
    with tempfile.TemporaryDirectory() as folder, world() as w:
        source, settings, _ = model_of(place, model, Path(folder))
        settings += [f"node.devices={place.slots(1)}", "log.consensus_every=0"]
        settings += ["algorithm.name=dsgd", "algorithm.style=awc", "node.precision=bf16"]
        for name in ("identity", "one-peer-exponential"):
            job = assemble.load(source, [*settings, f"graph.name={name}"])
            assembly = assemble.assemble(job, w, w.size)

            # always the same batches: what is compared is computing and exchanging
            first = assembly.trainer.settings.batches(0)
            assembly.trainer.settings.batches = lambda step, first=first: first

            def step(trainer=assembly.trainer):
                trainer.step()
                place.synchronize()

            found[name] = median_seconds(step, place.size(12, 1), w.barrier)
            assembly.close()
            del assembly, step, first
        said(found, w)


def said(result, world) -> None:
    """Rank 0's line for check.py, before anything is closed."""
    if world.rank == 0:
        print("\nRESULT " + json.dumps(result), flush=True)


RANKED = {
    "accuracy": rank_accuracy,
    "exchange-auto": partial(rank_exchange, memory="auto"),
    "exchange-host": partial(rank_exchange, memory="host"),
    "overlap-resnet50": partial(rank_overlap, model="resnet50"),
    "overlap-gpt": partial(rank_overlap, model="gpt"),
}


if __name__ == "__main__":
    RANKED[sys.argv[1]](here(float(sys.argv[2])))
