"""Count operations, copies and waits of a training step on emulated GPUs (tests/double).

    python tools/bench/gpu_counts.py                    print the table of this checkout
    python tools/bench/gpu_counts.py --checkout OLD     print the table of another checkout
    python tools/bench/gpu_counts.py --json FILE        write the counts, too

Two nodes exchange by windows of GPU memory. A count is the mean over some steps of one rank, after
the steps that allocate and compile. It needs a C++ compiler and mpiexec, but no GPU.

* operations: operations of torch, kernels and NCCL calls that are launched on streams
* bytes: bytes that they read and write, per byte of the model on this rank
* to the host, from the host: bytes of copies between GPUs and host memory; pageable: the part that
  is not in pinned memory
* waits: waits of the host for streams, events or devices

The counts do not contain accesses of MPI, which reads and writes GPU memory itself. The operations
of the model are part of the counts; "plain torch" is a step of the same model without exchange.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
WARM_UP = 3
STEPS = 4
"""Numbers of steps that are made before counting, and that are counted."""
LIMIT_S = 1200
"""Time limit of a launch, which counts several scenarios, in seconds."""
WIDTH = 512
"""Width of the layers of the loops' model."""
COLUMNS = ("operations", "bytes", "to_host", "from_host", "pageable", "waits")
OF_MODEL = ("model_operations", "model_bytes")
"""Parts of operations and bytes that compute gradients; they are known for jobs only."""
PROGRESS = "mpigossip-progress"
"""Beginning of the names of threads that never compute gradients."""
OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
"""Operations of torch that change an array without reading it."""
MEASURED = "consensus"
"""Name of the scenario in which each step measures the consensus distance."""


class Counter:
    """Counts of this process, while :meth:`running` is entered."""

    def __init__(self) -> None:
        self.values = dict.fromkeys((*COLUMNS, *OF_MODEL), 0.0)
        self._inside_synchronize = False
        self._in_model = False

    def of_model(self, compute: Callable) -> Callable:
        """Return a function whose operations count as operations of the model."""

        def computing(*arguments: Any, **options: Any) -> Any:
            self._in_model = True
            try:
                return compute(*arguments, **options)
            finally:
                self._in_model = False

        return computing

    def outside_model(self, work: Callable) -> Callable:
        """Return a function whose operations never count as operations of the model."""

        def working(*arguments: Any, **options: Any) -> Any:
            before = self._in_model
            self._in_model = False
            try:
                return work(*arguments, **options)
            finally:
                self._in_model = before

        return working

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count inside a block, in all threads of this process."""
        import torch

        from tests.double import checker, cuda, tensors

        saved = (
            checker.Timeline.given,
            tensors.perform,
            cuda.Stream.synchronize,
            cuda.Event.synchronize,
            torch.cuda.synchronize,
        )
        given, perform, of_stream, of_event, of_device = saved

        def count_operation(line: Any, what: str, read: list, written: list) -> None:
            given(line, what, read, written)
            if line is not checker.HOST:
                nbytes = sum(t.nbytes for t in [*read, *updated(what, written), *written])
                self.values["operations"] += 1
                self.values["bytes"] += nbytes
                if self._in_model and not threading.current_thread().name.startswith(PROGRESS):
                    self.values["model_operations"] += 1
                    self.values["model_bytes"] += nbytes

        def count_copy(func: Any, args: tuple, kwargs: dict) -> Any:
            result = perform(func, args, kwargs)
            if func in tensors.COPIES or func is tensors.aten._local_scalar_dense.default:
                self._count_copy(tensors, args, kwargs, result)
            return result

        def waiting(original: Callable) -> Callable:
            def wait(*arguments: Any) -> Any:
                self.values["waits"] += not self._inside_synchronize
                return original(*arguments)

            return wait

        def count_device(*arguments: Any) -> None:
            self.values["waits"] += 1
            self._inside_synchronize = True
            try:
                of_device(*arguments)
            finally:
                self._inside_synchronize = False

        checker.Timeline.given = count_operation
        tensors.perform = count_copy
        cuda.Stream.synchronize = waiting(of_stream)
        cuda.Event.synchronize = waiting(of_event)
        torch.cuda.synchronize = count_device
        try:
            yield
        finally:
            checker.Timeline.given = given
            tensors.perform = perform
            cuda.Stream.synchronize = of_stream
            cuda.Event.synchronize = of_event
            torch.cuda.synchronize = of_device

    def _count_copy(self, tensors: Any, args: tuple, kwargs: dict, result: Any) -> None:
        operands = tensors.tensors([*args, *kwargs.values()])
        sources = [t for t in operands if isinstance(t, tensors.OnDevice)]
        results = tensors.tensors([result]) or operands[:1]
        to_device = any(isinstance(t, tensors.OnDevice) for t in results)
        on_host = [t for t in [*operands, *results] if not isinstance(t, tensors.OnDevice)]
        if to_device and on_host:
            self.values["from_host"] += results[0].nbytes
        elif sources and not to_device:
            nbytes = results[0].nbytes if results else sources[0].nbytes
            self.values["to_host"] += nbytes
        else:
            return
        if not all(pinned(t) for t in on_host):
            self.values["pageable"] += (results or sources)[0].nbytes


def updated(what: str, written: list) -> list:
    """Return the arrays that an operation reads in order to write them, as `mul_` does.

    :param what: name of the operation, such as "aten.mul_.Tensor"
    :param written: arrays that it writes
    """
    name = what.removeprefix("aten.").partition(".")[0]
    return written if name.endswith("_") and name not in OVERWRITING else []


locked: list[tuple[int, int]] = []
"""Ranges of host memory, as begin and end, that this process has pinned."""


kept_arrays: list[Any] = []
"""Pinned arrays, which are never freed."""


def pinned(tensor: Any) -> bool:
    """Return whether an array in host memory is pinned."""
    begin = tensor.data_ptr()
    return any(low <= begin and begin + tensor.nbytes <= high for low, high in locked)


def note_pinned_memory() -> None:
    """Note from now on which memory is pinned, by torch and by cudaHostRegister."""
    import torch

    pin = torch.Tensor.pin_memory
    runtime = torch.cuda.cudart()
    register = runtime.cudaHostRegister

    def pin_memory(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        result = pin(tensor, *arguments)
        begin = result.data_ptr()
        locked.append((begin, begin + result.nbytes))
        kept_arrays.append(result)  # other memory never gets its address
        return result

    def host_register(address: int, nbytes: int, *arguments: Any) -> int:
        locked.append((address, address + nbytes))
        return register(address, nbytes, *arguments)

    torch.Tensor.pin_memory = pin_memory
    runtime.cudaHostRegister = host_register


def counted_steps(
    step: Callable[[], Any], elements: int, counter: Counter | None = None
) -> dict[str, float]:
    """Make the steps, and return the mean counts of a step, by name.

    "bytes" and "model_bytes" are divided by the bytes of the model, whose ``elements`` are added.

    :param step: function that makes one step
    :param elements: number of elements of the model on this rank
    :param counter: counter to use; None: a new one
    """
    for _ in range(WARM_UP):
        step()
    counter = counter or Counter()
    with counter.running():
        for _ in range(STEPS):
            step()
    values = {name: value / STEPS for name, value in counter.values.items()}
    values["bytes"] /= 4 * elements
    values["model_bytes"] /= 4 * elements
    values["elements"] = elements
    return values


def job_settings(slots: int, *settings: str) -> list[str]:
    """Return the settings of a job whose nodes have ``slots`` GPUs."""
    base = ["data.batch=4", "run.epochs=1", "schedule.scale=none", "node.precision=fp32"]
    base += ["log.consensus_every=0", "node.cuda_graphs=never", "algorithm.name=dmsgd"]
    base += ["graph.name=one-peer-exponential", "node.exchange=windows"]
    base += [f"node.devices=cuda:0-{slots - 1}" if slots > 1 else "node.devices=cuda:0"]
    return [*base, *settings]


def job(slots: int, *settings: str, world: Any = None, ranks_per_node: int = 1) -> dict[str, float]:
    """Count the steps of a job.

    :param slots: number of GPUs of a rank
    :param settings: further settings
    :param world: world of all ranks; None: open it
    :param ranks_per_node: number of ranks of a node; if there are several, each has its own GPU
    """
    import mpigossip
    from mpigossip.training import assemble

    with contextlib.ExitStack() as stack:
        if world is None:
            opened = mpigossip.world(timeout_s=60, ranks_per_node=ranks_per_node)
            world = stack.enter_context(opened)
        elif ranks_per_node > 1:
            world.group_into_nodes(ranks_per_node)
        named = job_settings(slots, *settings)
        if ranks_per_node > 1:
            named.append(f"node.devices=cuda:{world.rank}")
        loaded = assemble.load({"model": {"name": "mlp"}}, named)
        assembly = assemble.assemble(loaded, world, world.size // ranks_per_node)
        replicas = assembly.trainer.replicas
        counter = Counter()
        if (average := getattr(replicas, "_average", None)) is not None:
            average._start_next = counter.outside_model(average._start_next)
        if hasattr(replicas, "gradients"):
            replicas.gradients = counter.of_model(replicas.gradients)
        values = counted_steps(assembly.trainer.step, replicas.flat.size, counter)
        assembly.close()
    return values


def in_node(bucket_mb: float) -> dict[str, float]:
    """Count the steps of a job whose nodes have two ranks with a GPU each.

    :param bucket_mb: value of `node.bucket_mb`; 0: averages begin after the backward pass, as in
        checkouts without this setting
    """
    from mpigossip.config.sections import NodeSection

    known = hasattr(NodeSection, "bucket_mb")
    settings = [f"node.bucket_mb={bucket_mb}"] if known or bucket_mb else []
    return job(1, *settings, ranks_per_node=2)


def model_of_loops() -> Any:
    """Return the model of the loops, whose parameters are equal on all ranks."""
    import torch
    from torch import nn

    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def loop(kind: str) -> dict[str, float]:
    """Count the steps of a custom loop; ``kind``: "plain", "single" or "fsdp2".

    A node has two ranks in the last case. DistributedDataParallel is not counted, because
    its C++ code does not accept the work objects of the double's process groups.
    """
    import torch
    from torch import nn

    import mpigossip

    per_node = 2 if kind == "fsdp2" else 1
    with mpigossip.world(timeout_s=60, ranks_per_node=per_node) as world:
        device = torch.device("cuda", world.rank)
        torch.cuda.set_device(device)
        model = model_of_loops().to(device)
        elements = sum(p.numel() for p in model.parameters())
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh = world.node_mesh()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            elements //= per_node
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer: Any = inner
        if kind != "plain":
            optimizer = mpigossip.Gossip(world, model, inner, exchange="windows", timeout_s=60)
        draw = torch.Generator().manual_seed(world.rank)
        batch = torch.randn(4, WIDTH, generator=draw).to(device)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        values = counted_steps(step, elements)
        if kind != "plain":
            optimizer.close()
    return values


SCENARIOS: dict[str, tuple[int, str, Callable[[], dict[str, float]]]] = {
    "job-1": (2, "job, 1 slot", lambda: job(1)),
    "job-2": (2, "job, 2 slots", lambda: job(2)),
    "job-8": (2, "job, 8 slots", lambda: job(8)),
    "job-qsgd": (2, "job, 1 slot, wire qsgd", lambda: job(1, "node.wire=qsgd")),
    MEASURED: (2, "job, 1 slot, consensus measured", lambda: job(1, "log.consensus_every=1")),
    "plain": (2, "loop, plain torch", lambda: loop("plain")),
    "job-ranks": (4, "job, 2 ranks of a slot", lambda: in_node(0)),
    "job-buckets": (4, "the same in buckets", lambda: in_node(0.004)),
    "single": (2, "loop, a rank per node", lambda: loop("single")),
    "fsdp2": (4, "loop, FSDP2 over 2 ranks", lambda: loop("fsdp2")),
}
"""Scenarios: number of ranks, name in the table, and function that counts on each rank."""


def run_here(names: list[str], folder: Path) -> None:
    """Count scenarios on this rank; rank 0 writes the counts of each to a file in ``folder``."""
    from mpi4py import MPI

    from mpigossip.mixing.device import proof

    # MPI is asked whether it accepts GPU memory, which a process proves; here it is the CPU's.
    name_of_proof = "try_in_subprocess" if hasattr(proof, "try_in_subprocess") else "tried"
    setattr(proof, name_of_proof, lambda devices, timeout_s, way="windows": (True, ""))
    os.environ["MPICH_GPU_SUPPORT_ENABLED"] = "1"
    note_pinned_memory()
    for name in names:
        values = SCENARIOS[name][2]()
        if MPI.COMM_WORLD.rank == 0:
            write_json(folder / f"{name}.json", values)


def write_json(path: Path, values: Any) -> None:
    """Write values to a temporary file, and rename it."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    temporary.rename(path)


def count(names: list[str], checkout: Path, folder: Path, limit_s: float) -> dict[str, Any]:
    """Count scenarios with equal numbers of ranks; return the counts of successful ones, by name.

    :param names: names of the scenarios
    :param checkout: checkout to count in
    :param folder: folder with the compiled code of the double
    :param limit_s: time limit of all scenarios, in seconds
    """
    environment = dict(os.environ)
    environment |= {"MPIGOSSIP_DOUBLE": "8", "MPIGOSSIP_DOUBLE_FOLDER": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(checkout / "tests/double/site"), str(checkout), os.environ.get("PYTHONPATH", "")]
    )
    launcher = os.environ.get("MPIGOSSIP_MPIEXEC") or str(Path(sys.executable).parent / "mpiexec")
    ranks = SCENARIOS[names[0]][0]
    command = [*launcher.split(), "-n", str(ranks), sys.executable, str(HERE)]
    command += ["--inside", *names, "--results", str(folder)]
    reason = ""
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=checkout,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if done.returncode:
            reason = f"exit code {done.returncode}\n{done.stderr[-3000:]}"
    except subprocess.TimeoutExpired:
        reason = f"no result within {limit_s:g} s"
    files = {name: folder / f"{name}.json" for name in names}
    if reason:
        missing = ", ".join(name for name, file in files.items() if not file.exists())
        print(f"{missing}: {reason}", file=sys.stderr)
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def compile_guard(checkout: Path, folder: Path) -> None:
    """Compile the part of a checkout's double that is written in C++."""
    code = "import sys; from pathlib import Path; from tests.double.__main__ import environment; "
    code += "environment(Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=environment, cwd=checkout, check=True
    )


def table(counts: dict[str, dict[str, float]]) -> str:
    """Return the counts as a table in Markdown."""
    head = "| step | operations | bytes, per byte of the model | to the host | from the host | "
    lines = [head + "pageable | waits |", "|---|---|---|---|---|---|---|"]
    for name, values in counts.items():
        cells = [f"{values['operations']:,.0f}", f"{values['bytes']:.1f}"]
        cells += [f"{values[column]:,.0f}" for column in ("to_host", "from_host", "pageable")]
        cells.append(f"{values['waits']:g}")
        lines.append(f"| {SCENARIOS[name][1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, count, and print the table.

    :raises SystemExit: if a scenario has no result
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--checkout", type=Path, default=HERE.parents[2])
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of each launch")
    parser.add_argument("--inside", nargs="+", choices=[*SCENARIOS], help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        run_here(options.inside, options.results)
        return
    checkout = options.checkout.resolve()
    with tempfile.TemporaryDirectory(prefix="mpigossip-counts-") as folder:
        compile_guard(checkout, Path(folder))
        counts = {}
        for ranks in sorted({SCENARIOS[name][0] for name in options.only}):
            names = [name for name in options.only if SCENARIOS[name][0] == ranks]
            counts |= count(names, checkout, Path(folder), options.limit)
    if options.json:
        write_json(options.json, counts)
    print(table(counts))
    if len(counts) < len(options.only):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
