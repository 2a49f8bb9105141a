"""Transports are bitwise identical to the simulator under random delays; mutants are not."""

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpigossip.graphs import graph
from mpigossip.mixing import lossy_wires, plan
from mpigossip.mixing import wire as wires
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.kernels import native
from mpigossip.mixing.simulated import Simulated
from tests.cases import covering, every, naming, on_each, some, with_world
from tests.mixing.rounds import GRAPHS, LAYOUT, compare, fill, graphs_for

pytestmark = pytest.mark.both


SIZES = (1, 2, 3, 4, 6, 8)
SAME_HOST = ("read", "put")
SHOWN = [(3, "read"), (4, "put")]
"""Cases that run by default, with all graphs."""


def chosen_graphs(n, same_host):
    """Return the graphs of a case; cases of `--all` contain all pairs of values of two fields."""
    if (n, same_host) in SHOWN:
        return GRAPHS
    possible = [
        (size, way, name) for size in SIZES for way in SAME_HOST for name, _ in graphs_for(size)
    ]
    chosen = covering(possible, covered=[case for case in possible if case[:2] in SHOWN])
    return [name for *case, name in chosen if case == [n, same_host]]


@pytest.mark.parametrize(("n", "same_host"), some(itertools.product(SIZES, SAME_HOST), SHOWN))
def test_windows_equal_the_simulator_under_random_delays(ranks, n, same_host):
    for differences in ranks(n)(compare, chosen_graphs(n, same_host), same_host, 20, timeout=120):
        assert differences and not any(differences.values()), differences


def summed_in_place(comm, same_host):
    layout = MessageLayout((9216,))
    into = torch.empty(1, *layout.widths)
    return compare(comm, GRAPHS, same_host, 20, layout=layout, into=into)


@pytest.mark.parametrize("same_host", ["read", "put"])
@pytest.mark.parametrize("n", some((1, 2, 3, 4), [3]))
def test_sums_can_be_written_into_a_given_array(ranks, n, same_host):
    for differences in ranks(n)(summed_in_place, same_host):
        assert differences and not any(differences.values()), differences


def on_two_hosts(comm):
    """Compare ranks that read memory in pairs only, as on hosts of two ranks each."""
    from mpigossip.mixing import host_memory, synchronous

    def share_in_pairs(comm, nbytes, timeout_s):
        on_host = comm.Split(comm.rank // 2)
        try:
            return host_memory.SharedOutboxes(
                on_host, on_host.allgather(comm.rank), nbytes, timeout_s
            )
        finally:
            on_host.Free()

    original = synchronous.share_memory
    synchronous.share_memory = share_in_pairs
    try:
        return compare(comm, ["exponential", "ring", "random-matching"], "read", 12)
    finally:
        synchronous.share_memory = original


def test_rounds_that_read_and_send_equal_the_simulator(ranks):
    for differences in ranks(4)(on_two_hosts):
        assert differences and not any(differences.values()), differences


def test_rounds_may_begin_anywhere(ranks):
    """A resumed run starts in the middle of the graph's period."""
    for same_host in ("read", "put"):
        for differences in ranks(3)(compare, GRAPHS, same_host, 12, 7):
            assert not any(differences.values()), differences


def lossy_by_pieces(comm, name):
    """Compare with the shortest possible chunks, so that a small message has several."""
    chunk = plan.CHUNK
    plan.CHUNK = wires.CHUNK = 4096
    try:
        wire = lossy_wires.wire(name, density=0.1)
        layout = MessageLayout((9216, 9216), vectors=2, scalars=1, wire=wire)
        return compare(comm, ["exponential", "random-matching"], "put", 12, layout=layout)
    finally:
        plan.CHUNK = wires.CHUNK = chunk


@pytest.mark.parametrize("name", ["bf16", "qsgd", "top-k"])
def test_encoded_messages_are_sent_and_summed_in_chunks(ranks, name):
    for differences in ranks(3)(lossy_by_pieces, name):
        assert differences and not any(differences.values()), differences


@on_each("wire", ["fp32", "bf16", "sign"])
@on_each("size", [1, 5000, 1 << 16, float("inf")])
def test_chunks_hold_every_column_once_and_every_byte_in_order(wire, size, monkeypatch):
    for module in (plan, wires):
        monkeypatch.setattr(module, "CHUNK", 4096)
    layout = MessageLayout((9216,) * 2, vectors=2, scalars=1, wire=lossy_wires.wire(wire))
    chunks = plan.chunks(layout, size)
    ends = [chunk.span.stop for chunk in chunks]
    assert [chunk.span.start for chunk in chunks] == [0, *ends[:-1]]
    assert ends[-1] == layout.slot_sent_bytes
    columns = [
        (field, column)
        for chunk in chunks
        for field, columns in chunk.fields
        for column in range(columns.start, columns.stop)
    ]
    assert columns == [(f, c) for f, columns in layout.fields for c in range(columns.stop)]
    for chunk in chunks:
        field, columns = chunk.fields[0]
        begin = layout.offset(field) + layout.vector_bytes(columns.start)
        assert field >= 2 or chunk.span.start == begin
    assert len(chunks) == {1: 6, float("inf"): 1}.get(size, len(chunks))


# -- mutants: each breaks one rule of the protocol, which the tests must detect --------------------


def without_waiting_for_free_places(mixer):
    mixer._transport.is_free = lambda r, rank: True
    mixer._unused_rounds = lambda: ()


def free_for_the_next_round(mixer):
    """Free the buffers of round t for round t + 1 instead of t + 2."""
    free = mixer._transport.release
    mixer._transport.release = lambda r, coming: free(replace(r, index=r.index - 1), coming)


def counting_global_rounds(mixer):
    """Count GLOBAL rounds as rounds of the graph, too."""
    start = mixer.start
    extra = [0]

    def counting(kind, t, exchange):
        start(kind, t + extra[0], exchange)
        extra[0] += kind is ExchangeKind.GLOBAL

    mixer.start = counting


def without_waiting_for_readers(mixer):
    mixer._shared.wait_read = lambda readers, t: None


def without_waiting_for_models(mixer):
    mixer._shared.wait_ready = lambda sources, t: None


def without_waiting_for_chunks(mixer):
    mixer._transport.arrived = lambda r, source, chunk: True


def without_waiting_for_the_other_half(mixer):
    mixer._shared.wait_half = lambda partner, t: None


def caught(comm, mutate, same_host, graphs):
    """Raise AssertionError if a mutant is detected by wrong numbers, or by an error of a wait."""
    from mpigossip.cluster.deadline import WaitTimeoutError
    from mpigossip.mixing.notifications import ProtocolError

    try:
        for delay in (0.02, 0.05, 0.1):  # on a loaded machine the short delays may not be enough
            differences = compare(comm, graphs, same_host, 40, 0, delay, mutate)
            if comm.allreduce(sum(differences.values())):
                raise AssertionError(f"seen: {differences}")
    except (WaitTimeoutError, ProtocolError) as error:
        raise AssertionError(f"seen: {error}") from None


@pytest.mark.parametrize(
    "mutate, same_host",
    [
        every(without_waiting_for_free_places, "put"),
        (free_for_the_next_round, "put"),
        every(counting_global_rounds, "put"),
        every(counting_global_rounds, "read"),
        every(without_waiting_for_readers, "read"),
        (without_waiting_for_models, "read"),
    ],
)
def test_a_mutant_of_the_protocol_is_detected(ranks, mutate, same_host):
    graphs = ["one-peer-exponential", "exponential"]
    with pytest.raises(Exception, match=naming("seen")):
        ranks(6)(caught, mutate, same_host, graphs, timeout=60)


@pytest.mark.parametrize(
    "mutate, same_host, name",
    [
        (without_waiting_for_the_other_half, "read", "one-peer-hypercube"),
        (without_waiting_for_chunks, "put", "exponential"),
    ],
)
def test_a_mutant_of_a_faster_exchange_is_detected(ranks, mutate, same_host, name):
    with pytest.raises(Exception, match=naming("seen")):
        ranks(4)(caught, mutate, same_host, [name], timeout=60)


@with_world
def slow_reader(world, waits):
    """Let rank 1 read a pair's average slowly; raise if it changes or a wait is too long."""
    from mpigossip.cluster.deadline import WaitTimeoutError
    from mpigossip.mixing.synchronous import Synchronous

    other = LAYOUT.empty(1)
    mixer = Synchronous(graph("one-peer-hypercube", 4), LAYOUT, world, timeout_s=30)
    if not waits:
        mixer._shared.release_pair = lambda partner, t: None
    for t in range(4):
        fill(mixer.outbox(t), t, [world.rank])
        fill(other, t, [world.rank ^ 1 << t % 2])
        right = (mixer.outbox(t)[0][0] + other[0][0]) / 2
        mixer.start(ExchangeKind.GOSSIP, t)
        try:
            mixed = mixer.finish()[1][0][0]
        except WaitTimeoutError as error:
            raise AssertionError(f"seen: {error}") from None
        # Without the wait, its partners need some time to overwrite the result.
        until = time.monotonic() + (0.3 if waits else 20) * (world.rank == 1)
        while True:
            assert torch.equal(mixed, right), f"seen: another average in round {t}"
            if time.monotonic() > until:
                break
            time.sleep(0.01)
    mixer.close()


def test_the_shared_result_of_a_pair_outlasts_its_slower_reader(ranks):
    ranks(4)(slow_reader, True)
    with pytest.raises(Exception, match=naming("seen")):
        ranks(4)(slow_reader, False, timeout=120)


# -- the sum ---------------------------------------------------------------------------------


@on_each("width", [1, 7, 512, 40_000, 70_001])
@on_each("weights", [[0.5, 0.5], [1 / 3] * 3, [0.2, 0.5, 0.3], [0.1, 0.2, 0.3, 0.4]])
def test_the_sum_is_the_formula_in_the_order_given(weights, width):
    arrays = [torch.randn(2, width) for _ in weights]
    wide = sum(w * a.double() for w, a in zip(weights, arrays, strict=True))
    assert torch.allclose(
        weighted_sum(weights, arrays, torch.empty(2, width)).double(), wide, atol=1e-6
    )


@on_each("weights", [[0.5, 0.5], [0.2, 0.5, 0.3]])
def test_the_sum_has_the_same_bits_in_place_and_row_by_row(weights):
    arrays = [torch.randn(3, 40_000) for _ in weights]
    expected = weighted_sum(weights, arrays, torch.empty(3, 40_000))
    for row in range(3):
        alone = weighted_sum(weights, [a[row : row + 1] for a in arrays], torch.empty(1, 40_000))
        assert torch.equal(alone[0], expected[row])
    in_place = [a.clone() for a in arrays]
    assert torch.equal(weighted_sum(weights, in_place, in_place[1]), expected)


@on_each("width", [1, 3, 2047, 2048, 40_001, native.STREAMED + 5])
@on_each(
    "weights", [[0.7], [0.5, 0.5], [1 / 3] * 3, [0.2] * 5, [0.3, 0.7], [0.2, 0.5, 0.3], [0.1] * 6]
)
def test_the_native_sum_has_the_bits_of_torch(weights, width, monkeypatch):
    if native.library() is None:
        pytest.skip(native.status())
    memory = torch.randn(len(weights) + 2, width + 1)
    memory[:, ::7] *= 1e-40  # subnormal numbers too
    arrays = [row[1:].unsqueeze(0) for row in memory[: len(weights)]]  # at odd addresses
    out, copy = (row[:width].unsqueeze(0) for row in memory[len(weights) :])
    weighted_sum(weights, arrays, out, copy)
    pure = torch.empty(1, width)
    other = torch.empty(1, width)
    with monkeypatch.context() as patch:  # the cases share the fixture
        patch.setattr(native, "library", lambda: None)
        weighted_sum(weights, arrays, pure, other)
    for result in (out, copy, other):
        assert torch.equal(result.view(torch.int32), pure.view(torch.int32))


def test_without_a_compiler_torch_sums_and_the_reason_is_reported(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no licence today >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value, reason in (
        ("CC", str(tmp_path / "nothing"), "no compiler"),
        ("CC", str(broken), "no licence today"),
        ("CC", "true", "could not build"),
        ("MPIGOSSIP_NATIVE", "0", "MPIGOSSIP_NATIVE=0"),
    ):
        monkeypatch.setenv(name, value)
        assert reason in native.status()
        assert native.library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))

    def denied(_):
        raise PermissionError(13, "a folder above may not be entered")

    monkeypatch.setattr(native, "_is_private", denied)
    monkeypatch.delenv("MPIGOSSIP_NATIVE")
    assert "no cache folder" in native.status() and native.library.__wrapped__() is None


def test_a_library_that_others_may_write_is_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = native._library_path()
    other_user = os.getuid() + 1
    for name, folder_mode, file_mode, owner in (
        ("a file that all may write", 0o700, 0o666, os.getuid()),
        ("a folder that all may write", 0o777, 0o600, os.getuid()),
        ("a folder of another user", 0o755, 0o644, other_user),
    ):
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)  # a loaded library is not overwritten
        path.write_text("planted")
        path.chmod(file_mode)
        path.parent.chmod(folder_mode)
        if owner == other_user and os.getuid() == 0:
            os.chown(path.parent, other_user, -1)
        elif owner == other_user:
            monkeypatch.setattr(os, "getuid", lambda: other_user)
        kernel = native._load()
        assert kernel._name != str(path) or path.read_bytes() != b"planted", name
        if owner == other_user:
            assert path.read_text() == "planted", name
            assert "private copy" in native.status(), name
            assert not Path(kernel._name).exists(), name
        else:
            assert (native._is_private(path.parent), native._is_private(path)) == (True, True), name
            assert native.status() == str(path), name


def test_a_message_has_the_stated_bytes():
    assert LAYOUT.nbytes == 4 * 2 * 2048 + 8 * 2
    assert LAYOUT.nbytes == 2 * LAYOUT.slot_bytes
    views = LAYOUT.views(torch.zeros(LAYOUT.nbytes, dtype=torch.uint8))
    assert [[tuple(a.shape) for a in segment] for segment in views] == 2 * [
        [(1, 1024), (1, 1024), (1, 1)]
    ]


@with_world
def odd_layout(world):
    from mpigossip.mixing import open_mixer

    with pytest.raises(ValueError) as refused:
        open_mixer(graph("ring", world.size), MessageLayout((513,), scalars=1), world)
    return str(refused.value)


def test_scalars_after_an_odd_number_of_floats_are_rejected(ranks):
    """The simulator sends nothing, so it accepts any width."""
    for message in ranks(2)(odd_layout):
        assert "513 elements" in message and "even width" in message
    mixer = Simulated(graph("ring", 3), MessageLayout((513,), scalars=1))
    assert mixer.outbox(0)[0][0].shape == (3, 513)
