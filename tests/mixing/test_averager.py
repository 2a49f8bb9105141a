"""The plain operation on arrays: closed forms on every graph, and mistakes in words."""

import re

import networkx
import numpy as np
import pytest
import torch

import mpigossip
from mpigossip import graphs
from mpigossip.cluster.ranks import SingleProcess, World
from mpigossip.config import JobError
from mpigossip.graphs import GraphError
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.simulated import Simulated
from tests.cases import some, with_world
from tests.launch import REPO

SHAPE = (3, 5, 2)
ROUNDS = 6
EPS = {"float32": 1e-6, "float64": 1e-14}


def drawn(rank, dtype="float64"):
    return np.random.default_rng([7, rank]).standard_normal(SHAPE).astype(dtype)


def graphs_over(n):
    """Every graph that so many nodes can have, and one of networkx."""
    for name in graphs.BUILDERS:
        try:
            yield name, graphs.graph(name, n, seed=1)
        except GraphError as refused:
            assert "need" in str(refused) or "degree" in str(refused)
    if n > 1:
        yield "networkx", graphs.graph(networkx.path_graph(n))


@with_world
def averages(world, name, dtype, kind, same_host, rounds=None):
    """This node's arrays after each of some rounds."""
    x = drawn(world.rank, dtype)
    x = torch.from_numpy(x) if kind == "torch" else x
    network = networkx.path_graph(world.size) if name == "networkx" else name
    seed = {} if name == "networkx" else {"seed": 1}
    averager = mpigossip.Averager(world, network, like=x, same_host=same_host, **seed)
    found = []
    for _ in range(rounds or averager.graph.period or ROUNDS):
        x = averager.average(x)
        found.append(np.array(x))
    return found


@pytest.mark.both
@pytest.mark.parametrize(
    ("n", "same_host"),
    some(
        [(1, "read"), (2, "put"), (3, "read"), (3, "put"), (4, "read"), (4, "put"), (6, "read")],
        [(3, "read"), (4, "put")],
    ),
)
def test_every_graph_has_its_closed_form(ranks, n, same_host):
    """W(t)…W(0) x by a plain matrix product; the exact mean where that is 11ᵀ/n."""
    exact = set()
    for at, (name, graph) in enumerate(graphs_over(n)):
        dtype = ("float64", "float32")[at % 3 == 2]
        kind = ("numpy", "torch")[at % 2]
        found = ranks(n)(averages, name, dtype, kind, same_host)
        expected = np.stack([drawn(rank, dtype).astype(np.float64) for rank in range(n)])
        start = expected
        product = np.eye(n)
        for t in range(graph.period or ROUNDS):
            product = graph.matrix(t) @ product
            expected = np.einsum("ij,jabc->iabc", product, start)
            for rank in range(n):
                here = found[rank][t]
                assert here.dtype == dtype and here.shape == SHAPE
                assert np.abs(here - expected[rank]).max() < 30 * EPS[dtype], (name, t)
        if graph.period and np.abs(product - 1 / n).max() < 1e-15:
            exact.add(name)
            limit = 1e-12 if dtype == "float64" else 30 * EPS[dtype]
            for rank in range(n):
                assert np.abs(found[rank][-1] - start.mean(0)).max() < limit, name
    named = {"complete", "base-2", "base-3", "spanning-tree", "one-peer-exponential"}
    assert exact >= named - ({"one-peer-exponential"} if n in (3, 6) else set()), exact


def simulated(graph, rounds):
    mixer = Simulated(graph, MessageLayout((30,), dtype=torch.float64))
    x = None
    for t in range(rounds):
        (out,) = mixer.outbox(t)
        rows = [torch.from_numpy(drawn(r)).view(-1) for r in range(graph.n)]
        out[0].copy_(torch.stack(rows) if x is None else x)
        mixer.start(ExchangeKind.GOSSIP, t)
        x = mixer.finish()[1][0][0].clone()
    return x.view(graph.n, *SHAPE).numpy()


@pytest.mark.parametrize("name", ["exponential", "star", "one-peer-exponential", "random-matching"])
def test_float64_has_the_bits_of_the_simulator(ranks, name):
    expected = simulated(graphs.graph(name, 3, seed=1), 3)
    for rank, found in enumerate(ranks(3)(averages, name, "float64", "numpy", "read", 3)):
        assert (found[2] == expected[rank]).all()


@with_world
def halves(world):
    """Work between the halves, arrays in every order of memory, results that stay."""
    graph = graphs.graph("one-peer-exponential", world.size)
    x = np.asfortranarray(drawn(world.rank))
    averager = mpigossip.Averager(world, graph, like=x)
    averager.start(x[:, ::-1][:, ::-1])
    x[...] = -1  # the values of the start are what travels
    first = averager.finish()
    kept = first.copy()
    out = np.full(SHAPE, np.nan)
    for _ in range(3):
        assert averager.average(first, out=out) is out
    whole = averager.mean(drawn(world.rank), out=x)
    assert whole is x and averager.round == 4
    assert (first == kept).all()  # whatever later rounds brought
    scalar = mpigossip.Averager(world, "complete", like=torch.tensor(0.0))
    empty = mpigossip.Averager(world, "ring", like=np.empty((0, 3), np.float32))
    there = torch.nn.Parameter(torch.tensor(float(world.rank)))
    mean = scalar.average(there)
    assert not mean.requires_grad and mean.shape == () and scalar.average(there, there) is there
    assert empty.average(np.empty((0, 3), np.float32)).shape == (0, 3)
    return first, x, float(there)


def test_halves_and_memory(ranks):
    n = 4
    found = ranks(n)(halves)
    start = np.stack([drawn(rank) for rank in range(n)])
    first = np.einsum("ij,jabc->iabc", graphs.graph("one-peer-exponential", n).matrix(0), start)
    for rank, (once, mean, scalar) in enumerate(found):
        assert np.abs(once - first[rank]).max() < 1e-15
        assert (mean == found[0][1]).all() and np.abs(mean - start.mean(0)).max() < 1e-15
        assert scalar == 1.5


@with_world
def mistaken(world):
    """What each mistake is told as."""
    x = np.zeros(4)
    told = []

    def tell(act, *arguments, **options):
        with pytest.raises(JobError) as caught:
            act(*arguments, **options)
        told.append(str(caught.value))

    make = mpigossip.Averager
    tell(make, world, "ring", like=[1.0])
    tell(make, world, "ring", like=np.zeros(4, int))
    tell(make, world, "ring", like=torch.zeros(4, dtype=torch.bfloat16))
    tell(make, world, "ring", like=x.astype(">f8"))
    tell(make, world, "ring", like=x, same_host="shared")
    tell(make, world, "rong", like=x)
    tell(make, world, graphs.graph("ring", world.size + 1), like=x)
    tell(make, world, "ring", like=np.zeros(3 + world.rank))
    tell(make, world, "ring", like=x.astype(("float32", "float64")[world.rank]))
    tell(make, world, "random-matching", like=x, seed=world.rank)
    averager = make(world, "ring", like=x)
    tell(averager.start, np.zeros(5))
    tell(averager.start, torch.zeros(4, dtype=torch.float64))
    tell(averager.average, x.astype("float32"))
    tell(averager.finish)
    fixed = np.broadcast_to(0.0, 4)
    spread = torch.zeros(1, dtype=torch.float64).expand(4)
    tell(averager.average, x, fixed)
    averager.start(x)
    tell(averager.start, x)
    tell(averager.finish, np.zeros((2, 2)))
    tell(averager.finish, fixed)
    averager.finish(x)  # a mistake that was caught costs nothing
    tell(make, world, "ring", like=torch.zeros(4, device="meta"))
    tell(make, world, "ring", like=torch.zeros(4).to_sparse())
    other = make(world, "ring", like=spread)
    tell(other.start, torch.zeros(4, dtype=torch.float64).to_sparse())
    tell(other.mean, torch.zeros(4, dtype=torch.float64), spread)
    tell((averager, other)[world.rank].start, (x, spread)[world.rank])
    assert [float(one.average(z)[0]) for one, z in ((averager, x), (other, spread))] == [0, 0]
    averager.start(x)
    averager.close()  # in the midst of a round
    averager.close()
    tell(averager.start, x)
    return told


def test_mistakes_are_told_in_words_on_every_rank(ranks):
    wanted = [
        "like is a list: arrays of numpy and torch",
        "like is int64 of shape (4,) (ndarray)",
        "like is torch.bfloat16 of shape (4,) (Tensor, torch.strided on cpu)",
        "like is >f8 of shape (4,) (ndarray)",
        'same_host = "shared": give "read" or "put"',
        'graph "rong" is unknown; did you mean "ring"?',
        'graph "ring" has 3 nodes, but 2 are needed',
        "rank 1 on {host}: shape (4,), on rank 0 (3,)",
        "rank 1 on {host}: dtype torch.float64, on rank 0 torch.float32",
        "rank 1 on {host}: graph Graph(random-matching",
        "start: an array is float64 of shape (5,) (ndarray); this Averager was made for numpy "
        "arrays of float64 and shape (4,)",
        "start: an array is torch.float64",
        "average: an array is float32 of shape (4,)",
        "finish: no exchange is under way; start(x) begins one",
        "average: out is read-only or expanded",
        "start: the exchange of round 0 is under way; finish() comes first",
        "finish: an array is float64 of shape (2, 2)",
        "finish: out is read-only or expanded",
        "like is torch.float32 of shape (4,) (Tensor, torch.strided on meta)",
        "like is torch.float32 of shape (4,) (Tensor, torch.sparse_coo on cpu)",
        "start: an array is torch.float64 of shape (4,) (Tensor, torch.sparse_coo on cpu)",
        "mean: out is read-only or expanded",
        "start: some ranks call Averager 1 here and others Averager 2",
        "start: this Averager is closed",
    ]
    for told in ranks(2)(mistaken):
        for text, start in zip(told, wanted, strict=True):
            head, _, tail = start.partition("{host}")
            assert text.startswith(head) and tail in text, (text, start)


def in_float64(comm):
    """A float64 model that torch steps and the Averager averages, as the page has it."""
    flat = torch.nn.utils.parameters_to_vector
    back = torch.nn.utils.vector_to_parameters
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad(), World(comm) as world:
        model.weight.fill_(world.rank / 3)
        averager = mpigossip.Averager(world, "ring", like=flat(model.parameters()))
        for _ in range(3):
            model.weight.add_(0.1)
            back(averager.average(flat(model.parameters())), model.parameters())
        return model.weight.numpy()[0, 0]


def test_a_float64_model_is_averaged_in_float64(ranks):
    wanted = np.arange(3) / 3
    for _ in range(3):
        wanted = graphs.graph("ring", 3).matrix(0) @ (wanted + 0.1)
    np.testing.assert_allclose(ranks(3)(in_float64), wanted, rtol=1e-14)


def test_alone_it_needs_no_mpi():
    world = SingleProcess()
    averager = mpigossip.Averager(world, "one-peer-exponential", like=drawn(0))
    assert (averager.average(drawn(0)) == drawn(0)).all()
    assert (averager.mean(drawn(0)) == drawn(0)).all()
    world.close()
    with pytest.raises(JobError, match="closed, as its world is"):
        averager.start(drawn(0))


def test_the_page_s_average_runs_as_pasted(pooled, tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (REPO / "mpigossip/optim/README.md").read_text(), re.S
    )
    (tmp_path / "average.py").write_text(next(one for one in blocks if "Averager(" in one))
    done = pooled(4, "average.py")
    said = re.findall(r"node \d: [\d.]+", done.stdout)  # ranks may share a line
    assert sorted(said) == [f"node {i}: 1.5" for i in range(4)], done


def test_a_mask_is_not_lost_in_silence():
    masked = np.ma.masked_array(np.ones(3), [True, False, False])
    with SingleProcess() as world:
        with pytest.raises(JobError, match=r"\(MaskedArray\): .* without a mask; convert it"):
            mpigossip.Averager(world, "ring", like=masked)
        averager = mpigossip.Averager(world, "ring", like=np.ones(3))
        with pytest.raises(JobError, match=r"average: .*\(MaskedArray\)"):
            averager.average(masked)
