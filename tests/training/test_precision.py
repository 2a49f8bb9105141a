"""bfloat16 and float16 arithmetic, loss scales of nodes, and capture of CUDA graphs."""

import contextlib
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpigossip import algorithms
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.groups.base import Single, Unsharded
from mpigossip.groups.threads import ThreadGroup
from mpigossip.mixing.base import ExchangeKind
from mpigossip.runs import start_and_resume
from mpigossip.store import checkpoint
from mpigossip.training import assemble, capture, evaluate, precision, replicas
from tests.cases import naming, on_each, with_world


def job(*settings, model="lenet"):
    base = ["data.batch=2", "run.epochs=1", "schedule.scale=none"]
    return assemble.load({"model": {"name": model}}, [*base, *settings])


def losses(*settings, steps=30):
    assembly = assemble.assemble(job(*settings), SingleProcess(), 2)
    values = [float(assembly.trainer.step().loss.mean()) for _ in range(steps)]
    assembly.close()
    return values


@on_each("name", ["bf16", "fp16"])
def test_16_bit_arithmetic_trains_as_float32_does(name):
    plain = losses("node.precision=fp32", "schedule.lr=0.02")
    rounded = losses(f"node.precision={name}", "schedule.lr=0.02")
    assert rounded != plain
    assert rounded[0] == pytest.approx(plain[0], abs=0.02)
    assert sum(rounded[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.1)


def test_tf32_is_disabled_without_a_warning_of_torch():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    try:
        precision.without_tf32()
        assert [backend.fp32_precision for backend in backends] == ["ieee"] * 3
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


def test_auto_is_float32_on_a_cpu():
    assert precision.agreed("auto", SingleProcess(), ["cpu"]) == "fp32"
    assert precision.agreed("bf16", SingleProcess(), ["cpu"]) == "bf16"
    assert losses(steps=3) == losses("node.precision=fp32", steps=3)


@with_world
def arithmetic_of(world, old_gpus):
    """Return the arithmetic of a rank with two GPUs; some ranks have one GPU without bfloat16."""
    devices = ["cuda:0", "cuda:old" if world.rank in old_gpus else "cuda:1"]
    supports = pytest.MonkeyPatch()
    with supports.context() as patch:
        patch.setattr(precision, "supports_bf16", lambda device: device != "cuda:old")
        settings = ("auto", "bf16", "fp16", "fp32")
        return [precision.agreed(setting, world, devices) for setting in settings]


@pytest.mark.parametrize(("old_gpus", "auto"), [((), "bf16"), ((0,), "fp32"), ((1, 2), "fp32")])
def test_all_ranks_use_bf16_or_none(ranks, old_gpus, auto):
    outcomes = ranks(3)(arithmetic_of, old_gpus)
    assert outcomes == [[auto, "bf16", "fp16", "fp32"]] * 3


@pytest.mark.parametrize(
    "group", [lambda: Single(), lambda: ThreadGroup(3), lambda: Unsharded(ThreadGroup(3))]
)
def test_an_overflow_anywhere_makes_the_whole_node_skip_its_step(group):
    group = group()
    scaler = precision.Precision("fp16", group.devices, rows=2)
    g = [torch.full((2, 6), 2.0**17) for _ in range(group.segments)]
    g[-1][1, 5] = float("inf")
    assert scaler.unscale(g, group) == (1,)
    for shard in g:
        assert (shard[0] == 2.0).all(), "node 0 is not affected"
        assert (shard[1] == 0.0).all(), "node 1 skips its update in all shards"
    assert scaler.numbers(0) == {"loss_scale": 2.0**16, "clean_steps": 1}
    assert scaler.numbers(1) == {"loss_scale": 2.0**15, "clean_steps": 0}
    for scales in scaler.scales:
        assert scales[:, 0].tolist() == [2.0**16, 2.0**15]
    group.close()


def test_gradients_that_all_average_are_skipped_by_all_or_none():
    scaler = precision.Precision("fp16", ["cpu"], rows=1)
    counts_of_others = torch.ones(1, dtype=torch.float64)
    g = torch.full((1, 4), 2.0**16)
    assert scaler.unscale([g.clone()], Single()) == ()
    assert scaler.unscale([g], Single(), lambda counts: counts_of_others) == (0,)
    assert not g.any() and scaler.numbers(0) == {"loss_scale": 2.0**15, "clean_steps": 0}


LOCALS = [name for name, part in algorithms.LOCALS.items() if not part(0).whole]
METHODS = [
    *(f"dsgd {style} {local}" for style in ("atc", "awc") for local in LOCALS),
    *("dmsgd - -", "parallel - adamw", "decentlam - -", "dsgt atc momentum", "dsgt awc sgd"),
    *("momentum-tracking atc sgd", "sgp - nesterov", "slowmo - momentum", "d2 - momentum"),
]


def leaves(state):
    return [state] if isinstance(state, torch.Tensor) else sum(map(leaves, state), [])


@on_each("words", METHODS)
def test_a_skipped_row_takes_no_local_step_and_the_others_do(words):
    """Nothing is exchanged, so that only the local step changes x."""
    name, style, local = words.split()
    options = {} if style == "-" else {"style": style}
    method = algorithms.build(name, None if local == "-" else local, options, 8)

    def two_steps(skipped):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(2, 16, generator=draw)
        state = method.init(x)
        seen = []
        for index, rows in enumerate([(), skipped]):
            g = torch.randn(2, 16, generator=draw)
            g[list(rows)] = 0
            now = algorithms.Step(index, 0, ExchangeKind.LOCAL, 0.1, rows)
            out = tuple(torch.empty(2, 16) for _ in range(method.vectors))
            out += tuple(torch.empty(2, 1, dtype=torch.float64) for _ in range(method.scalars))
            state = method.send(x, None if method.ahead else g, state, out, now)
            state = method.receive(x, g, state, out, out, now)
            seen.append([part.clone() for part in (x, *leaves(state))])
        return seen

    plain = two_steps(())
    (before, after) = two_steps((0,))
    for old, new, usual in zip(before, after, plain[1], strict=True):
        assert torch.equal(new[1], usual[1])
        if name != "d2":  # it repeats the last change of x
            assert torch.equal(new[0], old[0])
    assert not torch.equal(plain[1][0][0], before[0][0])


def test_the_scale_grows_after_clean_steps_and_has_limits(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    scaler = precision.Precision("fp16", ["cpu"], rows=1)
    address = scaler.scales[0].data_ptr()
    clean = torch.ones(1, 4)
    broken = torch.full((1, 4), float("nan"))
    for _ in range(3):
        scaler.unscale([clean.clone()], Single())
    assert scaler.numbers(0) == {"loss_scale": 2.0**17, "clean_steps": 0}
    for _ in range(60):
        scaler.unscale([broken.clone()], Single())
    assert scaler.numbers(0)["loss_scale"] == 2.0**-14
    for _ in range(200):
        scaler.unscale([clean.clone()], Single())
    assert scaler.numbers(0)["loss_scale"] == 2.0**24
    assert scaler.scales[0].data_ptr() == address, "captured graphs read this address"


def test_a_node_that_overflows_still_takes_part_in_the_round():
    assembly = assemble.assemble(
        job("node.precision=fp16", "algorithm.name=dsgd"), SingleProcess(), 2
    )
    trainer = assembly.trainer
    scaler = trainer.precision
    scaler.restore(1, {"loss_scale": 2.0**24, "clean_steps": 0})
    trainer.replicas.full[0][1] += 1e-3
    before = trainer.replicas.full[0].clone()
    sent = list(trainer.mixer.bytes_sent)
    while scaler.numbers(1)["loss_scale"] == 2.0**24 and trainer.engine.index < 5:
        record = trainer.step()
        assert torch.isfinite(record.loss).all()
    assert scaler.numbers(1)["loss_scale"] == 2.0**23, "the loss times 2^24 overflows"
    assert scaler.numbers(0)["loss_scale"] == 2.0**16
    after = trainer.replicas.full[0]
    assert torch.isfinite(after).all() and not torch.equal(after[1], before[1])
    assert trainer.mixer.bytes_sent[1] > sent[1]
    assembly.close()


def test_a_resumed_fp16_run_continues_with_its_loss_scales(tmp_path):
    def run(name, *more):
        made = job("node.precision=fp16", f"run.output={tmp_path}/{name}", *more)
        return start_and_resume.train(made, SingleProcess(), 2)

    run("whole", "run.steps=6")
    run("halves", "run.steps=3")
    start_and_resume.resume(tmp_path / "halves", ["run.steps=6"], SingleProcess(), None)
    ends = [checkpoint.latest(tmp_path / name) for name in ("whole", "halves")]
    one, other = (checkpoint.read_node(end, 1) for end in ends)
    assert one.numbers["clean_steps"] == other.numbers["clean_steps"] == 6
    assert (one.parameters == other.parameters).all()


def test_fp16_and_vmap_are_rejected_together():
    (message,) = assemble.mistakes(job("node.precision=fp16", "node.vmap=true"), 2)
    assert message.startswith('node.precision = "fp16"') and "bf16" in message


def test_cuda_graphs_are_rejected_or_not_used_on_a_cpu():
    (message,) = assemble.mistakes(job("node.cuda_graphs=always"), 2)
    assert message.startswith('node.cuda_graphs = "always"')
    assembly = assemble.assemble(job("node.cuda_graphs=auto"), SingleProcess(), 1)
    assert assembly.trainer.replicas.graphs == "never"
    assembly.close()


def test_warm_up_passes_leave_no_trace():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with capture.preserve_state(module, "cpu"):
        module(torch.randn(8, 4))
        assert not torch.equal(module[1].running_mean, before["1.running_mean"])
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert torch.equal(torch.rand(3), expected)


def cannot(*args):
    raise capture.CannotCapture("Net can't be captured as a CUDA graph: it waits for the GPU")


def test_a_model_that_cannot_be_captured_falls_back_to_threads(monkeypatch):
    monkeypatch.setattr(replicas, "Captured", cannot)
    assembly = assemble.assemble(job("node.devices=cpu:2"), SingleProcess(), 2)
    assembly.trainer.replicas.graphs = "auto"
    with pytest.warns(UserWarning, match=naming("can't be captured", "thread")):
        first = assembly.trainer.step().loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assembly.trainer.step()
    assembly.close()
    assembly = assemble.assemble(job("node.devices=cpu:2"), SingleProcess(), 2)
    assert torch.equal(assembly.trainer.step().loss, first)
    assembly.trainer.replicas.graphs = "always"
    with pytest.raises(capture.CannotCapture):
        assembly.trainer.step()
    assembly.close()


class Strict:
    """Stand-in for graphs that were captured with a batch of another shape."""

    def __init__(self, *args):
        self.replay = cannot


def test_batches_of_other_shapes_fall_back_to_threads(monkeypatch):
    monkeypatch.setattr(replicas, "Captured", Strict)
    assembly = assemble.assemble(job("node.devices=cpu:2"), SingleProcess(), 2)
    assembly.trainer.replicas.graphs = "auto"
    with pytest.warns(UserWarning, match=naming("thread per slot")):
        assembly.trainer.step()
    assert assembly.trainer.replicas._captured is None
    assembly.close()


class FakeGraphs:
    """Stand-in for CUDA graphs: captured code runs at once, and a replay is only logged."""

    def __init__(self, monkeypatch, fails=""):
        self.log = []
        self.fails = fails
        quiet = contextlib.nullcontext
        stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=self.synchronize)
        fakes = {
            "Stream": lambda: stream,
            "current_stream": lambda: stream,
            "graph": self.graph,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.log.append("replay")),
            "current_device": lambda: 0,
            "graph_pool_handle": iter(range(9)).__next__,
            "stream": lambda s: quiet(),
            "device": lambda d: quiet(),
            "set_stream": lambda s: None,
        }
        states = {name: getattr(self, name) for name in ("clone_state", "graphsafe_set_state")}
        fakes["default_generators"] = (SimpleNamespace(**states),)
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    def clone_state(self):
        self.log.append("a new state")
        return "new"

    def graphsafe_set_state(self, state):
        self.log.append(f"the {state} state is used")

    def end(self, device, pool):
        self.log.append(f"pool {pool} of {device} is closed")
        raise RuntimeError("not recording to this pool")  # as in newer versions

    def synchronize(self):
        self.log.append("synchronize")

    @contextlib.contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.log.append(f"capture into pool {pool}")
        if self.fails:
            raise RuntimeError(self.fails)
        yield


class Lost:
    """Stand-in for a loss on a GPU that has failed."""

    device = "cuda:1"

    def cpu(self):
        raise RuntimeError("the GPU has fallen off the bus")


def captured(module, slots=2):
    def run(row, slot, batch):
        return (module(batch[0]) - batch[1]).square().mean().double().detach().view(1)

    batch = (torch.ones(3, 2), torch.zeros(3, 2))
    return capture.Captured(run, [[module] * slots], [batch] * slots), batch


def test_graphs_of_a_device_share_a_pool_and_replay_in_their_order(monkeypatch):
    fake = FakeGraphs(monkeypatch)
    graphs, (inputs, targets) = captured(nn.Linear(2, 2))
    assert fake.log == ["synchronize", "capture into pool 0"] * 2
    assert graphs.replay([(inputs + 1, targets)] * 2).shape == (1, 2, 1)
    assert fake.log[-2:] == ["replay"] * 2
    for fixed, _ in graphs._inputs:
        assert torch.equal(fixed, inputs + 1), "new values are copied to the inputs of the graph"
    graphs._figures[1] = Lost()
    with pytest.raises(RuntimeError, match=naming("off the bus")) as caught:
        graphs.replay([(inputs, targets)] * 2)
    assert caught.value.__notes__ == ["in slot 1 of this node, on cuda:1"]
    done = list(fake.log)
    with pytest.raises(
        capture.CannotCapture, match=naming("(1, 2)", "(3, 2)", 'node.cuda_graphs = "never"')
    ):
        graphs.replay([(inputs, targets), (inputs[:1], targets[:1])])
    assert fake.log == done, (
        "nothing was launched, so that training without graphs starts at the first replica"
    )


def test_a_failed_capture_is_synchronized_before_buffers_are_restored(monkeypatch):
    fake = FakeGraphs(monkeypatch, "operation not permitted when stream is capturing\nlong story")
    module = nn.BatchNorm1d(2)
    with pytest.raises(capture.CannotCapture, match=naming("BatchNorm1d", "can't be captured")):
        captured(module)
    assert fake.log[:3] == ["synchronize", "capture into pool 0", "synchronize"]
    # the state that torch leaves behind would stop eager code later
    assert fake.log[3:] == [
        "pool 0 of 0 is closed",
        "a new state",
        "the new state is used",
    ]
    assert not module.running_mean.any(), "warm-up passes leave no trace"


class FakeCaptured:
    """Stand-in for `Captured` that runs the passes instead of replaying graphs."""

    def __init__(self, run, modules, batches):
        self.run = run
        self.rows = len(modules)
        self.slots = len(modules[0])

    def replay(self, batches):
        figures = [
            self.run(row, slot, batches[row * self.slots + slot])
            for row in range(self.rows)
            for slot in range(self.slots)
        ]
        return torch.stack(figures).view(self.rows, self.slots, -1)


@pytest.mark.parametrize("settings", [["algorithm.accumulate=2"], ["node.precision=fp16"]])
def test_replayed_replicas_give_the_results_of_threads(monkeypatch, settings):
    """Order of batches, losses and means agree, with two rows and two slots."""

    def steps(graphs):
        assembly = assemble.assemble(job("node.devices=cpu:2", *settings), SingleProcess(), 2)
        assembly.trainer.replicas.graphs = graphs
        step_losses = [assembly.trainer.step().loss for _ in range(3)]
        full = assembly.trainer.replicas.full[1].clone()
        assembly.close()
        return torch.stack(step_losses), full

    monkeypatch.setattr(replicas, "Captured", FakeCaptured)
    for one, other in zip(steps("always"), steps("never"), strict=True):
        assert torch.equal(one, other)


def test_compiled_replicas_are_traced_and_their_copies_are_not(monkeypatch):
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    settings = ["node.compile=true", "node.devices=cpu:2"]
    assembly = assemble.assemble(job(*settings, model="mlp"), SingleProcess(), 2)
    assembly.trainer.step()
    assert compiled
    traced = len(compiled)
    trainer = assembly.trainer
    averaged = evaluate.averaged_model(trainer.replicas, trainer.mixer)
    averaged(torch.zeros(2, 1, 8, 8))
    assert len(compiled) == traced
    assembly.close()


def test_all_problems_are_reported_together():
    with pytest.raises(JobError) as caught:
        assemble.assemble(
            job("node.devices=cuda:0-63", "node.vmap=true", "node.precision=fp16"),
            SingleProcess(),
            2,
        )
    assert len(caught.value.messages) == 2
