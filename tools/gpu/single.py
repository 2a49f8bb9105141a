"""What check.py measures in one process each: a device error there leaves the others alone.

`single.py NAME SECONDS [--rehearse]` prints one line, "RESULT " and JSON: what was measured, and
whether it reaches its bar (null: no bar).
"""

import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from first import FIRST
from ranks import Place, here, median_seconds


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

    settings = [f"data.batch={batch}", f"data.samples={batch * slots * 4}", "data.source=synthetic"]
    settings += [f"node.devices={place.slots(slots)}", "log.consensus_every=0"]
    settings += [] if place.device == "cpu" else [f"node.cuda_graphs={graphs}"]
    return assemble.assemble(assemble.load({"model": {"name": model}}, settings), Alone(), 1)


def launching(place: Place):
    """Host time to begin the passes of eight slots."""
    if place.device == "cpu":
        return "a CPU has no graphs", None
    model, slots = ("lenet", 2) if place.rehearsed else ("resnet20", 8)
    assembly = replicas_of(place, model, place.size(16, 2), slots, "always")
    assembly.trainer.step()
    batches = assembly.loader.step(1)
    captured = assembly.trainer.replicas._captured
    taken = median_seconds(lambda: captured.launch(batches), place.size(20, 1), place.synchronize)
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


MODES = {
    "eager": ["node.cuda_graphs=never", "node.channels_last=never"],
    "graphs": ["node.cuda_graphs=always", "node.channels_last=never"],
    "channels_last": ["node.cuda_graphs=always", "node.channels_last=always"],
    "compile": ["node.cuda_graphs=never", "node.channels_last=auto", "node.compile=true"],
}
"""Ways to compute a step, for figures side by side."""


def model_of(place: Place, model: str, folder: Path) -> tuple[dict, list[str], int]:
    """A job's source and settings, and how many samples a step takes."""
    from mpigossip.store.packing import pack

    if model == "resnet50":
        batch, side = place.size(256, 2), place.size(224, 32)
        settings = [f"data.shape=[3,{side},{side}]", "data.classes=1000", "data.test_samples=2"]
        settings += [f"data.samples={4 * batch}", f"data.batch={batch}", "data.source=synthetic"]
        smaller = "resnet20" if place.rehearsed else model
        return {"model": {"name": smaller}}, settings, batch
    batch, words = place.size(16, 2), folder / "text"
    words.mkdir()
    (words / "all.txt").write_bytes(os.urandom(place.size(1 << 22, 1 << 16)).hex().encode())
    pack(words, folder / "text.h5", text=True)
    shape = {"layers": place.size(12, 2), "heads": place.size(12, 2), "width": place.size(768, 32)}
    settings = [f"data.source={folder / 'text.h5'}", f"data.batch={batch}"]
    settings += [f"data.context={place.size(1024, 32)}"]
    return {"model": {"name": "gpt"} | shape}, settings, batch


def step_of(place: Place, model: str, mode: str):
    """Median time of a training step of one node, in bfloat16."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble

    if place.rehearsed and mode == "compile":
        return "torch.compile needs a real device", None
    with tempfile.TemporaryDirectory() as folder:
        source, settings, batch = model_of(place, model, Path(folder))
        settings += [f"node.devices={place.slots(1)}", "log.consensus_every=0"]
        settings += ["node.precision=bf16"] + ([] if place.device == "cpu" else MODES[mode])
        assembly = assemble.assemble(assemble.load(source, settings), Alone(), 1)
        # always the same batches: what is timed is the step
        first = assembly.trainer.settings.batches(0)
        assembly.trainer.settings.batches = lambda step: first
        began = time.perf_counter()
        assembly.trainer.step()
        place.synchronize()
        opening = time.perf_counter() - began
        work = assembly.trainer.step
        taken = median_seconds(lambda: (work(), place.synchronize()), place.size(15, 1))
        assembly.close()
    return f"{taken * 1e3:.1f} ms, {batch / taken:.0f} samples/s; first step {opening:.1f} s", None


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
        settings += [f"node.devices={place.slots(1)}"]
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
        what = "a CPU" if place.device == "cpu" else "the double of a GPU"
        said = f"REHEARSAL on {what}, torch {torch.__version__}: the figures mean nothing"
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
    **FIRST,
    **{f"{m}-{how}": partial(step_of, model=m, mode=how) for m in ("resnet50", "gpt")
       for how in MODES},
}  # fmt: skip


if __name__ == "__main__":
    print("\nRESULT " + json.dumps(MEASURED[sys.argv[1]](here(float(sys.argv[2])))), flush=True)
