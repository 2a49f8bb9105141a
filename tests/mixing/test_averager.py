"""Averages of arrays: closed forms on every graph, and error messages."""

import re

import networkx
import numpy as np
import pytest
import torch

import mpigossip
from mpigossip import graphs
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.graphs import GraphError
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.kernels import native
from mpigossip.mixing.simulated import Simulated
from tests.cases import catching, naming, some, with_world
from tests.launch import REPO
from tests.mixing.averager_operations import random_averages

SHAPE = (3, 5, 2)
ROUNDS = 6
EPS = {"float32": 1e-6, "float64": 1e-14}


def drawn(rank, dtype="float64"):
    return np.random.default_rng([7, rank]).standard_normal(SHAPE).astype(dtype)


def graphs_over(n):
    """Iterate over every graph that n nodes can have, and a graph of networkx."""
    for name in graphs.BUILDERS:
        try:
            yield name, graphs.graph(name, n, seed=1)
        except GraphError as refused:
            assert "need" in str(refused) or "degree" in str(refused)
    if n > 1:
        yield "networkx", graphs.graph(networkx.path_graph(n))


@with_world
def averages(world, name, dtype, kind, same_host, rounds=None):
    """Return this node's arrays after each of ``rounds`` rounds."""
    x = drawn(world.rank, dtype)
    x = torch.from_numpy(x) if kind == "torch" else x
    network = networkx.path_graph(world.size) if name == "networkx" else name
    seed = {} if name == "networkx" else {"seed": 1}
    averager = mpigossip.Averager(world, network, like=x, same_host=same_host, **seed)
    results = []
    for _ in range(rounds or averager.graph.period or ROUNDS):
        x = averager.average(x)
        results.append(np.array(x))
    return results


@pytest.mark.both
@pytest.mark.parametrize(
    ("n", "same_host"),
    some(
        [(1, "read"), (2, "put"), (3, "read"), (6, "read"), (4, "put")],
        [(3, "read"), (4, "put")],
    ),
)
def test_every_graph_has_its_closed_form(ranks, n, same_host):
    """The result must be W(t)…W(0) x, which is the exact mean if the product is 11ᵀ/n."""
    exact = set()
    for index, (name, graph) in enumerate(graphs_over(n)):
        dtype = ("float64", "float32")[index % 3 == 2]
        kind = ("numpy", "torch")[index % 2]
        results = ranks(n)(averages, name, dtype, kind, same_host)
        expected = np.stack([drawn(rank, dtype).astype(np.float64) for rank in range(n)])
        start = expected
        product = np.eye(n)
        for t in range(graph.period or ROUNDS):
            product = graph.matrix(t) @ product
            expected = np.einsum("ij,jabc->iabc", product, start)
            for rank in range(n):
                result = results[rank][t]
                assert result.dtype == dtype and result.shape == SHAPE
                assert np.abs(result - expected[rank]).max() < 30 * EPS[dtype], (name, t)
        if graph.period and np.abs(product - 1 / n).max() < 1e-15:
            exact.add(name)
            limit = 1e-12 if dtype == "float64" else 30 * EPS[dtype]
            for rank in range(n):
                assert np.abs(results[rank][-1] - start.mean(0)).max() < limit, name
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
    for rank, results in enumerate(ranks(3)(averages, name, "float64", "numpy", "read", 3)):
        assert (results[2] == expected[rank]).all()


@with_world
def halves(world):
    """Average with work between start and finish, arrays of any memory order, and kept results."""
    graph = graphs.graph("one-peer-exponential", world.size)
    x = np.asfortranarray(drawn(world.rank))
    averager = mpigossip.Averager(world, graph, like=x)
    averager.start(x[:, ::-1][:, ::-1])
    x[...] = -1  # the values at the start are sent
    first = averager.finish()
    saved = first.copy()
    out = np.full(SHAPE, np.nan)
    for _ in range(3):
        assert averager.average(first, out=out) is out
    mean_of_all = averager.mean(drawn(world.rank), out=x)
    assert mean_of_all is x and averager.round == 4
    assert (first == saved).all()  # later rounds did not overwrite it
    scalar = mpigossip.Averager(world, "complete", like=torch.tensor(0.0))
    empty = mpigossip.Averager(world, "ring", like=np.empty((0, 3), np.float32))
    parameter = torch.nn.Parameter(torch.tensor(float(world.rank)))
    mean = scalar.average(parameter)
    assert (
        not mean.requires_grad
        and mean.shape == ()
        and scalar.average(parameter, parameter) is parameter
    )
    assert empty.average(np.empty((0, 3), np.float32)).shape == (0, 3)
    return first, x, float(parameter)


def test_start_and_finish_with_any_memory_order(ranks):
    n = 4
    results = ranks(n)(halves)
    start = np.stack([drawn(rank) for rank in range(n)])
    first = np.einsum("ij,jabc->iabc", graphs.graph("one-peer-exponential", n).matrix(0), start)
    for rank, (once, mean, scalar) in enumerate(results):
        assert np.abs(once - first[rank]).max() < 1e-15
        assert (mean == results[0][1]).all() and np.abs(mean - start.mean(0)).max() < 1e-15
        assert scalar == 1.5


@with_world
def mistaken(world):
    """Make wrong calls; return the error message of each."""
    x = np.zeros(4)
    messages, catch = catching(JobError)
    make = mpigossip.Averager
    catch(make, world, "ring", like=[1.0])
    catch(make, world, "ring", like=np.zeros(4, bool))
    catch(make, world, "ring", like=torch.zeros(4, dtype=torch.complex64))
    catch(make, world, "ring", like=x.astype(">f8"))
    catch(make, world, "ring", like=x, same_host="shared")
    catch(make, world, "rong", like=x)
    catch(make, world, graphs.graph("ring", world.size + 1), like=x)
    catch(make, world, "ring", like=np.zeros(3 + world.rank))
    catch(make, world, "ring", like=x.astype(("float32", "float64")[world.rank]))
    catch(make, world, "random-matching", like=x, seed=world.rank)
    averager = make(world, "ring", like=x)
    catch(averager.start, np.zeros(5))
    catch(averager.start, torch.zeros(4, dtype=torch.float64))
    catch(averager.average, x.astype("float32"))
    catch(averager.finish)
    fixed = np.broadcast_to(0.0, 4)
    spread = torch.zeros(1, dtype=torch.float64).expand(4)
    catch(averager.average, x, fixed)
    averager.start(x)
    catch(averager.start, x)
    catch(averager.finish, np.zeros((2, 2)))
    catch(averager.finish, fixed)
    averager.finish(x)  # a rejected call changes nothing
    catch(make, world, "ring", like=torch.zeros(4, device="meta"))
    catch(make, world, "ring", like=torch.zeros(4).to_sparse())
    other = make(world, "ring", like=spread)
    catch(other.start, torch.zeros(4, dtype=torch.float64).to_sparse())
    catch(other.mean, torch.zeros(4, dtype=torch.float64), spread)
    catch((averager, other)[world.rank].start, (x, spread)[world.rank])
    assert [
        float(each_averager.average(z)[0]) for each_averager, z in ((averager, x), (other, spread))
    ] == [0, 0]
    averager.start(x)
    averager.close()  # during a round
    averager.close()
    catch(averager.start, x)
    return messages


def test_mistakes_raise_messages_on_every_rank(ranks):
    expected = [
        "Averager: the argument like is a list: must be a dense numpy array",
        "Averager: the argument like is bool of shape (4,) (ndarray)",
        "Averager: the argument like is torch.complex64 of shape (4,)",
        "Averager: the argument like is >f8 of shape (4,) (ndarray)",
        'same_host = "shared": must be "read" or "put"',
        'graph "rong" is unknown; did you mean "ring"?',
        'graph "ring" has 3 nodes, but 2 are needed',
        "rank 1 on {host}: shape is (4,) here, but (3,) on rank 0",
        "rank 1 on {host}: dtype is torch.float64 here, but torch.float32 on rank 0",
        "rank 1 on {host}: graph is Graph(random-matching",
        "start: an array is float64 of shape (5,) (ndarray); this Averager was made for numpy "
        "arrays of float64 and shape (4,)",
        "start: an array is torch.float64",
        "average: an array is float32 of shape (4,)",
        "finish: no exchange is in flight; call start(x) first",
        "average: out is read-only or expanded",
        "start: the exchange of round 0 is in flight; call finish() first",
        "finish: an array is float64 of shape (2, 2)",
        "finish: out is read-only or expanded",
        "Averager: the argument like is torch.float32 of shape (4,) (Tensor, torch.strided",
        "Averager: the argument like is torch.float32 of shape (4,) (Tensor, torch.sparse_coo",
        "start: an array is torch.float64 of shape (4,) (Tensor, torch.sparse_coo on cpu)",
        "mean: out is read-only or expanded",
        "start: some ranks call Averager 1 here and others Averager 2",
        "start: this Averager is closed",
    ]
    for messages in ranks(2)(mistaken):
        for text, start in zip(messages, expected, strict=True):
            head, _, tail = start.partition("{host}")
            assert text.startswith(head) and tail in text, (text, start)


def in_float64(comm):
    """Train a float64 model whose parameters the Averager averages, as on the page."""
    flat = torch.nn.utils.parameters_to_vector
    back = torch.nn.utils.vector_to_parameters
    model = torch.nn.Linear(3, 1, bias=False).double()
    with torch.no_grad(), MPIWorld(comm) as world:
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


def test_one_process_needs_no_mpi():
    world = SingleProcess()
    averager = mpigossip.Averager(world, "one-peer-exponential", like=drawn(0))
    assert (averager.average(drawn(0)) == drawn(0)).all()
    assert (averager.mean(drawn(0)) == drawn(0)).all()
    world.close()
    with pytest.raises(JobError, match=naming("start", "Averager", "close()")):
        averager.start(drawn(0))


def test_the_page_s_average_runs_as_pasted(pooled, tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```", (REPO / "mpigossip/optim/README.md").read_text(), re.S
    )
    (tmp_path / "average.py").write_text(next(block for block in blocks if "Averager(" in block))
    done = pooled(4, "average.py")
    lines = re.findall(r"node \d: [\d.]+", done.stdout)  # ranks may share a line
    assert sorted(lines) == [f"node {i}: 1.5" for i in range(4)], done


@with_world
def averages_while_meta_is_the_default(world, kind):
    """Return an average of ranks that was computed while tensors are made on "meta" by default."""
    x = np.full(40, world.rank, np.float32)
    x = torch.from_numpy(x) if kind == "torch" else x
    averager = mpigossip.Averager(world, "complete", like=x)
    native.library.cache_clear()  # The first sum of a process loads the library.
    torch.set_default_device("meta")
    try:
        return np.array(averager.average(x))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_an_average_needs_no_default_device(ranks, kind):
    for result in ranks(2)(averages_while_meta_is_the_default, kind):
        assert (result == 0.5).all()


def test_masked_arrays_are_rejected():
    masked = np.ma.masked_array(np.ones(3), [True, False, False])
    with SingleProcess() as world:
        with pytest.raises(JobError, match=naming("like", "MaskedArray", "without a mask")):
            mpigossip.Averager(world, "ring", like=masked)
        averager = mpigossip.Averager(world, "ring", like=np.ones(3))
        with pytest.raises(JobError, match=naming("average", "MaskedArray")):
            averager.average(masked)


def test_wrong_weights_and_missing_arrays_raise_messages():
    """The value, and in messages about weights the ranks that may have one, must be named."""
    x = np.ones(3)
    ones = np.ones(3, np.int64)
    nan, inf = float("nan"), float("inf")
    with pytest.raises(JobError, match=naming("Averager", "NoneType", "mpigossip.world()")):
        mpigossip.Averager(None, "ring", like=x)
    with SingleProcess() as world:
        averager = mpigossip.Averager(world, "ring", like=x)
        for call in (averager.average, averager.start, averager.exchange, averager.mean):
            with pytest.raises(JobError, match=naming(call.__name__, "NoneType", "float64")):
                call(None)
        for weights, fragments in [
            ([0.5, 0.5], ("list", "[0]")),
            ([0], ("list", "[0]")),
            (0.5, ("float", "[0]")),
            ({"0": 0.5}, ("rank '0'", "[0]")),
            ({"0": 0.5, 7: 1}, ("rank '0'", "[0]")),
            ({7: 1}, ("rank 7", "[0]")),
            ({0: "0.5"}, ("rank 0", "'0.5'", "finite")),
            ({0: None}, ("rank 0", "None", "finite")),
            ({0: 1j}, ("rank 0", "1j", "finite")),
            ({0: nan}, ("rank 0", "nan", "finite")),
            ({0: inf}, ("rank 0", "inf", "finite")),
            ({0: np.ones(2)}, ("rank 0", "finite")),
        ]:
            with pytest.raises(JobError, match=naming("average", *fragments)):
                averager.average(x, weights=weights)
        assert averager.round == 0  # a rejected call is no round
        for weight in (2, np.float32(2), torch.tensor(2), True + 1):
            assert (averager.average(x, weights={np.int64(0): weight}) == 2).all()
        integers = mpigossip.Averager(world, "ring", like=ones)
        for weight in (2**62 + 1, 2**64 + 5, -(2**63) - 1):
            wrapped = (weight + 2**63) % 2**64 - 2**63
            assert (integers.average(ones, weights={0: weight}) == wrapped).all()


CALLS = "exchange average exchange average average weights average average average exchange"


@with_world
def interleaved(world, same_host):
    x = np.array([world.rank, 2.0 ** (7 * world.rank)])
    with mpigossip.Averager(world, "one-peer-exponential", like=x, same_host=same_host) as averager:
        for call in CALLS.split():
            if call == "exchange":
                averager.exchange(x)
            else:
                weights = {world.rank: 1} if call == "weights" else None
                x = averager.average(x, weights=weights)
    return x


@pytest.mark.both
@pytest.mark.parametrize("same_host", ["read", "put"])
def test_averages_may_follow_rounds_of_other_kinds(ranks, same_host):
    """Only rounds of `average` without weights use the mixer; the others are rounds, too."""
    n = 3
    x = np.array([[rank, 2.0 ** (7 * rank)] for rank in range(n)])
    graph = mpigossip.graph("one-peer-exponential", n)
    for t, call in enumerate(CALLS.split()):
        x = graph.matrix(t) @ x if call == "average" else x
    assert (np.stack(ranks(n)(interleaved, same_host)) == x).all()


@with_world
def exchanged(world, dtype, kind):
    """Return what each neighbour sent, a sum with given weights, and the sum over all nodes."""
    x = np.random.default_rng([3, world.rank]).integers(0, 5, SHAPE).astype(dtype)
    x = torch.from_numpy(x) if kind == "torch" else x
    if dtype == "float16" and kind == "torch":
        x = x.bfloat16()
    with mpigossip.Averager(world, "ring", like=x) as averager:
        received = averager.exchange(x)
        weights = {world.rank: 2, **dict.fromkeys(received, 3)}
        summed = averager.average(x, weights=weights)
        assert averager.round == 2 and summed.dtype == x.dtype
        with pytest.raises(JobError, match=naming("average", "rank 99")):
            averager.average(x, weights={99: 1})
        if dtype == "float16":
            result = averager.average(x), averager.mean(x)
            assert result[0].dtype == result[1].dtype == x.dtype
            with pytest.raises(JobError, match=naming("sum", "integers")):
                averager.sum(x)
        else:
            result = (averager.sum(x),)
            with pytest.raises(JobError, match=naming("average", "integers")):
                averager.average(x)
            with pytest.raises(JobError, match=naming("rank 0", "0.5")):
                averager.average(x, weights={0: 0.5})
    with pytest.raises(JobError, match=naming("exchange", "Averager", "close()")):
        averager.exchange(x)
    arrays = [*received.values(), summed, *result]
    return list(received), [np.array(torch.as_tensor(a).double()) for a in arrays]


@pytest.mark.both
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["int64", "int8", "uint8", "float16"])
def test_neighbours_arrays_given_weights_and_small_types(ranks, dtype, kind):
    n = 3
    x = np.stack([np.random.default_rng([3, r]).integers(0, 5, SHAPE) for r in range(n)])
    for rank, (sources, arrays) in enumerate(ranks(n)(exchanged, dtype, kind)):
        assert sorted(sources) == [j for j in range(n) if j != rank]
        for j, array in zip(sources, arrays, strict=False):
            assert (array == x[j]).all()
        assert (arrays[2] == 2 * x[rank] + 3 * (x.sum(0) - x[rank])).all()
        if dtype == "float16":
            assert np.abs(arrays[3] - x.mean(0)).max() < 2**-6
            assert np.abs(arrays[4] - x.mean(0)).max() < 2**-6
        else:
            assert (arrays[3] == x.sum(0)).all()


@with_world
def random_calls(world, *arguments):
    return random_averages(world, *arguments)


@pytest.mark.both
@pytest.mark.parametrize(("n", "name"), some(
    [(2, "ring"), (3, "one-peer-exponential"), (4, "exponential"), (6, "ring")],
    [(3, "one-peer-exponential")],
))  # fmt: skip
def test_random_calls_have_the_results_of_their_formulas(ranks, n, name):
    """The lab makes 10,000 calls of each rank."""
    assert sum(ranks(n)(random_calls, name, 150, 129, timeout=120), []) == []


def test_a_wrong_result_of_a_random_call_is_noticed(monkeypatch):
    mean = mpigossip.Averager.mean
    monkeypatch.setattr(mpigossip.Averager, "mean", lambda *arguments: mean(*arguments) + 1e-9)
    with SingleProcess() as world:
        sentences = random_averages(world, "ring", 60, 5)
    assert sentences and all("mean, rank 0" in sentence for sentence in sentences)
