"""What has to be right before anything is measured: each of these in a process of its own.

A function returns what was found, and whether it is as it should be (None: it can't be told here).
On the double the same lines run on the CPU's memory; what only a device can show says so.
"""

import contextlib
import mmap
import os
import resource
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ranks import Place

DEVICE_ONLY = "needs a real device"


def limits(place: Place):
    """Versions, how the GPUs are joined, and what this system grants."""
    import torch

    wheels = {dist.metadata["Name"] or "": dist.version for dist in metadata.distributions()}
    found = [f"{name} {version}" for name, version in sorted(wheels.items()) if name in SHOWN]
    locked, files = (
        resource.getrlimit(which)[0] for which in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    room = shutil.disk_usage("/dev/shm").total >> 30
    found += [f"{os.cpu_count()} cores", f"/dev/shm {room} GiB", f"open files {files}"]
    found += [f"locked memory {'unlimited' if locked < 0 else f'{locked >> 20} MiB'}"]
    if place.device != "cpu":
        from mpigossip.groups.nccl import missing

        free, whole = torch.cuda.mem_get_info(0)
        found += [f"{free >> 20} of {whole >> 20} MiB free", f"NCCL: {missing() or 'found'}"]
    for asked in (SMI, ["nvidia-smi", "topo", "-m"]):
        if shutil.which(asked[0]):
            done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
            print(done.stdout or done.stderr)
            found += [" ".join(done.stdout.split())] if asked is SMI else []
    return "; ".join(found), None


SHOWN = ("torch", "mpi4py", "h5py", "numpy", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
SMI = [
    "nvidia-smi", "--format=csv,noheader",
    "--query-gpu=name,driver_version,compute_mode,mig.mode.current,persistence_mode",
]  # fmt: skip


def kernels(place: Place):
    """The fused sum and the encoding against the CPU's bits, denormals among them."""
    import torch

    from mpigossip.mixing.combine import combine
    from mpigossip.mixing.kernels import fused

    if place.device == "cpu":
        return DEVICE_ONLY, None
    draw, took, wrong = torch.Generator().manual_seed(1), [], []
    for weights in ([0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.125] * 8):
        for width in (1, 511, place.size(1_000_003, 4099)):
            # from denormals (below 1.2e-38) to large ones; sums of denormals are denormal, too
            tens = torch.randint(-44, 30, (2, width), generator=draw)
            terms = [torch.randn(2, width, generator=draw) * 10.0**tens for _ in weights]
            expected = combine(weights, terms, torch.empty(2, width))
            there = [term.to(place.device) for term in terms]
            out = torch.empty(2, width, device=place.device)
            began = time.perf_counter()
            fast = fused.combine(weights, there, out)
            place.synchronize()
            took.append(time.perf_counter() - began)
            if not fast or not _same(out, expected):
                wrong.append(f"{len(weights)} x {width} {'differ' if fast else 'not fused'}")
    values = torch.randn(70_001, generator=draw) * 1e-39
    there, codes = values.to(place.device), torch.empty(70_001, dtype=torch.bfloat16)
    codes = codes.to(place.device)
    if not fused.encode(there, codes) or not _same(there, values.bfloat16().float()):
        wrong.append("bfloat16")
    tiny = int((expected.abs() < 1.2e-38).sum())
    first, later = max(took[::3]), min(took)
    said = f"first of a kind {first * 1e3:.0f} ms at most, later {later * 1e3:.2f} ms"
    return f"{'; '.join(wrong) or 'the same bits'} ({tiny} denormal); {said}", not wrong


def _same(found, expected) -> bool:
    """Bits, but for the payload of a NaN."""
    import torch

    return torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


def memory(place: Place):
    """A private allocation as torch and CuPy see it: each finds what the other has written."""
    import torch

    from mpigossip.mixing.device.memory import private

    held = private(1 << 20, torch.device(place.device))
    held.copy_(torch.arange(1 << 20, dtype=torch.int32).to(torch.uint8))
    place.synchronize()
    kept = torch.equal(held.cpu(), torch.arange(1 << 20, dtype=torch.int32).to(torch.uint8))
    if place.rehearsed:
        return f"torch's bytes {'stay' if kept else 'are lost'}; CuPy's part {DEVICE_ONLY}", kept
    import cupy

    seen = cupy.from_dlpack(held)
    here = bool((cupy.asnumpy(seen) == held.cpu().numpy()).all())
    seen.fill(7)
    cupy.cuda.runtime.deviceSynchronize()
    back = bool((held == 7).all())
    there = f"CuPy {'sees' if here else 'does not see'} torch's bytes"
    return f"{there}, torch {'sees' if back else 'does not see'} CuPy's", kept and here and back


def pinned(place: Place):
    """Copies from memory that was locked here and by torch; what can't be locked is refused."""
    import torch

    from mpigossip.mixing.device.memory import MemoryRefused, pin

    if place.device == "cpu":
        return DEVICE_ONLY, None
    size, device = place.size(256 << 20, 1 << 20), torch.device(place.device)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    area = mmap.mmap(-1, size)
    ours = torch.frombuffer(area, dtype=torch.uint8)
    torchs = torch.empty(size, dtype=torch.uint8, pin_memory=not place.rehearsed)

    def rate(memory) -> str:
        both = []
        for one, two in ((there, memory), (memory, there)):
            one.copy_(two, non_blocking=True)
            place.synchronize()
            began = time.perf_counter()
            one.copy_(two, non_blocking=True)
            place.synchronize()
            both.append(f"{size / (time.perf_counter() - began) / 1e9:.1f}")
        return "/".join(both)

    said, undo = [f"pageable {rate(ours)}"], pin([ours], device)
    said += [f"locked here {rate(ours)}", f"by torch {rate(torchs)} GB/s to/from the GPU"]
    refused = ""
    with failing("pin"):
        try:
            pin([ours], device)  # a second time: CUDA refuses that
        except MemoryRefused as error:
            refused = str(error)
    whole = bool((there[:8] == there[:8].clone()).all())  # the error isn't raised by what follows
    undo()
    words = "refused in words" if "cudaHostRegister" in refused else "NOT refused"
    return f"{', '.join(said)}; a second lock is {words}", "cudaHostRegister" in refused and whole


@contextlib.contextmanager
def failing(what: str):
    """On the double such calls fail inside; on a device they do so by themselves."""
    os.environ["MPIGOSSIP_DOUBLE_FAILS"] = what
    try:
        yield
    finally:
        del os.environ["MPIGOSSIP_DOUBLE_FAILS"]


def capture(place: Place):
    """A model that can't be captured goes on eagerly, on the default stream."""
    import warnings

    import torch

    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble
    from tests.test_gpu import job

    if place.device == "cpu":
        return DEVICE_ONLY, None
    made = job("mlp", place.device, "model.name=tests.test_gpu:Waits", "node.cuda_graphs=auto")
    assembly = assemble.assemble(made, Alone(), 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [float(assembly.trainer.step().loss) for _ in range(5)]
    warned = any("can't be captured" in str(one.message) for one in told)
    back = torch.cuda.current_stream() == torch.cuda.default_stream()
    finite = all(loss == loss and abs(loss) < 1e6 for loss in losses)
    assembly.close()
    said = f"{'warned' if warned else 'NOT warned'}, stream {'back' if back else 'KEPT'}"
    said += f", losses {losses[0]:.3f} to {losses[-1]:.3f}"
    return said, warned and back and finite


def nccl(place: Place):
    """Every call of NCCL with a single rank: sums of one term, and bytes sent to itself."""
    import torch

    from mpigossip.groups import nccl as inside

    if place.device == "cpu" or (reason := inside.missing()):
        return DEVICE_ONLY if place.device == "cpu" else reason, None
    from cupy.cuda import nccl as library

    group, wrong = inside.Nccl([place.device], timeout_s=30), []
    width = place.size(1 << 22, 1 << 10)
    try:
        wanted = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
        calls = {
            "reduceScatter": lambda full: group.reduce_scatter_mean(full)[0],
            "allGather": lambda full: group.all_gather([full[0].clone()], full) or full[0],
            "reduce": group.reduce_mean,
            "broadcast": lambda full: group.broadcast(full) or full[0],
        }
        for name, call in calls.items():
            if not torch.equal(call([wanted.to(place.device)]).cpu(), wanted):
                wrong.append(name)
    finally:
        group.close()
    comm = library.NcclCommunicator(1, library.get_unique_id(), 0)
    one, two = wanted.to(place.device), torch.zeros(1, width, device=place.device)
    stream = torch.cuda.default_stream(place.device).cuda_stream
    library.groupStart()
    comm.send(one.data_ptr(), one.nbytes, library.NCCL_UINT8, 0, stream)
    comm.recv(two.data_ptr(), two.nbytes, library.NCCL_UINT8, 0, stream)
    library.groupEnd()
    if not torch.equal(two.cpu(), wanted):
        wrong.append("send and recv")
    comm.destroy()
    return (f"wrong: {', '.join(wrong)}" if wrong else "6 calls, the same bits"), not wrong


def watchdog(place: Place):
    """What the watchdog says of a stream that sleeps: in time, and by the right name."""
    import torch

    from mpigossip.groups.nccl_watchdog import Watchdog

    if place.device == "cpu":
        return DEVICE_ONLY, None
    said: list[str] = []
    well = SimpleNamespace(check_async_error=lambda: None)
    dog = Watchdog([well], [place.device], 1.0, "no remedy", said.append)
    with failing("hang") if place.rehearsed else contextlib.nullcontext():
        before = torch.cuda.default_stream().record_event()
        if not place.rehearsed:
            torch.cuda._sleep(int(4 * clock(place)))
        behind = torch.cuda.default_stream().record_event()
        dog.track("a long sleep", [before], [behind])
        early, late = dog.look(time.monotonic()), dog.look(time.monotonic() + 2)
    place.synchronize()
    after = dog.look(time.monotonic() + 2)
    good = not early and "a long sleep" in late and "not done after 1 s" in late and not after
    return late or "nothing was said", good


def clock(place: Place) -> float:
    """Cycles a second of torch.cuda._sleep."""
    import torch

    one, two = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    one.record()
    torch.cuda._sleep(20_000_000)
    two.record()
    place.synchronize()
    return 20_000_000 / (one.elapsed_time(two) / 1e3)


def overflow(place: Place):
    """Gradients of fp16 that overflow in a replayed graph: a skipped step, half the scale."""
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble
    from tests.test_gpu import job

    if place.device == "cpu":
        return DEVICE_ONLY, None
    settings = ["node.precision=fp16", "node.cuda_graphs=always"]
    assembly = assemble.assemble(job("lenet", place.device, *settings), Alone(), 1)
    trainer = assembly.trainer
    scaler = trainer.settings.precision.scaler
    trainer.step()  # captured
    scaler.set(0, 2.0**40, 0)
    before = trainer.replicas.full[0].clone()
    trainer.step()
    halved = scaler.numbers(0)["loss_scale"] == 2.0**39
    whole = bool(trainer.replicas.full[0].isfinite().all())
    scaler.set(0, 2.0**10, 0)
    trainer.step()
    goes_on = bool((trainer.replicas.full[0] != before).any())
    kept = scaler.numbers(0)["loss_scale"] == 2.0**10
    replayed = trainer.replicas._captured is not None
    assembly.close()
    facts = {"replayed": replayed, "halved": halved, "finite": whole, "goes on": goes_on and kept}
    return ", ".join(f"{fact} {'yes' if true else 'NO'}" for fact, true in facts.items()), all(
        facts.values()
    )


def sanitized(place: Place):
    """The kernels' row once more under compute-sanitizer, where it is installed."""
    found = shutil.which("compute-sanitizer") or next(
        (str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None
    )
    if found is None:
        return "compute-sanitizer isn't installed here", None
    single = str(Path(__file__).with_name("single.py"))
    command = [found, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, single]
    done = subprocess.run(
        [*command, "kernels", "60", *(["--rehearse"] if place.rehearsed else [])],
        capture_output=True, text=True, timeout=place.seconds, check=False,
    )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    return (told or [f"ended with code {done.returncode}"])[-1].strip("= "), done.returncode == 0


FIRST = {
    "limits": limits, "kernels": kernels, "memory": memory, "pinned": pinned, "capture": capture,
    "nccl": nccl, "watchdog": watchdog, "overflow": overflow, "sanitized": sanitized,
}  # fmt: skip
