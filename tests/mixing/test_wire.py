"""Encodings: unbiased, invertible, the same bits however columns are split, as small as said."""

import numpy as np
import pytest
import torch

from mpigossip import graph
from mpigossip.mixing import wire as wires
from mpigossip.mixing.base import Kind, Layout, traffic
from mpigossip.mixing.codes import wire
from mpigossip.mixing.simulated import Simulated
from mpigossip.mixing.wire import BUCKET, decode, encode

ALL = [
    "bf16", "qsgd", "qsgd-7", "qsgd-1", "fp4", "sign", "top-k", "top-k-int2", "random-k",
    "shared-k",
]  # fmt: skip


def made(name, seed=3):
    kind, _, levels = name.partition("-")
    if kind == "qsgd" and levels:
        return wire("qsgd", levels=int(levels), seed=seed)
    return wire(name, kept=0.1, seed=seed)


def values(width=4 * BUCKET, seed=0):
    drawn = np.random.default_rng(seed).standard_normal(width, np.float32)
    drawn[BUCKET : 2 * BUCKET] = 0.0
    drawn[-1] = 40.0
    return torch.from_numpy(drawn)


def message(one):
    pieces = one.pack(x := values(), (5, 2, 0), 0)
    return x, torch.cat([piece.reshape(-1) for piece in pieces])


@pytest.mark.parametrize("name", ALL)
def test_what_is_decoded_is_what_the_sender_keeps(name):
    one = made(name)
    x, codes = message(one)
    codes = torch.nn.functional.pad(codes, (0, one.nbytes(4 * BUCKET) - len(codes)))
    for part in (slice(0, 4 * BUCKET), slice(BUCKET, 3 * BUCKET)):
        out = torch.empty(part.stop - part.start)
        one.unpack(codes, 4 * BUCKET, part, out)
        assert torch.equal(out, x[part])
    assert torch.isfinite(x).all() and not x[BUCKET : 2 * BUCKET].any()


@pytest.mark.parametrize("name", ALL)
def test_a_shard_has_the_bits_that_it_has_in_the_whole(name):
    one, whole = made(name), values()
    one.pack(whole, (1, 4, 1), 0)
    shards = values().view(2, -1).clone()
    for k, shard in enumerate(shards):
        one.pack(shard, (1, 4, 1), k * 2 * BUCKET)
    assert torch.equal(shards.view(-1), whole)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("bf16", 1024),
        ("qsgd", 516),
        ("qsgd-7", 260),
        ("qsgd-1", 132),
        ("fp4", 260),
        ("sign", 68),
        ("top-k", 262),
        ("top-k-int2", 71),
        ("random-k", 212),
    ],
)
def test_bytes_of_a_bucket(name, nbytes):
    assert made(name).nbytes(8 * BUCKET) == 8 * nbytes
    _, codes = message(made(name))
    assert len(codes) == 4 * nbytes
    with pytest.raises(ValueError, match="whole"):
        made(name).nbytes(700)


@pytest.mark.parametrize("name", ["qsgd", "qsgd-7", "qsgd-1"])
def test_qsgd_is_unbiased_within_its_levels(name):
    one, x, total = made(name), values(), torch.zeros(4 * BUCKET, dtype=torch.float64)
    scale = x.view(-1, BUCKET).abs().amax(1, keepdim=True) / int((name + "-127").split("-")[1])
    for draw in range(400):
        one.pack(q := x.clone(), (draw, 0, 0), 0)
        assert ((q - x).view(-1, BUCKET).abs() <= scale * 1.001).all()
        total += q
    apart = (total / 400 - x).view(-1, BUCKET) / scale.clamp(min=1e-9)
    assert apart.abs().max() < 0.5 / 400**0.5 * 5.5 and abs(apart.mean()) < 2e-3


@pytest.mark.parametrize(
    ("name", "levels"), [("fp4", 2.0 ** torch.arange(-6, 1)), ("qsgd-1", [1.0])]
)
def test_few_bits_are_unbiased_and_the_two_values_around(name, levels):
    one, x, total = made(name), values(), torch.zeros(4 * BUCKET, dtype=torch.float64)
    scale = x.view(-1, BUCKET).abs().amax(1, keepdim=True)
    positive = torch.as_tensor(levels)
    steps = torch.cat([-positive.flip(0), torch.zeros(1), positive])
    size = x.view(-1, BUCKET) / scale.clamp(min=1e-9)
    low = steps[(torch.searchsorted(steps, size.contiguous(), right=True) - 1).clamp(min=0)]
    high = steps[torch.searchsorted(steps, size.contiguous()).clamp(max=len(steps) - 1)]
    for draw in range(400):
        one.pack(q := x.clone(), (draw, 0, 0), 0)
        sent = q.view(-1, BUCKET) / scale.clamp(min=1e-9)
        near = torch.minimum((sent - low).abs(), (sent - high).abs())
        assert (near < 1e-6)[scale[:, 0] > 0].all()
        total += q
    apart = (total / 400 - x).view(-1, BUCKET) / scale.clamp(min=1e-9)
    gap = (high - low).clamp(min=1e-6)
    assert (apart.abs() / gap)[scale[:, 0] > 0].max() < 0.5 / 400**0.5 * 5.5
    assert abs(apart.mean()) < 2e-3


def test_top_k_in_two_bits_takes_the_nearest_of_four_values():
    made("top-k").pack(kept := values(), (0, 0, 0), 0)
    made("top-k-int2").pack(q := values(), (0, 0, 0), 0)
    scale = values().view(-1, BUCKET).abs().amax(1, keepdim=True)
    where = kept != 0
    assert torch.equal(q != 0, where)
    assert ((q - kept).view(-1, BUCKET).abs() <= scale / 3 * 1.0001)[where.view(-1, BUCKET)].all()


@pytest.mark.parametrize("name", [n for n in ALL if n != "sign"])
def test_what_is_0_stays_0(name):
    """As the columns behind the last parameter: their neighbours' scale is not to hang on them."""
    x = torch.zeros(BUCKET)
    x[:5] = torch.tensor([3.0, -2.0, 1e-3, 0.5, -7.0])
    made(name).pack(x, (1, 0, 0), 0)
    assert not x[5:].any() and (name.endswith("-k") or x[:5].any())


def test_all_nodes_send_the_same_places_where_they_are_shared():
    layout = Layout((1024,), wire=made("shared-k"))
    segments = [[torch.ones(3, 1024)]]
    encode(layout, segments, [0, 1, 2], 4, None)
    first, *others = segments[0][0]
    assert first.sum() == 104 and all(torch.equal(first, one) for one in others)
    again = [[torch.ones(1, 1024)]]
    encode(layout, again, [0], 5, None)
    assert not torch.equal(again[0][0][0], first)


def test_draws_depend_on_all_that_names_them():
    one, other = made("qsgd", seed=3), made("qsgd", seed=4)
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    draws = [*((one, key, 0) for key in keys), (other, keys[0], 0), (one, keys[0], 512)]
    packed = []
    for maker, key, first in draws:
        maker.pack(x := values(), key, first)
        packed.append(x.numpy().tobytes())
    assert len(set(packed)) == len(packed)


def test_extremes_of_qsgd():
    one = made("qsgd")
    tiny = torch.full((BUCKET,), 1e-38)
    one.pack(tiny, (0, 0, 0), 0)
    assert not tiny.any()
    large = torch.full((BUCKET,), 3e38)
    one.pack(large, (0, 0, 0), 0)
    assert torch.allclose(large, torch.tensor(3e38))


def test_top_k_keeps_the_largest_and_sign_the_mean_modulus():
    x = values()
    made("top-k").pack(q := x.clone(), (0, 0, 0), 0)
    for before, after in zip(x.view(-1, BUCKET), q.view(-1, BUCKET), strict=True):
        kept = after.nonzero()[:, 0]
        assert len(kept) in (0, 52) and torch.equal(before[kept], after[kept])
        assert not len(kept) or before[kept].abs().min() >= before[after == 0].abs().max()
    made("sign").pack(q := x.clone(), (0, 0, 0), 0)
    assert torch.allclose(q.view(-1, BUCKET).abs().mean(1), x.view(-1, BUCKET).abs().mean(1))


def test_random_k_takes_every_value_equally_often():
    one, counts = made("random-k"), torch.zeros(BUCKET)
    for draw in range(2000):
        one.pack(x := torch.ones(BUCKET), (draw, 0, 0), 0)
        counts += x
    assert (counts.mean() - 2000 * 52 / 512).abs() < 1e-3
    assert counts.min() > 140 and counts.max() < 270


@pytest.mark.parametrize("name", ALL)
def test_a_message_with_scalars_and_several_vectors(name):
    layout = Layout((1024, 512), vectors=2, scalars=1, wire=made(name))
    segments = layout.empty(1)
    for slot, segment in enumerate(segments):
        for k, part in enumerate(segment):
            part.copy_(torch.randn(part.shape) if k < 2 else torch.full((1, 1), slot + 1 / 3))
    codes = torch.zeros(layout.sent_bytes, dtype=torch.uint8)
    encode(layout, segments, [7], 11, codes)
    for slot, segment in enumerate(segments):
        for part, array in enumerate(segment):
            whole = slice(0, array.shape[1])
            assert torch.equal(decode(layout, codes, slot, part, whole), array)


def test_bytes_are_counted_as_sent():
    ring = graph("ring", 8)
    assert traffic(ring, Kind.GOSSIP, 0, 0, 100, 400) == 200
    assert traffic(ring, Kind.LOCAL, 0, 0, 100, 400) == 0
    assert traffic(ring, Kind.GLOBAL, 0, 0, 400) == 700
    assert traffic(ring, Kind.GLOBAL, 0, 0, 50, 400) == 350  # codes to all others
    assert traffic(ring, Kind.GLOBAL, 0, 0, 200, 400) == 700  # the sum in full costs less
    layout = Layout((1024,), wire=made("qsgd"))
    mixer = Simulated(ring, layout)
    mixer.outbox(0)[0][0].normal_()
    mixer.start(Kind.GOSSIP, 0)
    mixer.finish()
    assert mixer.bytes_sent == [2 * 1032] * 8


def test_local_steps_are_not_quantized():
    mixer = Simulated(graph("ring", 3), Layout((512,), wire=made("sign")))
    out = mixer.outbox(0)[0][0].normal_()
    before = out.clone()
    mixer.start(Kind.LOCAL, 0)
    sent, mixed = mixer.finish()
    assert torch.equal(sent[0][0], before) and torch.equal(mixed[0][0], before)


def test_an_exchange_has_its_own_draw():
    """Consecutive GLOBAL rounds share the graph's clock and mustn't share their rounding."""
    seen = []
    for exchange in (0, 1):
        mixer = Simulated(graph("ring", 3), Layout((512,), wire=made("qsgd-1")))
        mixer.outbox(0)[0][0].fill_(0.5)[:, 0] = 1.0
        mixer.start(Kind.GLOBAL, 0, exchange)
        sent, mixed = mixer.finish()
        assert (mixed[0][0] == mixed[0][0][0]).all()
        seen.append(sent[0][0].clone())
    assert not torch.equal(*seen)
    assert wires.FP32.exact and not made("bf16").exact
