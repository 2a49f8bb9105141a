"""Measurements that need several GPUs, in addition to the measurements of measures.py."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from measures import DEVICE_ONLY, Place, main, names, print_result, resnet


def _all_done(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``work`` and waits for all GPUs."""
    import torch

    def whole() -> None:
        work()
        for name in names():
            torch.cuda.synchronize(name)

    return whole


def matrix(place: Place):
    """Copy a pattern from every GPU to every other GPU; report differing bytes and rates."""
    import torch

    size = place.size(256 << 20, 1 << 16)
    wrong = []
    rates = []
    for k, source_name in enumerate(names()):
        source = torch.full((size,), 37 + 11 * k, dtype=torch.uint8, device=source_name)
        for target_name in names():
            if source_name == target_name:
                continue
            target = torch.zeros(size, dtype=torch.uint8, device=target_name)
            taken = place.median(_all_done(lambda t=target, s=source: t.copy_(s)), 3)
            rates.append(size / taken / 1e9)
            print(f"{source_name} to {target_name}: {rates[-1]:.1f} GB/s", flush=True)
            wrong += [f"{source_name} to {target_name}"] * (not bool((target == 37 + 11 * k).all()))
    text = f"{len(rates)} pairs, {min(rates):.0f} to {max(rates):.0f} GB/s"
    return f"wrong: {', '.join(wrong)}" if wrong else text, not wrong


def _half(w, graph_name: str, width: int, **ways):
    """Return a mixer between two ranks, each with half of the GPUs as its slots."""
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import MessageLayout
    from mpigossip.mixing.synchronous import Synchronous

    devices = tuple(names()[w.rank :: w.size])
    layout = MessageLayout((width,) * len(devices), devices=devices)
    return Synchronous(graph(graph_name, w.size), layout, w, timeout_s=60, on_devices=True, **ways)


def ways(place: Place, w):
    """Report which transports move the memory of each GPU between two ranks."""
    routes = {}
    for window in ("auto", "nccl"):
        try:
            mixer = _half(w, "complete", 4096, exchange=window)
            routes[window] = mixer.routes[1 - w.rank]
            mixer.close()
        except RuntimeError as error:
            routes[window] = f"refused: {error}"
    print(json.dumps(routes, indent=1))
    text = ", ".join(f"{requested}: {way.partition(' ')[0]}" for requested, way in routes.items())
    return text, place.bar(not routes["auto"].startswith(("host", "refused")))


def cold(place: Place, w, window: str):
    """Repeatedly open a mixer, and run its first global average during reduce-scatters.

    :param place: device and size of the measurement
    :param w: two ranks
    :param window: transport, as `node.exchange`
    """
    import torch

    from mpigossip.groups.devices import make_group
    from mpigossip.mixing.base import ExchangeKind

    wrong = 0
    ran = 0
    ends = time.monotonic() + place.seconds - 30
    devices = names()[w.rank :: w.size]
    width = place.size(1 << 20, 1 << 10)
    group = make_group(tuple(devices), 1, True, 60)
    gradients = [torch.ones(1, width * len(devices), device=name) for name in devices]
    for again in range(place.size(200, 3)):
        if w.agree(int(time.monotonic() > ends)):
            break
        mixer = _half(w, "ring", width, exchange=window)
        for slot, (array,) in enumerate(mixer.outbox(0)):
            array.fill_(w.rank + slot + again)
        group.reduce_scatter_mean(gradients)
        mixer.start(ExchangeKind.GLOBAL, 0)
        group.reduce_scatter_mean(gradients)
        for slot, (array,) in enumerate(mixer.finish()[1]):
            wrong += not bool((array == (w.size - 1) / 2 + slot + again).all())
        for array in gradients:
            array.fill_(1.0)
        way = mixer.routes[1 - w.rank].partition(" ")[0]
        ran = again + 1
        mixer.close()
    group.close()
    total = sum(w.gather(wrong) or ())
    return f"{total} wrong in {ran} rounds ({way})", total == 0 and ran > 0


def killed(place: Place):
    """Let a kernel fail on one GPU; report the error of the training, and when it is raised."""
    import torch

    from mpigossip.groups.base import GroupError
    from mpigossip.groups.devices import make_group

    group = make_group(tuple(names()), 1, True, 20)
    victim = names()[-1]
    full = [torch.ones(1, 1024 * len(names()), device=name) for name in names()]
    group.reduce_scatter_mean(full)
    began = time.perf_counter()
    text = "no error"
    if place.rehearsed:
        os.environ["MPIGOSSIP_DOUBLE_FAILS"] = "lost"
    else:  # An index out of bounds fails an assertion on the device, which breaks its CUDA context.
        _ = full[-1].view(-1)[torch.full((1,), 1 << 40, device=victim)]
    try:
        for _ in range(200):
            group.reduce_scatter_mean(full)
            time.sleep(0.1)
    except (GroupError, RuntimeError) as error:
        text = str(error)
    took = time.perf_counter() - began
    named = ("" if place.rehearsed else victim) + " was lost during" in text
    print_result((f"after {took:.1f} s: {text.splitlines()[0][:200]}", named and took < 30))
    os._exit(0)  # A normal exit could fail, because the process can't use the device any more.


def beside_ddp(place: Place):
    """Compare the images per second of ResNet-50 on all GPUs: one rank of mpigossip, and DDP."""
    all_of_them = "node.devices=cuda:" + ",".join(name[5:] for name in names())
    if place.device == "cpu":
        return DEVICE_ONLY, None
    assembly, batch = resnet(place, all_of_them)
    ours = batch * len(names()) / place.median(_all_done(assembly.trainer.step), place.size(15, 1))
    assembly.close()
    if place.rehearsed:
        return f"{ours:.0f} images/s; DDP {DEVICE_ONLY}", None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={len(names())}", __file__, "ddp", str(place.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=place.seconds / 2)
    theirs = json.loads(done.stdout.partition("RESULT ")[2])
    return f"{ours:.0f} images/s, DDP {theirs:.0f} ({ours / theirs:.2f} x)", None


def ddp(place: Place):
    """Measure torch's DistributedDataParallel, with one process per GPU, started by torchrun."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from mpigossip.models import model

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.backends.cudnn.benchmark = True
    network = model("resnet50", (3, 224, 224), 1000, 0).cuda().to(memory_format=torch.channels_last)
    network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    x = torch.randn(256, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(1000, (256,), device="cuda")

    def one():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    taken = place.median(one, 15, dist.barrier)
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        print_result(256 * ranks / taken)
    dist.destroy_process_group()


if __name__ == "__main__":
    main({f.__name__: f for f in (matrix, ways, cold, killed, beside_ddp, ddp)}, *sys.argv[1:])
