"""Measurements for check.py, which runs each in its own processes.

    measures.py NAME SECONDS [WORD …] [--rehearse]

NAME is a function in `MEASUREMENTS`, SECONDS its time limit, and the words are its further
arguments. Unless its docstring says otherwise, a function returns a pair: the result as text, and
whether it is good. None instead of true or false means that there is no limit, or that it can't be
applied. Rank 0 prints the pair as JSON in one line that begins with "RESULT ".

In a rehearsal, the same code runs at small sizes on the CPU or on the CPU emulation of CUDA; a
measurement that needs a real device reports that.
"""

import hashlib
import importlib.util
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from typing import NamedTuple

DEVICE_ONLY = "not run: the check needs a real device"


class Place(NamedTuple):
    """Device and size of the measurements."""

    device: str
    """Device of the measured arrays: "cpu", or the first GPU, "cuda:0"."""
    rehearsed: bool
    """True if the measurement is only tested, on the CPU or on an emulated GPU. Sizes are then
    small, and there are no limits."""
    seconds: float = 60.0
    """Time limit of a measurement in seconds."""

    def size(self, real: int, small: int) -> int:
        """Return ``real``, or ``small`` in a rehearsal."""
        return small if self.rehearsed else real

    def bar(self, reached: bool | None) -> bool | None:
        """Return the verdict on a rate; None in a rehearsal, because its rates mean nothing.

        :param reached: whether a rate reaches its limit; None: it can't be decided
        """
        return None if self.rehearsed else reached

    def synchronize(self) -> None:
        """Wait until the GPU has finished all work; return at once on the CPU."""
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()

    def slots(self, count: int) -> str:
        """Return the setting `node.devices` for ``count`` slots on this device."""
        return f"cpu:{count}" if self.device == "cpu" else "cuda:" + ",".join("0" * count)

    def median(self, work: Callable, repeats: int, before: Callable = lambda: None) -> float:
        """Return the median of the seconds that a call and its work on the GPU take.

        Two untimed calls come first.

        :param work: function without parameters
        :param repeats: number of timed calls
        :param before: function that is called before each call, without being timed
        """
        times = []
        for k in range(repeats + 2):
            before()
            began = time.perf_counter()
            work()
            self.synchronize()
            times += [time.perf_counter() - began] * (k >= 2)
        return sorted(times)[len(times) // 2]


def gpu_names() -> list[str]:
    """Return the names of all GPUs that torch can use, such as "cuda:0"."""
    import torch

    return [f"cuda:{k}" for k in range(torch.cuda.device_count())]


def device(place: Place):
    """Return the number of GPUs, and a text with their name and the versions of libraries.

    If no GPU can be used, the number is 0, and the text is the reason. In a rehearsal on the CPU,
    the number is 1.
    """
    if importlib.util.find_spec("torch") is None:
        return 0, f"the module torch is not installed for {sys.executable}"
    import torch

    if place.rehearsed:
        what = "a CPU" if place.device == "cpu" else "an emulated GPU"
        text = f"REHEARSAL on {what}, torch {torch.__version__}: the rates say nothing about GPUs"
        return 1 if place.device == "cpu" else len(gpu_names()), text
    if not torch.cuda.is_available():
        return 0, f"torch {torch.__version__} of {sys.executable} finds no GPU"
    torch.ones(1, device=place.device).sum().item()
    driver = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    wheels = {dist.metadata["Name"] or "": dist.version for dist in metadata.distributions()}
    cupy = next((f"CuPy {v}" for n, v in wheels.items() if n.startswith("cupy")), "no CuPy")
    text = (
        f"{len(gpu_names())} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {driver}"
    )
    return len(gpu_names()), f"{text}, {cupy}, Python {platform.python_version()}"


# -- one GPU, one process -------------------------------------------------------------------------


def weighted_sums(place: Place):
    """Check that weighted sums are bitwise identical on GPU and CPU, also for denormal numbers.

    The result is good if all sums are, and if none was left to torch's operations.
    """
    import torch

    from mpigossip.mixing.combine import weighted_sum
    from mpigossip.mixing.kernels import gpu_sum

    if place.device == "cpu":
        return DEVICE_ONLY, None
    draw = torch.Generator().manual_seed(1)
    wrong = []
    for weights in ([0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.125] * 8):
        for width in (1, 511, place.size(1_000_003, 4099)):
            # The terms range from denormal numbers (below 1.2e-38) to large ones.
            tens = torch.randint(-44, 30, (2, width), generator=draw)
            terms = [torch.randn(2, width, generator=draw) * 10.0**tens for _ in weights]
            expected = weighted_sum(weights, terms, torch.empty(2, width))
            there = [term.to(place.device) for term in terms]
            out = torch.empty(2, width, device=place.device)
            fast = gpu_sum.combine(weights, there, out)
            if not fast or not torch.equal(out.cpu().view(torch.int32), expected.view(torch.int32)):
                reason = "differ from the CPU" if fast else "were left to torch"
                wrong.append(f"sums of {len(weights)} arrays of {width} elements {reason}")
    tiny = int((expected.abs() < 1.2e-38).sum())
    words = "; ".join(wrong) or "all sums are bitwise identical"
    return f"{words} ({tiny} denormal elements)", not wrong


def sum_bandwidth(place: Place):
    """Compare the bandwidth of the weighted sum on the GPU with the bandwidth of a copy.

    The result is good if the sum reaches 85 % of it.
    """
    import torch

    from mpigossip.mixing.combine import weighted_sum
    from mpigossip.mixing.kernels import gpu_sum

    width = place.size(100 << 20, 1 << 18)
    one, two, out = (torch.ones(1, width, device=place.device) for _ in range(3))
    copy = place.median(lambda: out.copy_(one), 9)
    total = place.median(lambda: weighted_sum([0.5, 0.5], [one, two], out), 9)
    share = (3 * 4 * width / total) / (2 * 4 * width / copy)
    how = "one pass" if gpu_sum.usable(out.device) else "torch, in several passes"
    return f"{share:.0%} of {8 * width / copy / 1e9:.0f} GB/s ({how})", place.bar(share >= 0.85)


def nccl(place: Place):
    """Check all calls of a node's group with NCCL, with a single slot, in both orders of sums.

    The result is good if the arrays are unchanged, as they are with one slot.
    """
    import torch

    from mpigossip.cluster.world import SingleProcess
    from mpigossip.groups.base import Single
    from mpigossip.groups.nccl_inside_node import TorchGroup

    if place.device == "cpu":
        return DEVICE_ONLY, None
    wanted = torch.randn(1, place.size(1 << 22, 1 << 10))
    wrong = []
    for order in ("slots", "nccl"):
        group = TorchGroup(Single(place.device), SingleProcess(), order, 30)
        full = [wanted.to(place.device)]
        group.all_gather([group.reduce_scatter_mean(full)[0].clone()], full)
        group.broadcast(full)
        wrong += [] if torch.equal(full[0].cpu(), wanted) else [order]
        group.close()
    text = "the results of all calls are bitwise identical"
    return f"wrong with the order of sums {', '.join(wrong)}" if wrong else text, not wrong


def resnet(place: Place, *settings: str, nodes=None):
    """Return a training of ResNet in which all batches are equal, and the batch size.

    No data are loaded, so that the time of a step is computation and exchange only.

    :param place: device and size of the measurement
    :param settings: further settings "section.key=value"
    :param nodes: world with one rank per node; None: a single node
    """
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.training import assemble

    batch = place.size(256, 2)
    side = place.size(224, 32)
    chosen = [f"data.shape=[3,{side},{side}]", "data.classes=1000", "data.source=synthetic"]
    chosen += [f"data.batch={batch}", f"data.samples={32 * batch}", "data.test_samples=2"]
    chosen += ["log.consensus_every=0", "node.precision=bf16"]
    chosen += [f"node.devices={place.slots(1)}", f"model.name={place.size('resnet50', 'resnet20')}"]
    if place.device == "cpu":
        settings = [text for text in settings if "graphs" not in text and "last" not in text]
    job = assemble.load({}, [*chosen, *settings])
    assembly = assemble.assemble(job, nodes or SingleProcess(), nodes.size if nodes else 1)
    first = assembly.trainer.batches(0)
    assembly.trainer.batches = lambda step: first
    return assembly, batch


MODES = {
    "eager": ["node.cuda_graphs=never", "node.channels_last=never"],
    "graphs": ["node.cuda_graphs=always", "node.channels_last=never"],
    "channels_last": ["node.cuda_graphs=always", "node.channels_last=always"],
    "compile": ["node.cuda_graphs=never", "node.channels_last=auto", "node.compile=true"],
}
"""Settings of each mode in which a step can be computed."""


def step(place: Place, mode: str):
    """Measure the median time of a training step of one node; there is no limit.

    :param place: device and size of the measurement
    :param mode: key of `MODES`
    """
    if place.rehearsed and mode == "compile":
        return DEVICE_ONLY, None
    assembly, batch = resnet(place, *MODES[mode])
    began = time.perf_counter()
    assembly.trainer.step()
    place.synchronize()
    opening = time.perf_counter() - began
    taken = place.median(assembly.trainer.step, place.size(15, 1))
    assembly.close()
    return f"{taken * 1e3:.1f} ms, {batch / taken:.0f} samples/s; first step {opening:.1f} s", None


def beside_torch(place: Place):
    """Compare the time of a step of momentum SGD with plain torch, both in eager mode.

    The result is good if the step takes at most 1.05 times as long.
    """
    import torch

    from mpigossip.models import model

    kind = place.device.partition(":")[0]
    assembly, batch = resnet(place, *MODES["eager"], "algorithm.name=dmsgd")
    ours = place.median(assembly.trainer.step, place.size(15, 1))
    assembly.close()
    side = place.size(224, 32)
    name = place.size("resnet50", "resnet20")
    network = model(name, (3, side, side), 1000, 0).to(place.device)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    x = torch.randn(batch, 3, side, side).to(place.device)
    y = torch.randint(1000, (batch,)).to(place.device)

    def one():
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=not place.rehearsed):
            loss = torch.nn.functional.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()

    times = ours / place.median(one, place.size(15, 1))
    return f"{times:.3f} x ({ours * 1e3:.1f} ms)", place.bar(times <= 1.05)


def grad_scaler(place: Place):
    """Compare parameters after a loop with autocast and GradScaler, with and without mpigossip.

    The result is good if they agree within 1e-5, relative to their norm.
    """
    import torch

    import mpigossip
    from mpigossip.cluster.world import SingleProcess

    def trained(wrap):
        torch.manual_seed(1)
        network = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        ).to(place.device)
        optimizer = wrap(network, torch.optim.SGD(network.parameters(), 0.05))
        kind = place.device.partition(":")[0]
        on_gpu = not place.rehearsed
        scaler = torch.amp.GradScaler(kind, enabled=on_gpu)
        for k in range(20):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(k)).to(place.device)
            optimizer.zero_grad()
            with torch.autocast(kind, torch.float16, enabled=on_gpu):
                loss = network(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([p.detach().cpu().flatten() for p in network.parameters()])

    wanted = trained(lambda network, optimizer: optimizer)
    parameters = trained(
        lambda network, optimizer: mpigossip.Gossip(
            SingleProcess(), network, optimizer, algorithm="dsgd", graph="complete"
        )
    )
    off = float((parameters - wanted).norm() / wanted.norm())
    return f"relative difference {off:.1e}", off <= 1e-5


def resume_job(place: Place):
    """Run a job on the GPU, resume it from its checkpoint, and verify the new checkpoint.

    The result is good if all three commands end with the exit code 0.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.output={folder}/run", "model.name=mlp", f"node.devices={place.slots(1)}"]
        for words in (
            ["train", "jobs/digits.toml", *run, "run.steps=4"],
            ["resume", f"{folder}/run", "run.steps=8"],
            ["checkpoint", "verify", f"{folder}/run/checkpoints/step-00000008"],
        ):
            command = [sys.executable, "-m", "mpigossip", *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                text = f"`mpigossip {words[0]}` ended with code {done.returncode}: {last[:150]}"
                return text, False
    return "the job was trained, resumed and verified", True


def fsdp(place: Place, w):
    """Compare the parameters after training by FSDP2 in one rank with a run on the CPU.

    The result is good if they agree within 1e-4, relative to their norm.
    """
    from tests.optim.in_node import Case, reference_parameters, train_nodes

    kind = place.device.partition(":")[0]
    copies = place.rehearsed and kind == "cuda"  # The emulation has its own tensors.
    case = Case("dsgd", (("exchange", "host"),), steps=4, device=kind, copies=copies)
    w.group_into_nodes(1)
    wanted = reference_parameters(1, 1, case)[0]
    off = float((train_nodes(w, case, 1).cpu() - wanted).norm() / wanted.norm())
    return f"relative difference {off:.1e}", off <= 1e-4


# -- ranks that share a GPU -----------------------------------------------------------------------


def verdict_without_mps() -> tuple[bool | None, str]:
    """Return the verdict on a rate of two processes that misses its limit, and a text about MPS.

    Without CUDA MPS, two processes take turns on a GPU. The rate then says little about the
    exchange, so the verdict is None (undecided); with MPS, it is False.
    """
    serves = (
        shutil.which("pgrep")
        and not subprocess.run(["pgrep", "nvidia-cuda-mps"], capture_output=True).returncode
    )
    return (False, "under MPS") if serves else (None, "without MPS, so the limit does not apply")


def put_seconds(place: Place, w, nbytes: int) -> float:
    """Return the median seconds of an MPI put of host memory, which all ranks make at once.

    :param place: device and size of the measurement
    :param w: world; each rank puts to the next one
    :param nbytes: number of bytes of a put
    """
    import numpy as np
    from mpi4py import MPI

    from mpigossip.cluster.collectives import close_window

    window = MPI.Win.Allocate(nbytes, 1, comm=w.comm)
    after = (w.rank + 1) % w.size
    window.Lock_all()
    source = np.ones(nbytes, np.uint8)

    def put() -> None:
        window.Put(source, after)
        window.Flush(after)

    seconds = place.median(put, place.size(9, 2), w.barrier)
    close_window(window, w.comm)
    return seconds


def exchange(place: Place, w, memory: str, bar: str, limited_by: str):
    """Compare the rate of a round between two ranks with the rate of the operation that limits it.

    The result is good if the rate reaches the fraction ``bar``.

    :param place: device and size of the measurement
    :param w: both ranks
    :param memory: transport, as `node.exchange`
    :param bar: smallest fraction of the limiting rate that is good, such as "0.7"
    :param limited_by: "copy" (within the GPU) or "put" (of host memory by MPI)
    """
    import torch

    from mpigossip.graphs import graph
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.synchronous import Synchronous

    # Each rank has two messages in shared memory, which is small in some containers.
    room = int(shutil.disk_usage("/dev/shm").free * 0.9) // (2 * 4 * w.size)
    width = min(place.size(100 << 20, 1 << 18), w.broadcast(room) // 512 * 512)
    one, two = (torch.ones(width, device=place.device) for _ in range(2))
    layout = MessageLayout((width,), devices=(place.device,))
    pair = graph("one-peer-exponential", w.size)
    mixer = Synchronous(pair, layout, w, exchange=memory, on_devices=True)
    clock = iter(range(1000))

    def round_of():
        t = next(clock)
        mixer.outbox(t)
        mixer.start(ExchangeKind.GOSSIP, t)
        mixer.finish()

    # Only rank 0 measures the copy, because two processes on a GPU would disturb each other.
    if limited_by == "copy":
        copied = place.median(lambda: two.copy_(one), place.size(9, 2)) if w.rank == 0 else 0.0
        # In a round, each rank reads or writes five vectors in the memory of the same GPU. A copy
        # reads one and writes one.
        least = 2.5 * w.size * w.broadcast(copied)
    else:
        least = put_seconds(place, w, 4 * width)
    took = place.median(round_of, place.size(9, 2), w.barrier)
    route, _, why = mixer.routes[1 - w.rank].partition(" ")
    mixer.close()
    if memory == "auto" and route == "host":
        return f"not run: only host memory works as a transport {why}", None
    share = least / took
    verdict, how = verdict_without_mps()
    text = f"{share:.0%} ({route}, {4 * width / 1e6:.0f} MB in {took * 1e3:.1f} ms; {how})"
    return text, place.bar(share >= float(bar) or verdict)


def overlap(place: Place, w):
    """Compare the median time of a step with and without an exchange that is sent ahead.

    The result is good if the step with the exchange takes at most 5 % longer.
    """
    seconds = []
    for name in ("identity", "one-peer-exponential"):
        ahead = ["algorithm.name=dsgd", "algorithm.style=awc", f"graph.name={name}"]
        assembly, _ = resnet(place, *ahead, nodes=w)
        seconds.append(place.median(assembly.trainer.step, place.size(12, 1), w.barrier))
        assembly.close()
    more = seconds[1] / seconds[0] - 1
    verdict, how = verdict_without_mps()
    return f"{more:+.1%} ({seconds[0] * 1e3:.0f} ms without an exchange; {how})", place.bar(
        more <= 0.05 or verdict
    )


def random_sleeps(place: Place, seed: int):
    """Return a function that, in most calls, lets the current stream sleep for 1 to 20 ms.

    In a rehearsal, the function does nothing.

    :param place: device and size of the measurement
    :param seed: seed of the random durations
    """
    import torch

    draw = random.Random(seed)
    cycles = 0.0
    if not place.rehearsed:
        one, two = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1000)
        one.record()
        torch.cuda._sleep(20_000_000)
        two.record()
        place.synchronize()
        cycles = 20_000_000 / (one.elapsed_time(two) / 1e3)  # cycles per second

    def nap() -> None:
        if cycles and draw.random() < 0.7:
            torch.cuda._sleep(int(cycles * draw.uniform(0.001, 0.02)))

    return nap


def stress(place: Place, w, memory: str, mutate: Callable = lambda mixer: None, count: int = 60):
    """Count wrong arrays in exchanges while all streams sleep at random.

    If the code lacks a wait between two streams, an array then contains old values. On the
    emulation of GPUs, streams don't sleep: it checks the order of operations itself. The result is
    good if no array is wrong.

    :param place: device and size of the measurement
    :param w: all ranks
    :param memory: transport, as `node.exchange`
    :param mutate: function that removes a wait from the mixer
    :param count: number of rounds
    """
    import torch

    from mpigossip.graphs import graph
    from mpigossip.mixing.base import ExchangeKind, MessageLayout
    from mpigossip.mixing.device.memory import TransportUnavailable
    from mpigossip.mixing.simulated import Simulated
    from mpigossip.mixing.synchronous import Synchronous

    widths = (3 << 14,) * 2
    options = {"vectors": 2, "scalars": 1}
    made = graph("exponential", w.size)
    devices = (place.device,) * len(widths)
    layout = MessageLayout(widths, devices=devices, **options)
    try:
        mixer = Synchronous(made, layout, w, exchange=memory, timeout_s=40, on_devices=True)
    except TransportUnavailable as error:
        return f"not run: {error}", None
    reference = Simulated(made, MessageLayout(widths, **options))
    nap = random_sleeps(place, w.rank)
    mutate(mixer)
    ends = time.monotonic() + place.seconds / 3
    wrong = 0
    ran = 0
    t = 0
    for index in range(place.size(count, 8)):
        if w.agree(int(time.monotonic() > ends)):
            break
        kind = (ExchangeKind.GOSSIP, ExchangeKind.GOSSIP, ExchangeKind.GLOBAL, ExchangeKind.LOCAL)[
            index % 4
        ]
        pairs = []
        for targets, sources in zip(mixer.outbox(t), reference.outbox(t), strict=True):
            for target, rows in zip(targets, sources, strict=True):
                draw = torch.Generator().manual_seed(1000 * index + len(pairs))
                rows.copy_(torch.randn(rows.shape, generator=draw, dtype=rows.dtype))
                pairs.append((target, rows[w.rank : w.rank + 1].to(place.device)))
        nap()  # The outbox is filled late, and the host does not wait for that.
        for target, row in pairs:
            target.copy_(row)
        for streams in mixer._buffers._streams:
            for stream in (streams.out, streams.into):
                with torch.cuda.stream(stream):
                    nap()
        for each_mixer in (mixer, reference):
            each_mixer.start(kind, t, index)
        nap()
        for got, rows in zip(mixer.finish()[1], reference.finish()[1], strict=True):
            for array, row in zip(got, rows, strict=True):
                wrong += not torch.equal(array[0].cpu(), row[w.rank])
        ran = index + 1
        t = t + (kind is ExchangeKind.GOSSIP)
    way = next(iter(mixer.routes.values())).partition(" ")[0]
    total = sum(w.gather(wrong) or ())
    mixer.close()
    return f"{total} wrong arrays in {ran} rounds ({way})", total == 0 and ran > 0


def mutant(place: Place, w):
    """Check that :func:`stress` finds errors if a wait is missing.

    The mixer no longer waits until the outbox is filled. The result is good if an error is found.
    This function prints it, and ends the process.
    """
    import torch

    def forget(mixer) -> None:
        """Record the event "outbox filled" on a stream without work, where it means nothing."""
        for streams in mixer._buffers._streams:
            streams.ready = torch.cuda.Stream(streams.device).record_event

    try:
        text, good = stress(place, w, "auto", forget, 20)
        result = text, None if good is None else not good
    except RuntimeError as error:
        result = str(error)[:120], "nothing stands between them" in str(error)
    print_result(result, w)
    time.sleep(2)  # The other rank has to find errors, too, before this one exits.
    os._exit(0)  # A normal exit could fail, because the state of memory is unknown.


def digests(place: Place, w):
    """Compare digests after training by the fastest transport and by host memory.

    The result is good if the parameters are bitwise identical, for two algorithms.
    """
    from tests.double.devices import settings_of, trained

    differ = []
    texts = []
    for name in ("dmsgd", "sgp"):
        digests_by_transport = []
        for way in ("auto", "host"):
            settings = [*settings_of(name), f"node.exchange={way}"]
            full = trained(w, w.size, "mlp", place.slots(1), settings, place.size(20, 4))
            digests_by_transport.append(
                w.gather(hashlib.sha256(full.numpy().tobytes()).hexdigest()[:8])
            )
        differ += [name] * (digests_by_transport[0] != digests_by_transport[1])
        texts.append(f"{name} {' '.join(digests_by_transport[0] or ())}")
    text = f"digests of {', '.join(differ)} differ between transports"
    return text if differ else ", ".join(texts), not differ


def print_result(result, world=None) -> None:
    """Print the line "RESULT …", which check.py reads, on rank 0.

    :param result: pair (text, whether the check has passed), or another value that can be written
        as JSON
    :param world: ranks of the measurement; None: a single process
    """
    if world is None or world.rank == 0:
        print("\nRESULT " + json.dumps(result), flush=True)


def main(known: dict[str, Callable], name: str, seconds: str, *words: str) -> None:
    """Run one measurement with the arguments of the command line.

    :param known: functions by name; those with a parameter ``w`` get the world of all ranks
    :param name: name of the function
    :param seconds: time limit of the measurement
    :param words: further arguments of the function; "--rehearse" asks for a rehearsal
    """
    rehearsed = "--rehearse" in words
    words = tuple(w for w in words if w != "--rehearse")
    on_cpu = rehearsed and "MPIGOSSIP_DOUBLE" not in os.environ
    place = Place("cpu" if on_cpu else "cuda:0", rehearsed, float(seconds))
    work = known[name]
    if "w" not in work.__code__.co_varnames[: work.__code__.co_argcount]:
        # Some measurements print their result themselves.
        if (result := work(place, *words)) is not None:
            print_result(result)
        return
    from mpigossip.cluster.mpi_world import open_world

    with open_world() as ranks:
        print_result(work(place, ranks, *words), ranks)


MEASUREMENTS = (
    device,
    weighted_sums,
    sum_bandwidth,
    nccl,
    step,
    exchange,
    overlap,
    stress,
    mutant,
    digests,
    beside_torch,
    grad_scaler,
    resume_job,
    fsdp,
)

if __name__ == "__main__":
    main({f.__name__: f for f in MEASUREMENTS}, *sys.argv[1:])
