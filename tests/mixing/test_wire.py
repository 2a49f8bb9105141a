"""Wires: unbiased, invertible, independent of how columns are split, and of the stated size."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mpigossip import graph
from mpigossip.graphs import from_matrices
from mpigossip.mixing import wire as wires
from mpigossip.mixing.base import ExchangeKind, MessageLayout, bytes_per_exchange
from mpigossip.mixing.lossy_wires import wire
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import WIRE_BUCKET, decode, encode
from tests.cases import naming, on_each, with_world

ALL = [
    "bf16",
    "qsgd",
    "qsgd-7",
    "qsgd-1",
    "fp4",
    "sign",
    "top-k",
    "top-k-int2",
    "random-k",
    "shared-k",
]


def made(name, seed=3):
    kind, _, levels = name.partition("-")
    if kind == "qsgd" and levels:
        return wire("qsgd", levels=int(levels), seed=seed)
    return wire(name, density=0.1, seed=seed)


def values(width=4 * WIRE_BUCKET, seed=0):
    drawn = np.random.default_rng(seed).standard_normal(width, np.float32)
    drawn[WIRE_BUCKET : 2 * WIRE_BUCKET] = 0.0
    drawn[-1] = 40.0
    return torch.from_numpy(drawn)


def message(encoding):
    pieces = encoding.pack(x := values(), (5, 2, 0), 0)
    return x, torch.cat([piece.reshape(-1) for piece in pieces])


@on_each("name", ALL)
def test_decoded_values_equal_the_sender_s(name):
    one = made(name)
    x, codes = message(one)
    codes = torch.nn.functional.pad(codes, (0, one.nbytes(4 * WIRE_BUCKET) - len(codes)))
    for part in (slice(0, 4 * WIRE_BUCKET), slice(WIRE_BUCKET, 3 * WIRE_BUCKET)):
        out = torch.empty(part.stop - part.start)
        one.unpack(codes, 4 * WIRE_BUCKET, part, out)
        assert torch.equal(out, x[part])
    assert torch.isfinite(x).all() and not x[WIRE_BUCKET : 2 * WIRE_BUCKET].any()


@on_each("name", ALL)
def test_a_shard_is_encoded_like_a_part_of_the_whole_vector(name):
    one = made(name)
    whole = values()
    one.pack(whole, (1, 4, 1), 0)
    shards = values().view(2, -1).clone()
    for k, shard in enumerate(shards):
        one.pack(shard, (1, 4, 1), k * 2 * WIRE_BUCKET)
    assert torch.equal(shards.view(-1), whole)


@on_each(
    ("name", "nbytes"),
    [
        ("bf16", 1024),
        ("qsgd", 516),
        ("qsgd-7", 260),
        ("qsgd-1", 132),
        ("fp4", 260),
        ("sign", 70),
        ("top-k", 262),
        ("top-k-int2", 71),
        ("random-k", 212),
    ],
)
def test_bytes_of_a_bucket(name, nbytes):
    assert made(name).nbytes(8 * WIRE_BUCKET) == 8 * nbytes
    _, codes = message(made(name))
    assert len(codes) == 4 * nbytes
    with pytest.raises(ValueError, match=naming("512 elements", "700 elements")):
        made(name).nbytes(700)


@on_each("name", ["qsgd", "qsgd-7", "qsgd-1"])
def test_qsgd_is_unbiased_within_its_levels(name):
    one = made(name)
    x = values()
    total = torch.zeros(4 * WIRE_BUCKET, dtype=torch.float64)
    scale = x.view(-1, WIRE_BUCKET).abs().amax(1, keepdim=True) / int((name + "-127").split("-")[1])
    for draw in range(400):
        one.pack(q := x.clone(), (draw, 0, 0), 0)
        assert ((q - x).view(-1, WIRE_BUCKET).abs() <= scale * 1.001).all()
        total += q
    difference = (total / 400 - x).view(-1, WIRE_BUCKET) / scale.clamp(min=1e-9)
    assert difference.abs().max() < 0.5 / 400**0.5 * 5.5 and abs(difference.mean()) < 2e-3


@on_each(("name", "levels"), [("fp4", 2.0 ** torch.arange(-6, 1)), ("qsgd-1", [1.0])])
def test_few_bits_are_unbiased_and_give_an_adjacent_value(name, levels):
    one = made(name)
    x = values()
    total = torch.zeros(4 * WIRE_BUCKET, dtype=torch.float64)
    scale = x.view(-1, WIRE_BUCKET).abs().amax(1, keepdim=True)
    positive = torch.as_tensor(levels)
    steps = torch.cat([-positive.flip(0), torch.zeros(1), positive])
    size = x.view(-1, WIRE_BUCKET) / scale.clamp(min=1e-9)
    low = steps[(torch.searchsorted(steps, size.contiguous(), right=True) - 1).clamp(min=0)]
    high = steps[torch.searchsorted(steps, size.contiguous()).clamp(max=len(steps) - 1)]
    for draw in range(400):
        one.pack(q := x.clone(), (draw, 0, 0), 0)
        sent = q.view(-1, WIRE_BUCKET) / scale.clamp(min=1e-9)
        near = torch.minimum((sent - low).abs(), (sent - high).abs())
        assert (near < 1e-6)[scale[:, 0] > 0].all()
        total += q
    difference = (total / 400 - x).view(-1, WIRE_BUCKET) / scale.clamp(min=1e-9)
    gap = (high - low).clamp(min=1e-6)
    assert (difference.abs() / gap)[scale[:, 0] > 0].max() < 0.5 / 400**0.5 * 5.5
    assert abs(difference.mean()) < 2e-3


def test_top_k_in_two_bits_takes_the_nearest_of_four_values():
    made("top-k").pack(kept := values(), (0, 0, 0), 0)
    made("top-k-int2").pack(q := values(), (0, 0, 0), 0)
    scale = values().view(-1, WIRE_BUCKET).abs().amax(1, keepdim=True)
    where = kept != 0
    assert torch.equal(q != 0, where)
    errors = (q - kept).view(-1, WIRE_BUCKET).abs()
    assert (errors <= scale / 3 * 1.0001)[where.view(-1, WIRE_BUCKET)].all()


@on_each("name", ALL)
def test_zeros_stay_zero(name):
    """The columns after the last parameter are zeros, on which no scale may depend."""
    x = torch.zeros(WIRE_BUCKET)
    x[:5] = torch.tensor([3.0, -2.0, 1e-3, 0.5, -7.0])
    made(name).pack(x, (1, 0, 0), 0)
    assert not x[5:].any() and (name.endswith("-k") or x[:5].any())


def test_padding_enters_neither_values_nor_scale_of_signs_and_large_sums_are_finite():
    maximum = torch.finfo(torch.float32).max
    for count in (1, 31, 32, 33, 500, WIRE_BUCKET):
        for size in (maximum, 1.0, 1e-30):
            x = torch.zeros(2 * WIRE_BUCKET)
            run_values = x[WIRE_BUCKET : WIRE_BUCKET + count].fill_(size)
            # a zero that is followed by other values counts as a value
            run_values[::2] = -size
            run_values[4:8] = 0.0
            made("sign").pack(q := x.clone(), (0, 0, 0), 0)
            inside = q[WIRE_BUCKET : WIRE_BUCKET + count]
            mean = run_values.double().abs().mean()
            assert torch.equal(inside >= 0, run_values >= 0), (count, size)
            assert torch.allclose(inside.double().abs(), mean, 1e-6, 0), (count, size)
            assert not q[:WIRE_BUCKET].any() and not q[WIRE_BUCKET + count :].any(), (count, size)


@on_each(
    ("name", "most"),
    [
        ("bf16", 2.0**-16),
        ("qsgd", 0.008),
        ("qsgd-7", 1.2),
        ("qsgd-1", 10.9),
        ("fp4", 1 / 8),
        ("sign", 511 / 512),
        ("top-k", 460 / 512),
        ("top-k-int2", 51 / 9),
        ("random-k", 460 / 512),
    ],
)
def test_errors_are_within_the_bounds_on_the_page(name, most):
    """The mean error, as a multiple of ‖v‖², is largest for buckets of one large value."""
    worst = {"bf16": [1.0039], "qsgd": [5e-4], "qsgd-7": [0.04], "qsgd-1": [0.042], "fp4": [2 / 3]}
    one = made(name)
    errors = []
    for small in (1e-9, 3e-3, 0.1, 0.3, 0.999, *worst.get(name, ())):
        x = torch.full((512 * WIRE_BUCKET,), small)
        x[torch.arange(512) * (WIRE_BUCKET + 1)] = 1.0  # at another position in each bucket
        one.pack(q := x.clone(), (0, 0, 0), 0)
        errors.append(float((q - x).double().square().sum() / x.double().square().sum()))
    assert 0.9 * most < max(errors) <= 1.03 * most, errors
    assert name != "sign" or max(errors) < 1


def test_int2_is_a_contraction_for_at_most_nine_values_per_bucket():
    draws = torch.linspace(0, 1, 801)[1:, None] ** torch.tensor([[1.0, 2.0, 8.0]])
    for k, contracts in ((9, True), (11, False)):
        x = torch.zeros(draws.numel(), WIRE_BUCKET)
        x[:, 0], x[:, 1:k] = 1.0, draws.reshape(-1, 1)
        wire("top-k-int2", density=k / WIRE_BUCKET).pack((q := x.clone()).view(-1), (0, 0, 0), 0)
        share = (q - x).double().square().sum(1) / x.double().square().sum(1)
        assert (share.max() < 1) == contracts, (k, share.max())


def test_all_nodes_send_the_same_positions_with_shared_k():
    layout = MessageLayout((1024,), wire=made("shared-k"))
    segments = [[torch.ones(3, 1024)]]
    encode(layout, segments, [0, 1, 2], 4, None)
    first, *others = segments[0][0]
    assert first.sum() == 104 and all(torch.equal(first, one) for one in others)
    again = [[torch.ones(1, 1024)]]
    encode(layout, again, [0], 5, None)
    assert not torch.equal(again[0][0][0], first)


def test_draws_depend_on_every_part_of_their_key():
    one = made("qsgd", seed=3)
    other = made("qsgd", seed=4)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    draws = [*((one, key, 0) for key in keys), (other, keys[0], 0), (one, keys[0], 512)]
    packed = []
    for maker, key, first in draws:
        maker.pack(x := values(), key, first)
        packed.append(x.numpy().tobytes())
    assert len(set(packed)) == len(packed)


def test_extremes_of_qsgd():
    one = made("qsgd")
    tiny = torch.full((WIRE_BUCKET,), 1e-38)
    one.pack(tiny, (0, 0, 0), 0)
    assert not tiny.any()
    large = torch.full((WIRE_BUCKET,), 3e38)
    one.pack(large, (0, 0, 0), 0)
    assert torch.allclose(large, torch.tensor(3e38))


def test_top_k_keeps_the_largest_and_sign_the_mean_modulus():
    x = values()
    made("top-k").pack(q := x.clone(), (0, 0, 0), 0)
    for before, after in zip(x.view(-1, WIRE_BUCKET), q.view(-1, WIRE_BUCKET), strict=True):
        kept = after.nonzero()[:, 0]
        assert len(kept) in (0, 52) and torch.equal(before[kept], after[kept])
        assert not len(kept) or before[kept].abs().min() >= before[after == 0].abs().max()
    made("sign").pack(q := x.clone(), (0, 0, 0), 0)
    means = [array.view(-1, WIRE_BUCKET).abs().mean(1) for array in (q, x)]
    assert torch.allclose(*means)


def test_random_k_takes_every_value_equally_often():
    one = made("random-k")
    counts = torch.zeros(WIRE_BUCKET)
    for draw in range(2000):
        one.pack(x := torch.ones(WIRE_BUCKET), (draw, 0, 0), 0)
        counts += x
    assert (counts.mean() - 2000 * 52 / 512).abs() < 1e-3
    assert counts.min() > 140 and counts.max() < 270


@on_each("name", ALL)
def test_a_message_with_scalars_and_several_vectors(name):
    layout = MessageLayout((1024, 1024), vectors=2, scalars=1, wire=made(name))
    segments = layout.empty(1)
    for slot, segment in enumerate(segments):
        for k, part in enumerate(segment):
            part.copy_(torch.randn(part.shape) if k < 2 else torch.full((1, 1), slot + 1 / 3))
    codes = torch.zeros(2, layout.slot_sent_bytes, dtype=torch.uint8)
    encode(layout, segments, [7], 11, codes)
    for slot, segment in enumerate(segments):
        for part, array in enumerate(segment):
            whole = slice(0, array.shape[1])
            assert torch.equal(decode(layout, codes[slot], part, whole), array)


def test_bytes_are_counted_as_sent():
    ring = graph("ring", 8)
    assert bytes_per_exchange(ring, ExchangeKind.GOSSIP, 0, 0, 100, 400) == 200
    assert bytes_per_exchange(ring, ExchangeKind.LOCAL, 0, 0, 100, 400) == 0
    assert bytes_per_exchange(ring, ExchangeKind.GLOBAL, 0, 0, 400) == 700
    # encoded messages to all others
    assert bytes_per_exchange(ring, ExchangeKind.GLOBAL, 0, 0, 50, 400) == 350
    # Sending the sum of decoded values takes fewer bytes here.
    assert bytes_per_exchange(ring, ExchangeKind.GLOBAL, 0, 0, 200, 400) == 700
    layout = MessageLayout((1024,), wire=made("qsgd"))
    mixer = Simulated(ring, layout)
    mixer.outbox(0)[0][0].normal_()
    mixer.start(ExchangeKind.GOSSIP, 0)
    mixer.finish()
    assert mixer.bytes_sent == [2 * 1032] * 8


def test_local_steps_are_not_quantized():
    mixer = Simulated(graph("ring", 3), MessageLayout((512,), wire=made("sign")))
    out = mixer.outbox(0)[0][0].normal_()
    before = out.clone()
    mixer.start(ExchangeKind.LOCAL, 0)
    sent, mixed = mixer.finish()
    assert torch.equal(sent[0][0], before) and torch.equal(mixed[0][0], before)


def test_an_exchange_has_its_own_draw():
    """Consecutive GLOBAL exchanges have the same round of the graph, but round differently."""
    seen = []
    for exchange in (0, 1):
        mixer = Simulated(graph("ring", 3), MessageLayout((512,), wire=made("qsgd-1")))
        mixer.outbox(0)[0][0].fill_(0.5)[:, 0] = 1.0
        mixer.start(ExchangeKind.GLOBAL, 0, exchange)
        sent, mixed = mixer.finish()
        assert (mixed[0][0] == mixed[0][0][0]).all()
        seen.append(sent[0][0].clone())
    assert not torch.equal(*seen)
    assert wires.FP32.exact and not made("bf16").exact


# -- every wire x every mixer ----------------------------------------------------------------------

MATRICES = [
    np.array([[0.5, 0.5, 0.0], [0.0, 0.7, 0.3], [0.25, 0.0, 0.75]]),
    np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.0, 0.6, 0.4]]),
]
EXCHANGES = {
    11: (ExchangeKind.GOSSIP, 5),
    12: (ExchangeKind.GLOBAL, 6),
    13: (ExchangeKind.GOSSIP, 6),
    14: (ExchangeKind.GOSSIP, 7),
}
"""Kind and round by the number of the exchange, which is part of the key of random numbers."""


def drawn(number, slot, part, width):
    """Draw the values of three nodes, (3, width), with zeros as after a layer's last parameter."""
    values = np.random.default_rng([number, slot, part]).standard_normal((3, width))
    values[:, width // 2 - 20 : width // 2] = 0.0
    return values.astype(np.float32 if width > 1 else np.float64)


def by_numpy(layout, number, kind, t):
    """Return sent and mixed values, (3, p), by slot and part; sums begin with the own term."""
    results = {}
    matrix = MATRICES[t % 2]
    for slot, width in enumerate(layout.widths):
        for part in range(layout.vectors + layout.scalars):
            vector = part < layout.vectors
            sent = drawn(number, slot, part, width if vector else 1)
            for node in range(3 if vector else 0):
                key = (number, 0 if layout.wire.shared else node, part)
                layout.wire.pack(torch.from_numpy(sent[node]), key, sum(layout.widths[:slot]))
            mixed = np.empty_like(sent)
            for i, row in enumerate(matrix):
                order = sorted(np.flatnonzero(row), key=lambda j, i=i: (j != i, j))
                weights = sent.dtype.type(row)[order]
                nodes = order
                if kind is ExchangeKind.GLOBAL:
                    weights = sent.dtype.type([1 / 3] * 3)
                    nodes = range(3)
                if len(set(weights)) == 1:
                    mixed[i] = sum(sent[j] for j in nodes) * weights[0]
                else:
                    mixed[i] = sum(w * sent[j] for w, j in zip(weights, nodes, strict=True))
            results[slot, part] = sent, mixed
    return results


def opened(world, layout, ways, device):
    """Open mixers by name, one at a time; ``ways``: (same_host, exchange or None on the CPU)."""
    from mpigossip.mixing.synchronous import FaultTolerant, Synchronous

    along = from_matrices(MATRICES)
    yield "simulated", Simulated(along, layout)
    device_layout = replace(layout, devices=(device.format(rank=world.rank),) * len(layout.widths))
    yield "messages", FaultTolerant(along, device_layout, world, timeout_s=30)
    for same_host, window in ways:
        ways = {"same_host": same_host, "timeout_s": 30, "on_devices": window is not None}
        ways |= {"exchange": window} if window else {}
        yield (
            f"{same_host} {window}",
            Synchronous(along, device_layout if window else layout, world, **ways),
        )


@with_world
def differing(world, ways, device="cpu"):
    """Return the wires, mixers and exchanges whose values differ from NumPy's."""
    differences = set()
    for name in ("fp32", *ALL):
        layout = MessageLayout((1024, 1024), vectors=2, scalars=1, wire=made(name))
        expected = {number: by_numpy(layout, number, *now) for number, now in EXCHANGES.items()}
        for way, mixer in opened(world, layout, ways, device):
            rows = list(mixer.local_nodes)
            for number, (kind, t) in EXCHANGES.items():
                out = mixer.outbox(t)
                for slot, part in expected[number]:
                    array = out[slot][part]
                    values = drawn(number, slot, part, array.shape[1])[rows]
                    array.copy_(torch.from_numpy(values))
                mixer.start(kind, t, number)
                got = mixer.finish()
                for (slot, part), values in expected[number].items():
                    for arrays, value in zip(got, values, strict=True):
                        if (arrays[slot][part].cpu().numpy() != value[rows]).any():
                            differences.add((name, way, number))
            mixer.close()
    return sorted(differences)


@pytest.mark.both
def test_every_wire_has_the_values_of_numpy_over_every_mixer(ranks):
    ways = [("read", None), ("put", None), ("put", "host")]
    for differences in ranks(3)(differing, ways, timeout=300):
        assert differences == []
