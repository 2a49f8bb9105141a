"""The kernels for GPUs: their text, run or compiled for the CPU, has the bits of the reference."""

import contextlib
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms.base import Step
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.codes import wire
from mpigossip.mixing.combine import combine
from mpigossip.mixing.kernels import elementwise, fused, onepass
from mpigossip.mixing.kernels.elementwise import Pass
from mpigossip.mixing.kernels.fused import operation
from tests.mixing.kernels import on_cpu

FUNCTIONS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "over": np.divide, "root": np.sqrt,
    "minus": np.negative, "pick": np.where,
}  # fmt: skip
"""what a text may call, in float32, each operation rounded by itself"""


def run_text(text, values):
    """The statements of a kernel; all names afterwards."""
    names = FUNCTIONS | values
    for statement in text.split(";"):
        exec(statement.strip().removeprefix("float "), names)
    return names


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4], [1 / 8] * 8]
)
def test_the_kernels_arithmetic_has_the_bits_of_the_sum(weights):
    arrays = [torch.randn(1, 10_000) for _ in weights]
    kinds, uniform = "f" * len(weights), len(set(weights)) == 1
    values = {f"x{k}": array.numpy() for k, array in enumerate(arrays)}
    values |= {f"w{k}": np.float32(weight) for k, weight in enumerate(weights)}
    expected = combine(weights, arrays, torch.empty(1, 10_000)).numpy()
    assert (run_text(operation(kinds, uniform), values)["y"] == expected).all()


def compiled(forms, folder):
    """Kernels as functions that take what CuPy's do, run by this processor."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler to try the kernels' text with")
    return on_cpu.compiled([elementwise.source(form) for form in forms], folder)


@pytest.fixture
def on_the_cpu(monkeypatch, tmp_path):
    """Launches compile their kernel for this processor and run it; the forms, in order."""
    seen = []

    def kernel(form):
        seen.append(form)
        return compiled([form], tmp_path)[0]

    monkeypatch.setattr(elementwise, "_compiled", cache(kernel))
    monkeypatch.setattr(elementwise, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(elementwise, "usable", lambda device: True)
    monkeypatch.setattr(fused, "usable", lambda device: True)
    return seen


EDGES = [0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-40, -1e-45, float("inf"), 1.00390625, float("nan")]


@pytest.mark.parametrize("rows, width, begin", [(1, 10_011, 0), (3, 1028, 4), (2, 999, 1)])
def test_kernels_have_torchs_bits(on_the_cpu, rows, width, begin):
    """Encoding, and a sum whose second term is encoded: all loads of four, with a rest, or none."""
    shape = (rows, width + 8)
    values = torch.randn(shape) * 10.0 ** torch.randint(-44, 30, shape)
    values[0, begin + 5 : begin + 5 + len(EDGES)] = torch.tensor(EDGES)
    values = values[:, begin : begin + width]
    expected = values.to(torch.bfloat16)
    codes, decoded = torch.zeros(width, dtype=torch.bfloat16), values[0].clone()
    assert fused.encode(decoded, codes)
    numbers = ~expected[0].isnan()
    assert torch.equal(codes.isnan(), ~numbers)
    assert torch.equal(codes[numbers].view(torch.int16), expected[0][numbers].view(torch.int16))
    assert torch.equal(decoded.nan_to_num(7), expected[0].float().nan_to_num(7))
    out, other = torch.zeros(rows, width + 4)[:, :width], torch.randn(rows, width) * 1e-38
    assert fused.combine([0.3, 0.7], [other, expected], out)
    wanted = combine([0.3, 0.7], [other, expected.float()], torch.empty(rows, width))
    assert torch.equal(out.nan_to_num(7), wanted.nan_to_num(7))
    assert ((out != 0) & (out.abs() < 1e-38)).any(), "denormals are among the sums"
    assert [form.fours for form in on_the_cpu] == [True, width != 999]


# -- one pass of an algorithm ------------------------------------------------------------------

P, ROWS = 300, 2


def rounded(values):
    there = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return there.float().numpy()


def run_pass(made):
    """A pass's text in numpy, and its outputs written."""
    values = {name: array.numpy() for name, array in made.inputs.items()}
    values |= {name: np.float32(value) for name, value in made.numbers.items()}
    values |= {"j": np.arange(made.shape[1]), "narrow": rounded, "wide": lambda code: code}
    names = run_text(
        made.text.replace("0.0f", "np.float32(0)"), {**values, **made.counts, "np": np}
    )
    for name, array in made.outputs.items():
        array.copy_(torch.from_numpy(np.broadcast_to(names[name], made.shape).astype(np.float32)))


@pytest.fixture
def passes(monkeypatch):
    """Every send and receive goes in one pass; the passes, in order."""
    made = []

    def launch(one):
        made.append(one)
        run_pass(one)

    monkeypatch.setattr(onepass, "launch", launch)
    monkeypatch.setattr(onepass, "_worth", lambda x: True)
    onepass._plain.clear()
    return made


def steps(method, in_passes, count=6, skipped=(), coded=False, device="cpu"):
    """x and state of two nodes after some steps of all kinds."""
    draw = torch.Generator().manual_seed(1)

    def random():
        return torch.randn(ROWS, P, generator=draw).to(device)

    x = random()
    state = method.init(x)
    for k in range(count):
        kind = (Kind.GOSSIP, Kind.LOCAL, Kind.GLOBAL)[k % 3]
        now, g = Step(k, k, kind, 0.1, skipped), random()
        vectors = [torch.full_like(x, 7.0) for _ in range(method.vectors)]
        scalars = [torch.zeros(ROWS, 1, dtype=torch.float64, device=device)] * method.scalars
        out = onepass.Coded([*vectors, *scalars])
        if coded:
            out.codes = tuple(v.to(torch.bfloat16) for v in vectors)
        local, early = kind is Kind.LOCAL, None if method.ahead else g
        send, receive = onepass.send, onepass.receive
        if not in_passes:
            send = receive = lambda function, *arguments, **_: function(*arguments)
        state = send(method.send, x, early, state, out, now, local=local)
        if coded and not local:
            assert out.written == in_passes
            for vector, code in zip(out, out.codes, strict=False):
                vector.copy_(vector.to(torch.bfloat16))
                assert not in_passes or torch.equal(vector, code.float())
        mixed = tuple(part * 0.5 + part.flip(0) * 0.5 for part in out)
        state = receive(method.receive, x, g, state, out, mixed, now)
    return x, state


def leaves(state):
    return [state] if torch.is_tensor(state) else [leaf for part in state for leaf in leaves(part)]


def same_twice(method, coded=False, **options):
    """Whether passes give what torch gives, within rounding, and leave arrays where they were."""
    (x, state), (other, there) = (steps(method, p, coded=coded, **options) for p in (False, True))
    pairs = [(x, other), *zip(leaves(state), leaves(there), strict=True)]
    bar = 1e-2 if coded else 2e-6  # a bit of rounding may turn another way
    return all(float((a - b).norm()) <= bar * float(a.norm()) + 1e-9 for a, b in pairs)


VARIANTS = [
    *[(name, None, {}) for name in algorithms.BUILDERS],
    *[("dsgt", local, {}) for local, part in algorithms.LOCALS.items() if not part(0).whole],
    ("dsgd", "adamw", {"decoupled_decay": 0.1}),
    ("dsgd", "nesterov", {"style": "awc"}),
    ("dmsgd", None, {"momentum": "delayed"}),
]


@pytest.mark.parametrize("name, local, options", VARIANTS)
def test_every_algorithm_goes_in_one_pass(passes, name, local, options):
    method = algorithms.build(name, local, options, decayed=130)
    assert same_twice(method)
    assert len(passes) > 6 and not onepass._plain, "no step was left to torch"


@pytest.mark.parametrize("name", ["dmsgd", "dsgt", "sgp", "diloco", "parallel", "choco"])
@pytest.mark.parametrize("biased", [True, False])
def test_codes_of_a_bf16_wire_are_written_in_the_same_pass(passes, name, biased):
    base = algorithms.build(name, None, {}, 0)
    for method in (base, algorithms.over_wire(base, biased=biased, meets=True)):
        assert same_twice(method, coded=True)
        assert not onepass._plain
    assert any("narrow" in one.text for one in passes)


def test_an_array_is_read_and_written_once(passes):
    method = algorithms.build("dmsgd", None, {}, 0)
    steps(method, True, count=1)
    sent, received = passes
    assert sent.text.count("a0") == 1 and len(sent.inputs) == 3 and len(sent.outputs) == 2
    assert len(received.inputs) == len(received.outputs) == 2
    # the gradient that a local step used up isn't written
    _, received = (steps(algorithms.build("decentlam", None, {}, 0), True, count=1), passes[-1])
    assert len(received.inputs) == 3 and len(received.outputs) == 2


def rolled(method):
    """The same method with an operation that isn't elementwise, after some that are."""

    def send(x, g, state, out, step):
        state = method.send(x, g, state, out, step)
        out[0].copy_(out[0].roll(1, 1))
        return state

    def receive(x, g, state, sent, mixed, step):
        with torch.no_grad():
            return method.receive(x, g, state, sent, (mixed[0][:, 1:], *mixed[1:]), step)

    return method._replace(send=send, receive=receive)


def test_what_is_no_pass_is_left_to_torch_whole(passes):
    method = rolled(algorithms.build("sgp", None, {}, 0))
    assert steps(method, False, count=0)[0].shape == (ROWS, P)
    draw = torch.Generator().manual_seed(1)
    x, g = (torch.randn(ROWS, P, generator=draw) for _ in range(2))
    now, found = Step(0, 0, Kind.GOSSIP, 0.1), []
    for send in (onepass.send, lambda function, *arguments, **_: function(*arguments)):
        y, state = x.clone(), method.init(x)
        out = [torch.zeros(ROWS, P), torch.zeros(ROWS, 1, dtype=torch.float64)]
        state = send(method.send, y, g.clone(), state, tuple(out), now, local=False)
        found.append([y, *out, *leaves(state)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not passes and method.send in onepass._plain


def test_rows_that_skip_a_step_are_left_to_torch(passes):
    method = algorithms.build("dmsgd", None, {}, 0)
    assert same_twice(method, skipped=(1,)) and not passes


def test_on_a_cpu_nothing_is_noted():
    assert not onepass._worth(torch.zeros(1, onepass.WORTHWHILE))


def test_the_kernels_of_passes_do_what_their_texts_say(passes, tmp_path):
    """Compiled for the CPU: those of all algorithms, each run once."""
    for name, local, options in VARIANTS:
        method = algorithms.build(name, local, options, decayed=130)
        steps(method, True, count=2, coded=True)
    known = {elementwise.form(made): made for made in passes}
    assert any("narrow" in form.text for form in known) and any(form.counts for form in known)
    for made, run in zip(known.values(), compiled(list(known), tmp_path), strict=True):
        before = [array.clone() for array in made.outputs.values()]
        run_pass(made)
        expected = [array.clone() for array in made.outputs.values()]
        for array, old in zip(made.outputs.values(), before, strict=True):
            array.copy_(old)  # where they are the memory of inputs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elementwise, "_compiled", lambda form, run=run: run)
            patch.setattr(elementwise, "_on", lambda device: contextlib.nullcontext())
            elementwise.launch(made)
        for array, wanted in zip(made.outputs.values(), expected, strict=True):
            assert torch.equal(array, wanted), made.text


class FakeCupy:
    """What of CuPy a launch uses: a kernel that notes its calls."""

    def __init__(self):
        self.made, self.called = [], []

    def RawKernel(self, source, name):
        self.made.append(source)
        return lambda *call: self.called.append(call)


def test_a_launch_hands_over_each_argument_that_the_kernel_takes(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setattr(elementwise, "_cupy", lambda: cupy)
    monkeypatch.setattr(elementwise, "_on", lambda device: contextlib.nullcontext())
    x, y = torch.ones(2, 3000), torch.ones(2, 3000)
    small, code = torch.ones(2, 1), torch.ones(2, 3000, dtype=torch.bfloat16)
    inputs, outputs = {"a0": x, "a1": small}, {"c0": code, "y0": y}
    for _ in range(2):
        elementwise.launch(Pass(inputs, {"s0": 0.1}, {"e5": 5}, outputs, "a text of this test"))
    assert len(cupy.made) == 1, "a kernel is kept by its form"
    taken = cupy.made[0].partition("mpigossip_pass(")[2].partition(")")[0].split(", ")
    assert [argument.split()[-1] for argument in taken] == [
        "width", "a0", "a0_row", "a1", "a1_row", "c0", "c0_row", "y0", "y0_row", "s0", "e5"
    ]  # fmt: skip
    grid, block, values = cupy.called[1]
    assert (grid, block) == ((3, 2), (256,)) and values[0] == 3000
    pointers = [x, small, code, y]
    assert list(values[1:9]) == [v for a in pointers for v in (a.data_ptr(), a.stride(0))]
    assert values[9:] == (np.float32(0.1), 5) and values[9].dtype == np.float32


def test_a_device_whose_kernels_fail_is_left_to_torch_with_a_warning(monkeypatch):
    def fails(device):
        raise RuntimeError("CuPy failed to load libnvrtc.so.12\nand a long story")

    monkeypatch.setattr(elementwise, "_tried", fails)
    elementwise.usable.cache_clear()
    with pytest.warns(
        UserWarning, match="cuda:0: RuntimeError: CuPy failed to load libnvrtc.so.12;"
    ):
        assert not elementwise.usable(torch.device("cuda:0"))
    assert not elementwise.usable(torch.device("cuda:0")), "said once"
    elementwise.usable.cache_clear()


def exchanged(comm, in_passes):
    """Rounds over a bf16 wire whose outbox a send has filled."""
    from mpigossip.cluster.ranks import World
    from mpigossip.graphs import graph
    from mpigossip.mixing.windows import Windows

    launch, worth = onepass.launch, onepass._worth
    if in_passes:
        onepass.launch, onepass._worth = run_pass, lambda x: True
    world, found = World(comm), []
    layout = Layout((1024, 1024), 2, 1, wire=wire("bf16"))
    ways = {"same_host": "put", "timeout_s": 30, "on_devices": True}
    mixer = Windows(graph("ring", comm.size), layout, world, **ways)
    method = algorithms.build("dmsgd", None, {}, 0)
    draw = torch.Generator().manual_seed(comm.rank)
    x = [torch.randn(1, 1024, generator=draw) for _ in range(2)]
    state = [method.init(part) for part in x]
    try:
        t = 0
        for index, kind in enumerate([Kind.GOSSIP, Kind.GLOBAL, Kind.GOSSIP, Kind.LOCAL]):
            now = Step(index, t, kind, 0.1)
            for s, out in enumerate(mixer.outbox(t)):
                g = torch.randn(1, 1024, generator=draw)
                out[2].fill_(index)
                local, arguments = kind is Kind.LOCAL, (x[s], g, state[s], out, now)
                state[s] = onepass.send(method.send, *arguments, local=local)
                assert out.written == (in_passes and not local)
            mixer.start(kind, t, index)
            sent, mixed = mixer.finish()
            for s in range(2):
                x[s].copy_(mixed[s][0])
                found += [part.clone() for part in (*sent[s], *mixed[s])]
            t += kind is Kind.GOSSIP
    finally:
        mixer.close()
        world.close()
        onepass.launch, onepass._worth = launch, worth
    return torch.cat([part.double().flatten() for part in found])


def test_an_exchange_sends_the_codes_that_a_pass_has_written(ranks):
    done = [ranks(2)(exchanged, in_passes, timeout=60) for in_passes in (False, True)]
    for plain, passed in zip(*done, strict=True):
        close = torch.isclose(passed, plain, rtol=1e-2, atol=1e-3)
        assert close.double().mean() > 0.99
