"""Measurements that need several GPUs, in addition to the measurements of measures.py.

As described there, a function returns a pair: the result as text, and whether it is good.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from measures import DEVICE_ONLY, Place, gpu_names, main, print_result, resnet


def _all_done(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that calls ``work`` and waits for all GPUs."""
    import torch

    def whole() -> None:
        work()
        for name in gpu_names():
            torch.cuda.synchronize(name)

    return whole


def copies(place: Place):
    """Copy a pattern from every GPU to every other GPU, and measure the rates.

    The result is good if all bytes are correct.
    """
    import torch

    size = place.size(256 << 20, 1 << 16)
    wrong = []
    rates = []
    for k, source_name in enumerate(gpu_names()):
        source = torch.full((size,), 37 + 11 * k, dtype=torch.uint8, device=source_name)
        for target_name in gpu_names():
            if source_name == target_name:
                continue
            target = torch.zeros(size, dtype=torch.uint8, device=target_name)
            taken = place.median(_all_done(lambda t=target, s=source: t.copy_(s)), 3)
            rates.append(size / taken / 1e9)
            print(f"{source_name} to {target_name}: {rates[-1]:.1f} GB/s", flush=True)
            wrong += [f"{source_name} to {target_name}"] * (not bool((target == 37 + 11 * k).all()))
    text = f"{len(rates)} pairs, {min(rates):.0f} to {max(rates):.0f} GB/s"
    return f"wrong bytes: {', '.join(wrong)}" if wrong else text, not wrong


def _mixer_between_halves(w, graph_name: str, width: int, **options):
    """Return a mixer between two ranks, each with half of the GPUs as its slots.

    :param w: two ranks
    :param graph_name: name of the graph of both nodes
    :param width: number of elements of each slot's shard
    :param options: further arguments of the mixer
    """
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import MessageLayout
    from mpigossip.mixing.synchronous import Synchronous

    devices = tuple(gpu_names()[w.rank :: w.size])
    layout = MessageLayout((width,) * len(devices), devices=devices)
    return Synchronous(
        graph(graph_name, w.size), layout, w, timeout_s=60, on_devices=True, **options
    )


def transports(place: Place, w):
    """Find the transport that is chosen for "auto" and for "nccl" between two ranks.

    The result is good if "auto" chooses a transport other than host memory.
    """
    routes = {}
    for window in ("auto", "nccl"):
        try:
            mixer = _mixer_between_halves(w, "complete", 4096, exchange=window)
            routes[window] = mixer.routes[1 - w.rank]
            mixer.close()
        except RuntimeError as error:
            routes[window] = f"failed: {error}"
    print(json.dumps(routes, indent=1))
    text = ", ".join(f"{requested}: {way.partition(' ')[0]}" for requested, way in routes.items())
    return text, place.bar(not routes["auto"].startswith(("host", "failed")))


def first_rounds(place: Place, w, window: str):
    """Repeatedly open a mixer, and run its first global average during reduce-scatters.

    The result is good if no average is wrong.

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
    devices = gpu_names()[w.rank :: w.size]
    width = place.size(1 << 20, 1 << 10)
    group = make_group(tuple(devices), 1, True, 60)
    gradients = [torch.ones(1, width * len(devices), device=name) for name in devices]
    for again in range(place.size(200, 3)):
        if w.agree(int(time.monotonic() > ends)):
            break
        mixer = _mixer_between_halves(w, "ring", width, exchange=window)
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
    return f"{total} wrong averages in {ran} rounds ({way})", total == 0 and ran > 0


def failing_kernel(place: Place):
    """Let a kernel fail on one GPU, and print the error that the next reduce-scatters raise.

    The result is good if the error names the GPU and is raised within 30 s. This function prints
    it, and ends the process.
    """
    import torch

    from mpigossip.groups.base import GroupError
    from mpigossip.groups.devices import make_group

    group = make_group(tuple(gpu_names()), 1, True, 20)
    victim = gpu_names()[-1]
    full = [torch.ones(1, 1024 * len(gpu_names()), device=name) for name in gpu_names()]
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
    """Compare the images per second of ResNet-50 on all GPUs: one rank of mpigossip, and DDP.

    There is no limit.
    """
    all_of_them = "node.devices=cuda:" + ",".join(name[5:] for name in gpu_names())
    if place.device == "cpu":
        return DEVICE_ONLY, None
    assembly, batch = resnet(place, all_of_them)
    ours = (
        batch * len(gpu_names()) / place.median(_all_done(assembly.trainer.step), place.size(15, 1))
    )
    assembly.close()
    if place.rehearsed:
        return f"{ours:.0f} images/s; DDP was not run, because it needs real devices", None
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={len(gpu_names())}", __file__, "ddp", str(place.seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=place.seconds / 2)
    theirs = json.loads(done.stdout.partition("RESULT ")[2])
    return f"{ours:.0f} images/s, DDP {theirs:.0f} ({ours / theirs:.2f} x)", None


def ddp(place: Place):
    """Measure torch's DistributedDataParallel, with one process per GPU, started by torchrun.

    The first process prints the images per second of all GPUs.
    """
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
    functions = copies, transports, first_rounds, failing_kernel, beside_ddp, ddp
    main({f.__name__: f for f in functions}, *sys.argv[1:])
