"""The kernels for GPUs: their text, run or compiled for the CPU, has the bits of the reference."""

import ctypes
import shutil
import subprocess

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms.base import Step
from mpigossip.mixing.base import Kind, Layout
from mpigossip.mixing.combine import combine
from mpigossip.mixing.kernels import fused, onepass, tracing
from mpigossip.mixing.kernels.fused import ENCODE, HELPERS, operation
from mpigossip.mixing.wire import wire


def run_text(text, values):
    """The statements of a kernel in float32, each operation rounded by itself."""
    names = {"__fmul_rn": np.multiply, "__fadd_rn": np.add, **values}
    for statement in text.split(";"):
        exec(statement.strip().removeprefix("float "), names)
    return names["y"]


@pytest.mark.parametrize(
    "weights", [[1.0], [0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4], [1 / 8] * 8]
)
def test_the_kernels_arithmetic_has_the_bits_of_the_sum(weights):
    arrays = [torch.randn(1, 10_000) for _ in weights]
    kinds, uniform = "f" * len(weights), len(set(weights)) == 1
    values = {f"x{k}": array.numpy() for k, array in enumerate(arrays)}
    values |= {f"w{k}": np.float32(weight) for k, weight in enumerate(weights)}
    expected = combine(weights, arrays, torch.empty(1, 10_000)).numpy()
    assert (run_text(operation(kinds, uniform), values) == expected).all()


AS_C = """
#include <cstddef>
#include <cstring>
#define __device__ static
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
%s
extern "C" void encode(const float* xs, unsigned short* cs, float* ys, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        float x = xs[i]; unsigned short& c = cs[i]; float& y = ys[i]; %s;
    }
}
extern "C" void sum(const float* a, const unsigned short* b, const float* w, float* ys, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        float x0 = a[i], w0 = w[0], w1 = w[1]; unsigned short x1 = b[i]; float& y = ys[i]; %s;
    }
}
"""


def test_the_kernels_of_bf16_have_torchs_bits(tmp_path):
    """Their text compiled for the CPU: encoding, and a sum whose second term is encoded."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to try the kernel's text with")
    source, library = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text(AS_C % (HELPERS, ENCODE, operation("fb", False)))
    flags = ["-O2", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=60)
    kernel = ctypes.CDLL(str(library))
    edges = torch.tensor([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-40, float("inf"), 1.00390625])
    values = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), edges])
    codes, decoded = torch.zeros(len(values), dtype=torch.bfloat16), torch.zeros_like(values)

    def call(function, *arrays):
        function(*(ctypes.c_void_p(a.data_ptr()) for a in arrays), ctypes.c_size_t(len(values)))

    call(kernel.encode, values, codes, decoded)
    expected = values.to(torch.bfloat16)
    assert torch.equal(codes.view(torch.int16), expected.view(torch.int16))
    assert torch.equal(decoded, expected.float())
    out, other = torch.zeros_like(values), torch.randn(len(values))
    call(kernel.sum, other, codes, torch.tensor([0.3, 0.7]), out)
    rows = [other.unsqueeze(0), expected.float().unsqueeze(0)]
    assert torch.equal(out, combine([0.3, 0.7], rows, torch.empty(1, len(values)))[0])


# -- one pass of an algorithm ------------------------------------------------------------------

P, ROWS = 300, 2


def rounded(values):
    there = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return there.float().numpy()


def run_pass(made):
    """A pass's text in numpy, and its outputs written."""
    shape = next(iter(made.outputs.values())).shape
    names = {name: array.numpy() for name, array in made.inputs.items()}
    names |= {name: np.float32(value) for name, value in made.numbers.items()} | made.counts
    names |= {"i": np.arange(shape.numel()).reshape(shape), "sqrtf": np.sqrt, "narrow": rounded}
    names |= {"pick": np.where, "wide": lambda code: code}
    for statement in made.text.split(";"):
        exec(statement.strip().removeprefix("float "), names)
    for name, array in made.outputs.items():
        array.copy_(torch.from_numpy(np.broadcast_to(names[name], shape).astype(np.float32)))


@pytest.fixture
def passes(monkeypatch):
    """Every send and receive goes in one pass; the passes, in order."""
    made = []

    def launch(one):
        made.append(one)
        run_pass(one)

    monkeypatch.setattr(onepass, "_launch", launch)
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
    *[("dsgt", local, {}) for local in algorithms.LOCALS],
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


PASS_AS_C = """
extern "C" void pass%d(%s, const float* s, long width, long stop, size_t n) {
    for (size_t i = 0; i < n; ++i) { %s; }
}
"""


def as_c(number, made):
    """A pass as a function of its inputs and outputs in C++."""
    arrays = [(name, "const float") for name in made.inputs]
    kinds = {torch.float32: "float", torch.bfloat16: "unsigned short"}
    arrays += [(name, kinds[array.dtype]) for name, array in made.outputs.items()]
    set_up = [f"{kind}& {name} = _{name}[i]" for name, kind in arrays]
    set_up += [f"float s{k} = s[{k}]" for k in range(len(made.numbers))]
    set_up += [f"long {name} = stop" for name in made.counts if name != "width"]
    parameters = ", ".join(f"{kind}* _{name}" for name, kind in arrays)
    return PASS_AS_C % (number, parameters, "; ".join([*set_up, made.text]))


def test_the_texts_of_passes_are_c(passes, tmp_path):
    """Compiled for the CPU: those of all algorithms; one of them is run."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to try the kernels' text with")
    for name, local, options in VARIANTS:
        method = algorithms.build(name, local, options, decayed=130)
        steps(method, True, count=2, coded=True)
    known = list({one.text: one for one in passes}.values())
    encoded = next(k for k, one in enumerate(known) if "narrow" in one.text)
    head = AS_C.partition("extern")[0] % tracing.HELPERS + "#include <cmath>\n"
    source, library = tmp_path / "passes.cpp", tmp_path / "passes.so"
    source.write_text(head + "".join(as_c(k, one) for k, one in enumerate(known)))
    flags = ["-O0", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True, timeout=60)
    made = known[encoded]
    run_pass(made)
    expected = [array.clone() for array in made.outputs.values()]
    for array in made.outputs.values():
        array.zero_()
    numbers = torch.tensor(list(made.numbers.values()))
    arrays = [*made.inputs.values(), *made.outputs.values(), numbers]
    function = getattr(ctypes.CDLL(str(library)), f"pass{encoded}")
    pointers = [ctypes.c_void_p(array.data_ptr()) for array in arrays]
    function(*pointers, ctypes.c_long(P), ctypes.c_long(130), ctypes.c_size_t(ROWS * P))
    for array, wanted in zip(made.outputs.values(), expected, strict=True):
        assert torch.equal(array.float(), wanted.float())


class FakeCupy:
    """What of CuPy a launch uses: kernels that note their calls."""

    def __init__(self):
        self.made, self.called = [], []
        self.float32, self.int64 = np.float32, np.int64

    def ElementwiseKernel(self, *arguments, preamble):
        self.made.append(arguments)
        return lambda *values: self.called.append(values)


def test_a_launch_declares_each_argument_that_it_hands_over(monkeypatch):
    import contextlib

    cupy = FakeCupy()
    monkeypatch.setattr(fused, "_cupy", lambda: cupy)
    monkeypatch.setattr(fused, "_on", lambda device, cupy: contextlib.nullcontext())
    monkeypatch.setattr(fused, "_view", lambda array, cupy: array)
    x, y, code = torch.ones(1, 8), torch.ones(1, 8), torch.ones(1, 8, dtype=torch.bfloat16)
    numbers, counts, outputs = {"s0": 0.1}, {"e5": 5, "width": 8}, {"c0": code, "y0": y}
    for _ in range(2):
        onepass._launch(tracing.Kernel({"a0": x}, numbers, counts, outputs, "a text of this test"))
    (inputs, outs, text, _), values = cupy.made[0], cupy.called[1]
    assert inputs == "float32 a0, float32 s0, int64 e5, int64 width"
    assert (outs, text) == ("uint16 c0, float32 y0", "a text of this test")
    assert len(cupy.made) == 1, "a kernel is kept by its text"
    assert values[0] is x and values[1:4] == (np.float32(0.1), 5, 8) and values[5] is y


def exchanged(comm, in_passes):
    """Rounds over a bf16 wire whose outbox a send has filled."""
    from mpigossip.cluster.ranks import World
    from mpigossip.graphs import graph
    from mpigossip.mixing.device.windows import DeviceWindows

    launch, worth = onepass._launch, onepass._worth
    if in_passes:
        onepass._launch, onepass._worth = run_pass, lambda x: True
    world, found = World(comm), []
    layout = Layout((1024, 1024), 2, 1, wire=wire("bf16"))
    mixer = DeviceWindows(graph("ring", comm.size), layout, world, same_host="put", timeout_s=30)
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
        onepass._launch, onepass._worth = launch, worth
    return torch.cat([part.double().flatten() for part in found])


def test_an_exchange_sends_the_codes_that_a_pass_has_written(ranks):
    done = [ranks(2)(exchanged, in_passes, timeout=60) for in_passes in (False, True)]
    for plain, passed in zip(*done, strict=True):
        close = torch.isclose(passed, plain, rtol=1e-2, atol=1e-3)
        assert close.double().mean() > 0.99
