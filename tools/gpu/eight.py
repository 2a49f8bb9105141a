"""The rows of eight.sh: all GPUs of a node, each row in processes of its own.

`eight.py ROW SECONDS [--rehearse]` is one of them. On the double the same lines run on the CPU's
memory; what only devices can show says so.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import check
from check import NO_BAR, Row, all_rows, put_on_top, result_of, table
from first import DEVICE_ONLY
from launch import NotRun, at_ease_in_a_container, ended, launched_by
from ranks import Place, here, median_seconds, said

EIGHT = Path(__file__).resolve()
RESULTS = EIGHT.with_name("EIGHT_RESULTS.md")
FEW = 3
VICTIM = 5
"""The GPU on which a kernel is killed; the last one where there are fewer."""


def count() -> int:
    """GPUs that are seen here."""
    import torch

    return torch.cuda.device_count()


def names() -> list[str]:
    """Of all GPUs."""
    return [f"cuda:{k}" for k in range(count())]


def matrix(place: Place):
    """Every GPU copies a pattern of its own to every other: bytes that differ, and rates."""
    import torch

    size, wrong, rates = place.size(256 << 20, 1 << 16), [], {}
    for one in names():
        source = torch.empty(size, dtype=torch.uint8, device=one)
        source.fill_(37 + 11 * int(one[5:]))
        for two in names():
            if one == two:
                continue
            target = torch.zeros(size, dtype=torch.uint8, device=two)

            def copy(source=source, target=target, one=one, two=two):
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(one)
                torch.cuda.synchronize(two)

            rates[one, two] = size / median_seconds(copy, 3) / 1e9
            if not bool((target == 37 + 11 * int(one[5:])).all()):
                wrong.append(f"{one} to {two}")
    for one in names():
        line = [f"{rates.get((one, two), 0):7.1f}" for two in names()]
        print(one, *line, flush=True)
    peers = 0
    if not place.rehearsed:
        pairs = [(a, b) for a in range(count()) for b in range(count()) if a != b]
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    low, high = min(rates.values()), max(rates.values())
    text = f"{len(rates)} pairs, {low:.0f} to {high:.0f} GB/s, {peers} reach each other as peers"
    return f"wrong: {', '.join(wrong)}" if wrong else text, not wrong


def sums(place: Place):
    """NCCL's averages of random gradients against the CPU's, in slot order and in float64."""
    import torch

    from mpigossip.groups.nccl import Nccl
    from mpigossip.mixing.combine import combine

    slots, width = count(), place.size(1 << 22, 1 << 10)
    group = Nccl(names(), timeout_s=60)
    try:
        draw = torch.Generator().manual_seed(3)
        terms = [torch.randn(1, width * slots, generator=draw) for _ in range(slots)]
        expected = combine([1 / slots] * slots, terms, torch.empty_like(terms[0]))
        full = [term.to(name) for term, name in zip(terms, names(), strict=True)]
        group.all_gather(group.reduce_scatter_mean(full), full)
        found = [array.cpu() for array in full]
    finally:
        group.close()
    off = max(float((one - expected).norm() / expected.norm()) for one in found)
    alike = all(torch.equal(one, found[0]) for one in found)
    same = "the same bits on all" if alike else "DIFFERENT bits on the GPUs"
    return f"{off:.1e} from the CPU, {same}", alike and off < 1e-6


def proof(place: Place):
    """Whether MPI, a mapping, NCCL move the memory of each GPU: two ranks, half of them each."""
    from mpigossip.cluster.ranks import world
    from mpigossip.graphs import graph
    from mpigossip.mixing.base import Layout
    from mpigossip.mixing.windows import Windows

    found = {}
    with world() as w:
        mine = names()[w.rank :: w.size]
        layout = Layout((4096,) * len(mine), devices=tuple(mine))
        for same_host, window in (("read", "auto"), ("put", "auto"), ("put", "nccl")):
            ways = {
                "same_host": same_host,
                "gpu_window": window,
                "timeout_s": 60,
                "on_devices": True,
            }
            try:
                mixer = Windows(graph("complete", w.size), layout, w, **ways)
                found[f"{same_host} {window}"] = mixer.routes[1 - w.rank]
                mixer.close()
            except RuntimeError as error:
                found[f"{same_host} {window}"] = f"refused: {error}"
        said(found, w)


def cold(place: Place):
    """Fresh mixers whose first GLOBAL round runs beside reduce-scatters, again and again."""
    import torch

    from mpigossip.cluster.ranks import world
    from mpigossip.graphs import graph
    from mpigossip.groups.devices import make_group
    from mpigossip.mixing.base import Kind, Layout
    from mpigossip.mixing.windows import Windows

    wrong = ran = 0
    ends, window = time.monotonic() + place.seconds - 30, "nccl" if "nccl" in sys.argv else "auto"
    with world() as w:
        mine = tuple(names()[w.rank :: w.size])
        width = place.size(1 << 20, 1 << 10)
        group = make_group(mine, 1, True, 60)
        gradients = [torch.ones(1, width * len(mine), device=name) for name in mine]
        for again in range(place.size(200, 3)):
            if w.agree(int(time.monotonic() > ends)):
                break
            mixer = Windows(
                graph("ring", w.size), Layout((width,) * len(mine), devices=mine), w,
                same_host="put", gpu_window=window, timeout_s=60, on_devices=True,
            )  # fmt: skip
            for slot, (array,) in enumerate(mixer.outbox(0)):
                array.fill_(w.rank + slot + again)
            group.reduce_scatter_mean(gradients)
            mixer.start(Kind.GLOBAL, 0)
            group.reduce_scatter_mean(gradients)
            for slot, (array,) in enumerate(mixer.finish()[1]):
                wrong += not bool((array == (w.size - 1) / 2 + slot + again).all())
            for array in gradients:
                array.fill_(1.0)
            way, ran = mixer.routes[1 - w.rank].partition(" ")[0], again + 1
            mixer.close()
        group.close()
        every = w.gather(wrong)
        said([sum(every or ()), ran, way], w)


def killed(place: Place):
    """What training says, and when, once a kernel on one GPU has ended with an error."""
    import torch

    from mpigossip.groups.base import GroupError
    from mpigossip.groups.nccl import Nccl

    victim = min(VICTIM, count() - 1)
    group = Nccl(names(), timeout_s=20)
    full = [torch.ones(1, 1024 * count(), device=name) for name in names()]
    group.reduce_scatter_mean(full)
    began, text = time.perf_counter(), "nothing was said"
    if place.rehearsed:
        os.environ["MPIGOSSIP_DOUBLE_FAILS"] = "lost"
    else:
        beyond = torch.full((1,), 1 << 40, device=names()[victim])
        _ = full[victim].view(-1)[beyond]  # a device-side assertion: its context is lost
    try:
        for _ in range(200):
            group.reduce_scatter_mean(full)
            time.sleep(0.1)
    except (GroupError, RuntimeError) as error:
        text = str(error)
    took = time.perf_counter() - began
    named = ("" if place.rehearsed else f"cuda:{victim}") + " was lost during NCCL" in text
    report = json.dumps([f"after {took:.1f} s: {text.splitlines()[0][:200]}", named and took < 30])
    print("\nRESULT " + report, flush=True)
    os._exit(0)  # the process has lost a device


def images(place: Place):
    """Images a second of ResNet-50 on all GPUs, one rank; a node of its own without an exchange."""
    import torch
    from single import model_of

    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble

    source, settings, batch = model_of(place, "resnet50", Path())
    devices = ",".join(map(str, range(count())))
    settings += [f"node.devices=cuda:{devices}", "log.consensus_every=0", "node.precision=bf16"]
    settings += [f"data.samples={4 * batch * count()}"]
    assembly = assemble.assemble(assemble.load(source, settings), Alone(), 1)
    first = assembly.trainer.settings.batches(0)
    assembly.trainer.settings.batches = lambda step: first

    def step():
        assembly.trainer.step()
        for name in names():
            torch.cuda.synchronize(name)

    taken = median_seconds(step, place.size(15, 1))
    assembly.close()
    return batch * count() / taken


def ddp(place: Place):
    """The same by torch's DistributedDataParallel, a process a GPU, as torchrun starts it."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from mpigossip.models import model

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.backends.cudnn.benchmark = True
    batch = 256
    network = model("resnet50", (3, 224, 224), 1000, 0).cuda().to(memory_format=torch.channels_last)
    network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    x = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(1000, (batch,), device="cuda")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    taken = median_seconds(step, 15, dist.barrier)
    if rank == 0:
        print("\nRESULT " + json.dumps(batch * dist.get_world_size() / taken), flush=True)
    dist.destroy_process_group()


# -- the table -----------------------------------------------------------------------------------


def by_one(name: str):
    """A row of one process."""

    def measure(place: Place, seconds: float, limit: str):
        found, good = result_of([sys.executable, str(EIGHT), name, str(seconds)], place, seconds)
        return found, limit, good

    return measure


def by_two(name: str, *more: str):
    """What two ranks say that share the node's GPUs."""

    def measure(place: Place, seconds: float):
        launcher = launched_by()
        if not launcher or importlib.util.find_spec("mpi4py") is None:
            raise NotRun("needs mpi4py and an mpiexec (MPIGOSSIP_MPIEXEC names one)")
        command = [*launcher, "-n", "2", sys.executable, str(EIGHT), name, str(seconds), *more]
        return result_of(command, place, seconds)

    return measure


def proofs(place: Place, seconds: float, limit: str):
    """The ways that two ranks found."""
    found = by_two("proof")(place, seconds)
    print(json.dumps(found, indent=1))
    text = ", ".join(f"{asked}: {way.partition(' ')[0]}" for asked, way in found.items())
    return text, limit, found["read auto"].startswith("ipc")


def colds(*more: str):
    """Wrong results of fresh mixers' first averages."""

    def measure(place: Place, seconds: float, limit: str):
        wrong, ran, way = by_two("cold", *more)(place, seconds)
        return f"{wrong} wrong in {ran} rounds ({way})", limit, wrong == 0 and ran > 0

    return measure


def against_ddp(place: Place, seconds: float, limit: str):
    """Images a second beside DDP's."""
    ours = result_of([sys.executable, str(EIGHT), "images", str(seconds)], place, seconds / 2)
    if place.rehearsed:
        return f"{ours:.0f} images/s; DDP {DEVICE_ONLY}", limit, None
    gpus = os.environ.get("MPIGOSSIP_GPUS", "gpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={gpus}", str(EIGHT), "ddp", str(seconds)]
    theirs = result_of(command, place, seconds / 2)
    return f"{ours:.0f} images/s, DDP {theirs:.0f} ({ours / theirs:.2f} x)", limit, None


NEAR, WAYS, NAMED = "1e-6 relative, equal on all", "ipc on one host", "its GPU named within 30 s"
check.EXACT += (NEAR, WAYS, NAMED)
ROWS = [
    ("copies between all GPUs, with patterns", "none wrong", 60, by_one("matrix")),
    ("NCCL's averages against the CPU's", NEAR, 60, by_one("sums")),
    ("ways of two ranks with half of the GPUs each", WAYS, 120, proofs),
    ("cold GLOBAL rounds beside reduce-scatters, 200 times", "none wrong", 150, colds()),
    ("the same by NCCL", "none wrong", 200, colds("nccl")),
    (f"a kernel killed on GPU {VICTIM}", NAMED, 60, by_one("killed")),
    ("ResNet-50, bf16, batch 256 a GPU", NO_BAR, 240, against_ddp),
]
OF_ONE = {"matrix": matrix, "sums": sums, "images": images}
OF_MORE = {"proof": proof, "cold": cold, "killed": killed, "ddp": ddp}


def main() -> int:
    """Run all rows, print the table last; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--double", action="store_true", help="on the tests' double of GPUs")
    parser.add_argument("--gpus", type=int, help="of so many GPUs, the first ones")
    parser.add_argument("--only", default="", help="rows whose text has this word")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    at_ease_in_a_container()
    if options.gpus and not options.double:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(options.gpus)))
        os.environ["MPIGOSSIP_GPUS"] = str(options.gpus)
    with tempfile.TemporaryDirectory() as folder:
        if options.double:
            from tests.double.__main__ import environment

            os.environ.update(environment(Path(folder), options.gpus or 8))
        place = Place("cuda:0", options.double)
        asked = "import torch; print(torch.cuda.device_count())"
        gpus = int((ended([sys.executable, "-c", asked], 120).stdout.split() or ["0"])[-1])
        if gpus < 2:
            print(f"{gpus} GPUs were found, two at least are needed; nothing was measured")
            return FEW
        device, _ = check.machine(place)
        rows: list[Row] = []
        chosen = [row for row in ROWS if options.only in row[0]]
        all_rows(place, rows, time.monotonic() + 1200, chosen)
    text = table(rows, f"{gpus} GPUs; {device}")
    if not place.rehearsed:
        put_on_top(text, RESULTS)
        found = {"device": device, "gpus": gpus, "rows": [row._asdict() for row in rows]}
        RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n" + text, flush=True)
    return 1 if any(row.good is False for row in rows) else 0


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in OF_ONE:
        print("\nRESULT " + json.dumps(OF_ONE[name](here(float(sys.argv[2])))), flush=True)
    elif name in OF_MORE:
        OF_MORE[name](here(float(sys.argv[2])))
    else:
        sys.exit(main())
