"""The simulator sums all rows at once with the same bits as row by row."""

import torch

from mpigossip import graphs
from mpigossip.mixing.base import ExchangeKind, MessageLayout, bytes_per_exchange
from mpigossip.mixing.combine import weighted_sum
from mpigossip.mixing.simulated import Simulated
from tests.cases import on_each

NAMES = [
    ("ring", {}),
    ("exponential", {}),
    ("one-peer-exponential", {}),
    ("grid", {}),
    ("base-2", {}),
    ("one-peer-exponential", {"order": "uniform"}),
    ("random-regular", {"degree": 4}),
    ("complete", {}),
    ("star", {}),
    ("identity", {}),
    ("random-matching", {}),
    ("base-3", {}),
]


def exchanged(mixer, x, t, kind=ExchangeKind.GOSSIP):
    for out, part in zip(mixer.outbox(t)[0], x, strict=True):
        out.copy_(part)
    mixer.start(kind, t)
    return [part.clone() for part in mixer.finish()[1][0]]


@on_each(("name", "options"), NAMES)
@on_each("n", [6, 7, 12])
def test_rows_at_once_have_the_bits_of_rows_one_by_one(name, options, n):
    made = graphs.graph(name, n, **options)
    layout = MessageLayout((96,), scalars=1)
    mixer = Simulated(made, layout)
    sent = [0] * n
    for t in range(2 * (made.period or 5)):
        x = [torch.randn(n, 96), torch.randn(n, 1, dtype=torch.float64)]
        result = exchanged(mixer, x, t)
        for i in range(n):
            sources, weights, own = made.neighbours(t, i)
            sent[i] += bytes_per_exchange(made, ExchangeKind.GOSSIP, t, i, layout.nbytes)
            for part, mixed in zip(x, result, strict=True):
                rows = [part[i : i + 1], *(part[j : j + 1] for j in sources)]
                if name == "complete":  # one average, in the order of nodes
                    rows = list(part.split(1))
                    weights = [1 / n] * (n - 1)
                    own = 1 / n
                row = weighted_sum([own, *weights], rows, torch.empty_like(rows[0]))
                assert torch.equal(mixed[i : i + 1], row)
    assert mixer.bytes_sent == sent
