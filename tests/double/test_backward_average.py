"""Gradients that are averaged during the backward pass have the bits of those averaged after it."""

import math

import pytest
import torch
from torch import nn

from mpigossip.cluster.world import SingleProcess
from tests.cases import every, with_world
from tests.double import active
from tests.double.devices import METHODS_OF_BUCKETS as METHODS
from tests.double.devices import STEPS, settings_of, trained

pytestmark = pytest.mark.skipif(not active(), reason="needs the double: python -m tests.double")
SMALL = ["node.cuda_graphs=never", "node.bucket_mb=0.004", "log.consensus_every=3"]
"""Settings with several buckets of the model "mlp", which has 39 kB."""


class Noted:
    """Numbers of averages that were started in each backward pass, and after it."""

    def __init__(self):
        from mpigossip.groups.nccl_inside_node import TorchGroup

        self.during = []
        self.after = []
        self._owner = TorchGroup
        self._start = TorchGroup.start_mean
        self._backward = torch.Tensor.backward
        self._inside = False

    def __enter__(self):
        def start(group, full, columns):
            (self.during if self._inside else self.after).append(columns)
            self._start(group, full, columns)

        def backward(loss, *arguments, **options):
            self._inside = True
            try:
                self._backward(loss, *arguments, **options)
            finally:
                self._inside = False

        self._owner.start_mean = start
        torch.Tensor.backward = backward
        return self

    def __exit__(self, *_):
        self._owner.start_mean = self._start
        torch.Tensor.backward = self._backward


def on_nodes(world, names, more):
    """Train on nodes whose ranks have a GPU each; return parameters, and starts of averages."""
    results = []
    nodes = world.size // world.nodes.per_node
    for name in names:
        settings = [*settings_of(name), *more]
        with Noted() as noted:
            full = trained(world, nodes, "mlp", f"cuda:{world.rank}", settings)
        results.append((full.numpy(), len(noted.during), len(noted.after)))
    return results


@with_world(per=2)
def two_slots(world, names, more):
    return on_nodes(world, names, more)


@with_world(per="host")
def all_slots(world, names, more):
    return on_nodes(world, names, more)


def check(ranks, nodes, slots, names, more):
    """Compare each rank with the simulator; return the starts of averages of the first rank."""
    function = all_slots if nodes == 1 else two_slots
    got = ranks(nodes * slots)(function, names, more, timeout=300)
    starts = []
    for index, name in enumerate(names):
        settings = [s for s in [*settings_of(name), *more] if "bucket_mb" not in s]
        reference = trained(SingleProcess(), nodes, "mlp", f"cpu:{slots}", settings)
        for rank, results in enumerate(got):
            full, *counts = results[index]
            assert torch.equal(torch.from_numpy(full)[0], reference[rank // slots]), (name, rank)
        starts.append(tuple(counts))
    return starts


def test_ranks_with_a_gpu_each_have_the_simulators_bits(ranks):
    for during, after in check(ranks, 2, 2, METHODS, SMALL):
        # Opening the connections starts an average for each slot.
        assert during > 5 * STEPS and after == 2


@pytest.mark.parametrize("slots", [4, every(8)])
def test_nodes_of_many_slots_have_the_simulators_bits(ranks, slots):
    ((during, after),) = check(ranks, 1, slots, ["dmsgd"], SMALL)
    assert during > STEPS and after == slots


def odd_model(shape, classes):
    """Return a model with parameters that are shared, frozen, never used, and used at times.

    Its layer "at_times" is used in every second forward pass of training.
    """
    return Odd(math.prod(shape), classes)


class Odd(nn.Module):
    def __init__(self, width, classes):
        super().__init__()
        self.empty = torch.nn.Parameter(torch.zeros(0))  # no bucket contains it
        self.first = nn.Linear(width, 64)
        self.never = nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)
        self.again = nn.Linear(64, 64)
        self.again.weight = self.shared.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.at_times = nn.Linear(64, 64)
        self.late = nn.Linear(64, 64)
        self.last = nn.Linear(64, classes)
        self.passes = 0

    def forward(self, images):
        x = self.shared(self.first(images.flatten(1)).relu()).relu()
        x = self.frozen(self.again(x)).relu()
        if self.training:
            self.passes += 1
            x = self.at_times(x) if self.passes % 2 else x
        return self.last(self.late(Failing.apply(x)).relu())


class Failing(torch.autograd.Function):
    """Identity whose backward pass fails if it is told to."""

    fails = False

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        if Failing.fails:
            raise OSError("a backward pass was told to fail")
        return gradient


ODD = "tests.double.test_backward_average:odd_model"


@with_world(per=2)
def train_odd(world, more):
    with Noted() as noted:
        full = trained(world, world.size // 2, ODD, f"cuda:{world.rank}", more)
    return full.numpy(), len(noted.during), len(noted.after)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_shared_frozen_and_unused_parameters_have_the_simulators_bits(ranks, accumulate):
    more = ["algorithm.name=dmsgd", f"algorithm.accumulate={accumulate}"]
    reference = trained(SingleProcess(), 1, ODD, "cpu:2", more)
    for full, during, after in ranks(2)(train_odd, [*more, *SMALL], timeout=300):
        assert torch.equal(torch.from_numpy(full), reference)
        assert during > 0 and after > 2


@pytest.mark.parametrize("sums", ["slots", "nccl"])
def test_both_orders_of_a_sum_have_the_bits_of_two_slots(ranks, sums):
    """A sum of two terms does not depend on their order."""
    more = [f"node.sums={sums}", "algorithm.weight_decay=0.01"]
    check(ranks, 1, 2, ["dmsgd"], [*SMALL, *more])


@with_world(per=2)
def fail_in_backward(world):
    """Let a backward pass fail on both ranks; return the error, and seconds until all is closed."""
    import time

    from mpigossip.training import assemble
    from tests.double.devices import job

    assembly = assemble.assemble(job(ODD, f"cuda:{world.rank}", *SMALL), world, 1)
    trainer = assembly.trainer
    trainer.step()
    message = ""
    Failing.fails = True
    try:
        trainer.step()
    except OSError as error:
        message = str(error)
    finally:
        Failing.fails = False
    failed = assembly.engine.group._failed
    began = time.perf_counter()
    assembly.close()
    return message, failed, time.perf_counter() - began


def test_an_error_in_a_backward_pass_is_raised_and_the_group_is_closed_without_a_wait(ranks):
    for message, failed, seconds in ranks(2)(fail_in_backward, timeout=120):
        assert message == "a backward pass was told to fail" and failed
        assert seconds < 20


@with_world(per=2)
def one_late_rank(world, limit_s, late_s):
    """Start an average before rank 1 does; return the seconds until both ranks have arrived.

    :param limit_s: time limit of the watchdog; the node's barrier has a longer one
    :param late_s: seconds by which rank 1 is late
    """
    import time

    from mpigossip.groups.devices import make_group
    from tests.double.cuda import current_stream

    device = f"cuda:{world.rank}"
    group = make_group((device,), 1, True, 60, world)

    def follow(k, work):
        """Let the stream wait, but not the host, unlike the double."""
        group._works.append((device, work))
        current_stream().line.follow(work._clock)

    full = group.zeros(1, 1024)
    group.reserve(1, 1024)
    group._wait = follow
    group._watchdog.timeout_s = limit_s
    world.barrier()
    began = time.monotonic()
    time.sleep(late_s * world.rank)
    group.start_mean(full, slice(0, 1024))
    group.finish_means(full)
    seconds = time.monotonic() - began
    group._watchdog.timeout_s = 60
    group.close()
    return seconds


def test_averages_that_have_begun_wait_for_a_late_rank_as_long_as_the_barrier(ranks):
    assert min(ranks(2)(one_late_rank, 2, 5, timeout=120)) >= 5


@with_world(per=2)
def count_waits(world, bucket_mb):
    """Return the waits of a step, and the buckets for which a forward pass waited."""
    from mpigossip.groups.nccl_inside_node import TorchGroup
    from mpigossip.training import assemble
    from tests.double.devices import job
    from tests.double.waits import counted

    settings = ["node.cuda_graphs=never", f"node.bucket_mb={bucket_mb}", "algorithm.name=dmsgd"]
    waited = []
    finish = TorchGroup.finish_gather
    assembly = assemble.assemble(job("mlp", f"cuda:{world.rank}", *settings), world, 1)
    assembly.trainer.step()
    TorchGroup.finish_gather = lambda group, works: (
        waited.append(len(works)) or finish(group, works)
    )
    try:
        with counted() as waits:
            assembly.trainer.step()
    finally:
        TorchGroup.finish_gather = finish
    in_flight = len(assembly.trainer.replicas._gathering._in_flight) if bucket_mb else 0
    assembly.close()
    return dict(waits), len(waited), in_flight


def test_the_host_waits_as_often_as_without_buckets(ranks):
    (expected, *none), _ = ranks(2)(count_waits, 0, timeout=120)
    assert none == [0, 0]
    for waits, waited, in_flight in ranks(2)(count_waits, 0.004, timeout=120):
        assert waits == expected
        assert waited == in_flight > 5


def test_buckets_cover_the_parameters_in_the_order_of_the_module():
    from mpigossip.engine.buckets import make_parameter_buckets
    from mpigossip.engine.vector import flatten

    model = nn.Sequential(nn.Linear(100, 80), nn.LayerNorm(80), nn.Linear(80, 90))
    layout = flatten(model, 2, ["0.weight", "2.weight"])
    buckets = make_parameter_buckets(model, layout, 8192)
    ranges = sorted((bucket.columns.start, bucket.columns.stop) for bucket in buckets)
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.size
    assert all(end == begin for (_, end), (begin, _) in zip(ranges, ranges[1:], strict=False))
    assert all((end - begin) % 1024 == 0 and end - begin <= 2048 for begin, end in ranges)
    assert "0.weight" in buckets[0].names and "2.weight" in buckets[-1].names
    without_decay = [index for index, b in enumerate(buckets) if "1.weight" in b.names]
    assert without_decay == [buckets.index(b) for b in buckets if "0.bias" in b.names]
    assert max(without_decay) < len(buckets) - 3
