"""Windows of arrays: each call against its formula, and random calls that lose no value."""

import re
import sys
import time

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip import graphs
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import catching, every, naming, some, with_world
from tests.launch import REPO, Launch, patience
from tests.mixing.window_operations import Result, find_errors, random_operations

pytestmark = pytest.mark.both

SHAPE = (3, 5)
DTYPES = ("float64", "float32", "float16", "int64", "int8", "uint8")


def drawn(rank, dtype, kind="numpy"):
    """Return small whole numbers, which every dtype represents exactly."""
    x = np.random.default_rng([5, rank]).integers(0, 4, SHAPE).astype(dtype)
    return torch.from_numpy(x) if kind == "torch" else x


@with_world
def one_of_each(world, name, dtype, kind):
    """Return x after each call; barriers between the calls make the results definite."""
    x = drawn(world.rank, dtype, kind)
    integer = not np.issubdtype(np.dtype(dtype), np.floating)
    results = []
    with mpigossip.Window(world, name, like=x) as window:
        ones = dict.fromkeys([world.rank, *window.in_neighbours], 1)

        def call(act, *arguments, **options):
            act(*arguments, **options)
            window.flush()
            world.barrier()

        call(window.get)
        results.append(window.update(x, ones if integer else None))
        world.barrier()
        call(window.put, x)
        call(window.accumulate, x)
        call(window.accumulate, x, dict.fromkeys(window.out_neighbours, 3))
        results.append(window.update(x, ones, reset=True))
        world.barrier()
        call(window.accumulate, x)
        call(window.put, x)
        results.append(window.update(x, ones, reset=True))
        world.barrier()
        results.append(window.update(x, ones))
        versions = window.versions
        assert set(versions.values()) <= {5}, versions
        call(window.publish, x)
        # The contents of `like`, four updates and this call.
        assert window.get() == dict.fromkeys(window.in_neighbours, 6)
        received = window.received()
        assert all((received[j] == drawn(j, dtype, kind)).all() for j in window.in_neighbours)
        assert type(results[0]) is type(x) and results[0].dtype == x.dtype
    with pytest.raises(JobError, match=naming("put", "Window", "closed")):
        window.put(x)
    return [np.array(result) for result in results]


@pytest.mark.parametrize(("n", "name"), some(
    [(1, "ring"), (2, "ring"), (3, "star"), (4, "exponential"), (6, "ring")], [(3, "star")]
))  # fmt: skip
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_each_call_has_its_formula(ranks, n, name, kind):
    matrix = graphs.graph(name, n).matrix(0)
    edges = (matrix != 0) & ~np.eye(n, dtype=bool)
    for dtype in DTYPES:
        results = ranks(n)(one_of_each, name, dtype, kind)
        x = np.stack([drawn(rank, dtype) for rank in range(n)])

        def mixed(weights, x=x):
            return np.einsum("ij,jab->iab", weights, x)

        first = edges + np.eye(n) if dtype[0] in "iu" else matrix
        factors = [first, np.eye(n) + 5 * edges, np.eye(n) + edges, np.eye(n)]
        for k, factor in enumerate(factors):
            expected = mixed(factor).astype(dtype)
            limit = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3}.get(dtype, 0)
            for rank in range(n):
                difference = results[rank][k].astype(float) - expected[rank].astype(float)
                assert np.abs(difference).max() <= limit, (dtype, k)


@with_world
def random_calls(world, *arguments):
    return random_operations(world, *arguments)


@pytest.mark.parametrize(
    ("n", "name", "count", "dtype"),
    [
        (3, "ring", 300, "int64"),
        (3, "ring", 300, "float64"),
        (4, "exponential", 200, "int64"),
        (4, "exponential", 200, "float64"),
        every(2, "ring", 500, "int64"),
        every(2, "one-peer-exponential", 500, "float64"),
        every(6, "ring", 500, "float64"),
        every(6, "one-peer-exponential", 500, "int64"),
    ],
)
def test_random_operations_lose_no_value_and_count_none_twice(ranks, n, name, count, dtype):
    """The lab makes 10,000 calls."""
    results = ranks(n)(random_calls, name, dtype, count, 257, timeout=60 + count / 10)
    assert find_errors(results) == []


def test_the_lab_notices_lost_doubled_and_torn_values():
    x = np.full(3, 4.0)
    good = [Result(x, x, 1.0, {0: 0, 1: 2}, {1: 3}, 0), Result(x, x, 1.0, {0: 3, 1: 0}, {0: 2}, 0)]
    assert find_errors(good) == []
    for change, word in [
        ({"end": x + 1}, "sum of the arrays"),
        ({"push_weight": 0.5}, "push-sum weights"),
        ({"versions": {1: 2}}, "2 arrived"),
        ({"versions": {1: 4}}, "4 arrived"),
        ({"torn": 1}, "half-written"),
    ]:
        (sentence,) = find_errors([good[0]._replace(**change), good[1]])
        assert word in sentence
    whole = [result._replace(begin=x.astype(int), end=x.astype(int)) for result in good]
    assert find_errors(whole) == []
    (sentence,) = find_errors([whole[0]._replace(end=whole[0].end + 1), whole[1]])
    assert "was 8 and is 9" in sentence


@with_world
def overwrites(world, seconds, wanted, width):
    """Put, publish and get rising numbers: errors, repeated reads, and reads of new numbers."""
    x = np.zeros(width, np.int64)
    errors = []
    new = 0
    with mpigossip.Window(world, "ring", like=x) as window:
        # Odd numbers are put and even ones published. A get may return an older number than a put.
        last = {(j, odd): (0, 0) for j in window.in_neighbours for odd in (0, 1)}
        until = time.monotonic() + seconds
        t = 0
        # A rank goes on until it has read new numbers, however slow the machine is.
        while world.agree(int(new <= 10 or (window.torn < wanted and time.monotonic() < until))):
            for _ in range(50):
                t += 1
                x[...] = t
                if t % 2:
                    window.put(x)
                else:
                    window.publish(x)
                    window.get()
                for j, value in window.received().items():
                    version = window.versions[j]
                    key = j, int(value[0]) % 2
                    before = last[key]
                    if (value != value[0]).any() or value[0] < before[0] or version < before[1]:
                        errors.append((t, j, value.min(), value.max(), version, before))
                    new += int(value[0] > before[0])
                    last[key] = int(value[0]), version
        return errors, window.torn, new


def test_values_are_read_as_a_whole_and_in_order(ranks):
    for errors, _, new in ranks(3)(overwrites, 3 * patience(), 3, 1 << 14, timeout=120):
        assert not errors and new > 10


@with_world
def time_varying(world):
    """Push-sum along one round of a directed graph after the other."""
    x = np.full(4, float(world.rank))
    graph = graphs.graph("one-peer-exponential", world.size)
    with mpigossip.Window(world, graph, like=x, push_sum=True) as window:
        with pytest.raises(JobError, match=naming("update", "rounds", "weights")):
            window.update(x)
        for t in range(8 * graph.period):
            sources, targets = window._neighbours("test", t)
            window.accumulate(x, dict.fromkeys(targets, 1 / 2), round=t)
            weights = {world.rank: 1 / 2, **dict.fromkeys(window.in_neighbours, 1)}
            x = window.update(x, weights, reset=True)
        window.flush()
        world.barrier()
        x = window.update(x, dict.fromkeys(weights, 1), reset=True)
        return x, window.push_weight, len(sources)


def test_push_sum_along_a_time_varying_graph(ranks):
    x, p, _ = zip(*ranks(4)(time_varying), strict=True)
    assert sum(p) == pytest.approx(4, rel=1e-14)
    np.testing.assert_allclose(sum(x), np.full(4, 6.0), rtol=1e-14)


def test_the_page_s_push_sum_runs_as_pasted(pooled, tmp_path):
    text = (REPO / "mpigossip/optim/README.md").read_text()
    block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "Window(" in b)
    (tmp_path / "push_sum.py").write_text(block)
    done = pooled(4, "push_sum.py")
    lines = re.findall(r"node \d: [\d.]+", done.stdout)  # ranks may share a line
    assert sorted(lines) == [f"node {i}: 1.500000" for i in range(4)], done


@with_world
def mistaken(world):
    x = np.zeros(4)
    messages, catch = catching(JobError)
    make = mpigossip.Window
    catch(make, world, "ring", like=[1.0])
    catch(make, world, "ring", like=np.zeros(4, bool))
    catch(make, world, "ring", like=torch.zeros(4, device="meta"))
    catch(make, world, "ring", like=x, push_sum=bool(world.rank))
    with make(world, "ring", like=x) as window:
        catch(window.put, np.zeros(5))
        catch(window.put, x, {world.rank: 1.0})
        catch(window.get, [7])
        catch(window.update, x, {9: 1.0})
        catch(window.update, x, out=np.broadcast_to(0.0, 4))
        catch(lambda: window.push_weight)
        assert window.received().keys() == {1 - world.rank}  # a rejected call changes nothing
    whole = make(world, "ring", like=np.zeros(4, int))
    catch(whole.update, np.zeros(4, int))
    catch(whole.accumulate, np.zeros(4, int), {1 - world.rank: 0.5})
    whole.close()
    whole.close()
    catch(whole.flush)
    return messages


def test_mistakes_raise_messages(ranks):
    expected = [
        "Window: the argument like is a list: must be a dense numpy array",
        "Window: the argument like is bool of shape (4,) (ndarray)",
        "Window: the argument like is torch.float32 of shape (4,) (Tensor, torch.strided on meta)",
        "rank 1 on {host}: push_sum is True here, but False on rank 0",
        "put: an array is float64 of shape (5,) (ndarray); this Window was made for numpy",
        "put: rank",
        "get: rank 7 is given, which the graph does not connect to this rank here",
        "update: rank 9 is given, which",
        "update: out is read-only or expanded",
        "push_weight: this Window has no push-sum weight; open it with push_sum=True",
        "update: the weight of rank",
        "accumulate: the weight of rank",
        "flush: this Window is closed; create a new one",
    ]
    for messages in ranks(2)(mistaken):
        for text, start in zip(messages, expected, strict=True):
            head, _, tail = start.partition("{host}")
            assert text.startswith(head) and tail in text, (text, start)


def test_wrong_weights_ranks_and_rounds_raise_messages():
    """A rejected call changes nothing."""
    x = np.ones(3)
    with pytest.raises(JobError, match=naming("Window", "NoneType", "mpigossip.world()")):
        mpigossip.Window(None, "ring", like=x)
    with SingleProcess() as world:
        with pytest.raises(JobError, match=naming("push_sum", "'no'", "True")):
            mpigossip.Window(world, "ring", like=x, push_sum="no")
        window = mpigossip.Window(world, "ring", like=x)
        for call in (window.put, window.accumulate, window.update, window.publish):
            with pytest.raises(JobError, match=naming(call.__name__, "NoneType", "float64")):
                call(None)
        for call in (window.put, window.accumulate, window.update):
            name = call.__name__
            for weights in ([0], 0.5):
                with pytest.raises(JobError, match=naming(name, type(weights).__name__, "ranks")):
                    call(x, weights)
            for t in (1.5, "0", True):
                with pytest.raises(JobError, match=naming(name, f"round = {t!r}", "whole number")):
                    call(x, round=t)
        for weight in (float("nan"), float("inf"), "2"):
            with pytest.raises(JobError, match=naming("update", "rank 0", "finite")):
                window.update(x, {0: weight})
        for ranks in (3, "01"):
            with pytest.raises(JobError, match=naming("get", f"ranks = {ranks!r}", "list")):
                window.get(ranks)
        assert window.get(iter([])) == {} and (window.update(x) == 1).all()
        integers = mpigossip.Window(world, "ring", like=np.ones(3, np.int64))
        result = integers.update(np.ones(3, np.int64), {0: 2**62 + 1})
        assert (result == 2**62 + 1).all()


@with_world
def read_by_iterator(world):
    """Return the ranks that a `get` from an iterator of ranks has read."""
    x = np.full(3, float(world.rank))
    with mpigossip.Window(world, "ring", like=x) as window:
        world.barrier()
        read = window.get(iter(window.in_neighbours))
        return sorted(read), [float(b[0]) for b in window.received().values()]


def test_ranks_of_an_iterator_are_read(ranks):
    assert ranks(2)(read_by_iterator) == [([1], [1.0]), ([0], [0.0])]


ENDING = """
import os, signal, sys, time
import numpy as np
import mpigossip

with mpigossip.world(timeout_s=5) as world:
    x = np.ones(1000)
    window = mpigossip.Window(world, "ring", like=x)
    for call in range(10**9):
        window.accumulate(x)
        window.update(x)
        if world.rank == 1 and call == 50:
            if sys.argv[1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the program is wrong")
"""


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_job_ends_in_time_after_one_of_its_ranks(tmp_path, how):
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    run = Launch(3, [sys.executable, str(script), how], REPO)
    try:
        result = run.finish(60)
    finally:
        run.close()
    assert result.returncode != 0
    assert ("Traceback" in result.stderr) == (how == "raise"), result.stderr
    if how == "raise":
        assert "rank 1" in result.stderr
        assert "ValueError: the program is wrong" in result.stderr


def test_one_process_needs_no_mpi():
    with SingleProcess() as world, mpigossip.Window(world, "ring", like=np.ones(3)) as window:
        window.put(np.ones(3))
        assert window.get() == {} and window.received() == {} and window.versions == {}
        assert (window.update(np.full(3, 2.0)) == 2).all()
