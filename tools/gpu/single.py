"""What gpu_check.py measures in one process each: a device error there leaves the others alone.

`single.py NAME SECONDS [--rehearse]` prints one line, "RESULT " and JSON: what was measured, and
whether it reaches its bar (null: no bar).
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from ranks import Place, median_seconds


def combining(place: Place):
    """Bytes moved by the sum against bytes moved by a copy."""
    import torch

    from mpigossip.mixing.combine import combine
    from mpigossip.mixing.kernels import elementwise

    width = place.size(100 << 20, 1 << 18)
    one, two = (torch.ones(1, width, device=place.device) for _ in range(2))
    out = torch.empty_like(one)

    def timed(work):
        return median_seconds(lambda: (work(), place.synchronize()), 9)

    copy, total = timed(lambda: out.copy_(one)), timed(lambda: combine([0.5, 0.5], [one, two], out))
    share = (3 * 4 * width / total) / (2 * 4 * width / copy)
    how = "fused" if elementwise.usable(out.device) else "torch, in several passes"
    said = f"{share:.0%} of {8 * width / copy / 1e9:.0f} GB/s ({how})"
    return said, share >= 0.85


def one_pass(place: Place):
    """Bytes that DmSGD's send and receive move, in one pass each, against a copy's."""
    import torch

    from mpigossip import algorithms
    from mpigossip.algorithms.base import Step
    from mpigossip.mixing.base import Kind
    from mpigossip.mixing.kernels import onepass

    width = place.size(100 << 20, 1 << 18)
    method, step = algorithms.build("dmsgd", None, {}, 0), Step(0, 0, Kind.GOSSIP, 0.1)
    x, g, *out = (torch.ones(1, width, device=place.device) for _ in range(4))
    state = method.init(x)
    parts = tuple(out)

    def both():
        onepass.send(method.send, x, g, state, parts, step, local=False)
        onepass.receive(method.receive, x, g, state, parts, parts, step)

    def timed(work):
        return median_seconds(lambda: (work(), place.synchronize()), 9)

    copy, total = timed(lambda: out[0].copy_(x)), timed(both)
    # send reads x, m, g and writes two vectors; receive reads two and writes x and m
    share = (9 * 4 * width / total) / (2 * 4 * width / copy)
    how = "fused" if onepass._worth(x) and not onepass._plain else "torch, in several passes"
    return f"{share:.0%} of device copy bandwidth ({how}, {total * 1e3:.2f} ms)", None


def replicas_of(place: Place, model: str, batch: int, slots: int, graphs: str):
    """A run of one node whose slots share the GPU."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble

    devices = f"cpu:{slots}" if place.rehearsed else "cuda:" + ",".join("0" * slots)
    settings = [f"data.batch={batch}", f"data.samples={batch * slots * 4}", "data.source=synthetic"]
    settings += [f"node.devices={devices}", "log.consensus_every=0"]
    settings += [] if place.rehearsed else [f"node.cuda_graphs={graphs}"]
    return assemble.assemble(assemble.load({"model": {"name": model}}, settings), Alone(), 1)


def launching(place: Place):
    """Host time to begin the passes of eight slots."""
    if place.rehearsed:
        return "a CPU has no graphs", None
    assembly = replicas_of(place, "resnet20", 16, 8, "always")
    assembly.trainer.step()
    batches = assembly.loader.step(1)
    captured = assembly.trainer.replicas._captured
    taken = median_seconds(lambda: captured.launch(batches), 20, place.synchronize)
    assembly.close()
    return f"{taken * 1e3:.2f} ms", taken <= 2e-3


def graphs(place: Place):
    """Step time of a captured and of an eager ResNet-20."""
    times = {}
    for how in ("never", "always"):
        assembly = replicas_of(place, "resnet20", place.size(128, 4), 1, how)
        step = assembly.trainer.step
        times[how] = median_seconds(lambda s=step: (s(), place.synchronize()), place.size(20, 2))
        assembly.close()
    speed = times["never"] / times["always"]
    said = f"{speed:.2f} x ({times['never'] * 1e3:.1f} ms eager, {times['always'] * 1e3:.1f} ms)"
    return said, None


def from_jpegs(place: Place):
    """ResNet-50 on random crops of JPEGs from an HDF5 pack: images/s, waiting for data."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.store.packing import pack
    from mpigossip.training import assemble

    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(Path(folder) / "images", place.size(1024, 48))
        packed = pack(Path(folder) / "images", Path(folder) / "images.h5")
        batch, side = place.size(256, 4), place.size(224, 32)
        settings = [f"data.source={packed}", f"data.batch={batch}", "data.augment=resized-crop"]
        settings += [f"data.image_size={side}", f"data.workers={max(1, (os.cpu_count() or 2) - 1)}"]
        settings += [f"node.devices={place.device if not place.rehearsed else 'cpu:1'}"]
        settings += ["log.consensus_every=0", "node.precision=auto"]
        made = assemble.load({"model": {"name": "resnet50"}}, settings)
        assembly = assemble.assemble(made, Alone(), 1)
        waited, batches = [0.0], assembly.trainer.settings.batches

        def fetch(step):
            began = time.perf_counter()
            found = batches(step)
            waited[0] += time.perf_counter() - began
            return found

        assembly.trainer.settings.batches = fetch
        for _ in range(2):
            assembly.trainer.step()
        place.synchronize()
        waited[0], began, steps = 0.0, time.perf_counter(), 0
        while steps < place.size(30, 2) and time.perf_counter() - began < place.seconds / 2:
            assembly.trainer.step()
            steps += 1
        place.synchronize()
        took = time.perf_counter() - began
        assembly.close()
    said = f"{steps * batch / took:.0f} images/s, {waited[0] / took:.0%} waiting for data"
    return f"{said} ({os.cpu_count()} cores)", None


def write_jpegs(folder: Path, count: int) -> None:
    """Images of 320 x 256 pixels that compress as photographs do, in four classes."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, images in (("train", count), ("test", 8)):
        for k in range(images):
            small = draw.integers(0, 256, (32, 40, 3), dtype=np.uint8)
            place = folder / split / f"class{k % 4}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(small).resize((320, 256)).save(place / f"{k}.jpg", quality=90)


def device(place: Place):
    """Device and versions, in a line; the reason where no GPU can be used."""
    import platform
    from importlib import metadata

    import torch

    if place.rehearsed:
        said = f"REHEARSAL on a CPU, torch {torch.__version__}: the figures mean nothing"
        return said, True
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} sees none", False
    torch.ones(1, device=place.device).sum().item()
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    driver = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    wheels = {dist.metadata["Name"] or "": dist.version for dist in metadata.distributions()}
    cupy = next((f"CuPy {v}" for n, v in wheels.items() if n.startswith("cupy")), "no CuPy")
    python = f"Python {platform.python_version()}"
    return f"{count} x {name}, torch {torch.__version__}, {driver}, {cupy}, {python}", True


MEASURED = {
    "device": device,
    "combining": combining,
    "one_pass": one_pass,
    "launching": launching,
    "graphs": graphs,
    "from_jpegs": from_jpegs,
}


if __name__ == "__main__":
    rehearsed = "--rehearse" in sys.argv
    where = Place("cpu" if rehearsed else "cuda:0", rehearsed, float(sys.argv[2]))
    print("\nRESULT " + json.dumps(MEASURED[sys.argv[1]](where)), flush=True)
