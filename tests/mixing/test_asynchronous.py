"""Asynchronous gossip keeps the mean, uses no torn copy, and repeats delays from a table."""

import json
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind, MessageLayout
from mpigossip.mixing.delayed import OLDEST, Delayed, Faults, table
from mpigossip.runs import start_and_resume
from mpigossip.runs.hooks import Hook
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.battery import Driver
from tests.cases import every, naming, on_each, with_world

pytestmark = pytest.mark.both


GRAPHS = ("one-peer-exponential", "exponential", "ring", "base-2", "random-matching", "complete")
LAYOUT = MessageLayout(widths=(64, 64), vectors=2, scalars=1, dtype=torch.float64)


def start(mixer, seed=0):
    draw = np.random.default_rng(seed)
    return [
        tuple(torch.from_numpy(draw.standard_normal(tuple(part.shape))) for part in segment)
        for segment in mixer.outbox(0)
    ]


def exchange(mixer, x, kind, t):
    for out, values in zip(mixer.outbox(t), x, strict=True):
        for into, value in zip(out, values, strict=True):
            into.copy_(value)
    mixer.start(kind, t)
    _, mixed = mixer.finish()
    return [tuple(part.clone() for part in segment) for segment in mixed]


def total(mixer, x):
    """Return the sum of all nodes' models and of the corrections in flight."""
    pairs = zip(x, mixer.pending(), strict=True)
    return torch.cat([a.sum(0) + b[0] for s, p in pairs for a, b in zip(s, p, strict=True)])


@on_each("name", GRAPHS)
@on_each("n", [1, 2, 3, 6, 8])
def test_without_delays_models_are_multiplied_by_the_symmetric_part(name, n):
    made = graph(name, n)
    mixer = Delayed(made, LAYOUT, Faults(n).ages)
    x = start(mixer)
    for t in range(5):
        matrix = torch.from_numpy(made.matrix(t) + made.matrix(t).T) / 2
        wanted = [tuple(matrix @ part for part in segment) for segment in x]
        x = exchange(mixer, x, ExchangeKind.GOSSIP, t)
        assert not np.nan_to_num(mixer.staleness).any()
        for segment, expected in zip(x, wanted, strict=True):
            for part, product in zip(segment, expected, strict=True):
                assert torch.allclose(part, product, atol=1e-14)


@on_each("name", GRAPHS)
@on_each("n", [2, 6])
def test_any_delay_table_keeps_the_mean_and_reaches_it(name, n):
    draw = np.random.default_rng(n)
    ages = table(draw.integers(-1, 6, size=(7, n, n)))
    mixer = Delayed(graph(name, n), LAYOUT, ages)
    x = start(mixer)
    before = total(mixer, x)
    mean = [s[0].mean(0) for s in x]
    kinds = random.Random(1)
    for t in range(400):
        x = exchange(mixer, x, kinds.choice([ExchangeKind.GOSSIP] * 9 + [ExchangeKind.LOCAL]), t)
        assert torch.allclose(total(mixer, x), before, atol=1e-12)
    for segment, target in zip(x, mean, strict=True):
        assert torch.allclose(segment[0], target.expand_as(segment[0]), atol=1e-4)


def test_a_global_round_includes_corrections_in_flight():
    ages = np.random.default_rng(0).integers(0, 4, size=(4, 5, 5))
    mixer = Delayed(graph("ring", 5), LAYOUT, table(ages))
    x = start(mixer)
    before = total(mixer, x)
    for t in range(4):
        x = exchange(mixer, x, ExchangeKind.GOSSIP, t)
    assert not torch.allclose(torch.cat([p.sum(0) for s in x for p in s]), before)
    x = exchange(mixer, x, ExchangeKind.GLOBAL, 4)
    assert torch.allclose(torch.cat([5 * p[2] for s in x for p in s]), before, atol=1e-12)
    x = exchange(mixer, x, ExchangeKind.GOSSIP, 4)
    assert torch.allclose(total(mixer, x), before, atol=1e-12)


def test_slow_nodes_and_lost_links_come_from_the_seed():
    ill = Faults(8, seed=3, times=4.0, slow=1, steps=5, lost=0.1, meet=20)
    again = Faults(8, seed=3, times=4.0, slow=1, steps=5, lost=0.1, meet=20)
    other = Faults(8, seed=4, times=4.0, slow=1, steps=5, lost=0.1, meet=20)
    ages = np.stack([ill.ages(t) for t in range(60)])
    assert (ages == np.stack([again.ages(t) for t in range(60)])).all()
    assert (ages != np.stack([other.ages(t) for t in range(60)])).any()
    assert all(sorted(ill.costs(t)) == [1.0] * 7 + [4.0] for t in range(60))
    assert 0.07 < (ages == -1).mean() < 0.13 and ages.max() <= OLDEST
    slow = Faults(4, times=4.0, steps=10, meet=10)
    late = int(np.argmax(slow.costs(0)))
    fast = (late + 1) % 4
    # at its round 9 a fast node has seen two rounds of one that is four times slower
    assert slow.ages(9)[fast, late] == 8 and slow.ages(9)[late, fast] == 0
    assert slow.ages(10)[fast].max() <= 4  # all met, then somebody is slow again
    assert not Faults(4).ages(7).any()


@on_each("name", ["dsgt", "momentum-tracking", "dsgd", "dmsgd", "qg-dmsgd"])
@on_each("n", [3, 6])
def test_methods_go_on_well_with_old_copies(name, n):
    """Quadratics of unlike nodes: tracking, which rests on sums, still ends at the optimum."""
    torch.set_num_threads(1)
    ill = Faults(n, times=4.0, steps=5, lost=0.05)
    driver = Driver(
        f"algorithm.name={name}", n, lambda g, layout: Delayed(g, layout, ill.ages), lr=0.05
    )
    x = driver.run(300).whole().double()
    best = driver.optimum().double()
    off = float((x - best).norm() / (n**0.5 * best.norm()))
    assert off < (1e-2 if "tracking" in name or name == "dsgt" else 2.5)
    begin = Driver(f"algorithm.name={name}", n).whole().double()
    assert (x.mean(0) - best).norm() < 0.5 * (begin.mean(0) - best).norm()


# -- ranks -----------------------------------------------------------------------------------------


@with_world
def rounds_under_delays(world, count, width, checked=True):
    """Run random rounds, each published in two halves: (torn copies used, torn, skipped, …).

    Run ``count`` rounds, and up to 20 times more until some rank has seen a torn copy.
    """
    from mpigossip.mixing.asynchronous import Asynchronous

    draw = random.Random(world.rank)
    mixer = Asynchronous(graph("one-peer-exponential", world.size), MessageLayout((width,)), world)
    if not checked:
        mixer._is_complete = lambda done, begun: done > 0
    used = 0
    x = torch.full((1, width), float(world.rank))
    stale: list[float] = []
    for t in range(20 * count):
        if t and t % count == 0 and world.agree(int(bool(mixer.torn or used))):
            break
        ((out,),) = mixer.outbox(t)
        out[:, : width // 2] = x[:, : width // 2]
        if draw.random() < 0.1:
            time.sleep(draw.random() * 2e-4)
        # write the other half a little later: a read in between gives a torn copy
        out[:, width // 2 :] = x[:, width // 2 :]
        mixer.start(ExchangeKind.GOSSIP, t)
        _, ((mixed,),) = mixer.finish()
        used += int(mixed.min() != mixed.max())
        x.fill_(float(mixed[0, 0]) + draw.choice((-1, 1)))
        stale.append(mixer.staleness[0])
    result = used, mixer.torn, mixer.skipped, float(np.nanmax(np.abs(stale)))
    mixer.close()
    return result


@pytest.mark.parametrize(("n", "count"), [(3, 400), every(2, 2000), every(3, 1300)])
def test_no_torn_copy_is_used(ranks, n, count):
    results = ranks(n)(rounds_under_delays, count, 4096, timeout=120)
    assert not sum(used for used, *_ in results), results
    assert sum(torn for _, torn, *_ in results) > 0, "no model was read while it was written"


@pytest.mark.every
def test_without_the_second_counter_torn_copies_are_used(ranks):
    results = ranks(2)(rounds_under_delays, 1500, 4096, False, timeout=120)
    assert sum(used for used, *_ in results) > 0, results


@with_world
def reads_while_it_is_written(world, width, wanted, seconds):
    """Let rank 0 read a model that rank 1 writes: pairs (torn content, complete by its counters).

    All elements of the model of round t are t. Rank 0 ends the writing when it has seen both a
    torn and a complete copy ``wanted`` times.
    """
    from mpigossip.mixing.asynchronous import ROUND, Asynchronous

    comm = world.comm
    stop = 77
    reads = []
    mixer = Asynchronous(graph("ring", 2), MessageLayout((width,)), world)
    if world.rank == 1:
        t = 0
        while not comm.iprobe(source=0, tag=stop):
            ((out,),) = mixer.outbox(t)
            out[:, : width // 2] = t
            time.sleep(0)
            out[:, width // 2 :] = t
            mixer.start(ExchangeKind.LOCAL, t)
            mixer.finish()
            # A pause in which a copy can be read completely, also a large one on a busy machine.
            time.sleep(0.02 if t % 8 == 7 else 0)
            t += 1
        comm.recv(source=0, tag=stop)
    else:
        copy = mixer._copies[0]
        until = time.monotonic() + seconds
        model = copy.memory[mixer._map.head - 8 * ROUND :][: 4 * width].view(torch.float32)
        while time.monotonic() < until:
            mixer._read(copy, 1)
            if copy.head[0] >= 0:
                torn = not (model == float(copy.head[0])).all().item()
                reads.append((torn, copy.complete))
            if (
                min(sum(torn for torn, _ in reads), sum(complete for _, complete in reads))
                >= wanted
            ):
                break
        comm.send(None, dest=1, tag=stop)
    mixer.close()
    return reads


@pytest.mark.parametrize(("width", "wanted"), [every(2, 20), every(1 << 20, 5), (4096, 20)])
def test_a_copy_torn_by_its_content_is_torn_by_its_counters(ranks, width, wanted):
    """Without the check of the counters, these torn copies would have been used."""
    reads, _ = ranks(2)(reads_while_it_is_written, width, wanted, 20, timeout=90)
    assert sum(torn for torn, _ in reads) > 0, "no copy was torn"
    assert sum(complete for _, complete in reads) > 0, "no copy was complete"
    assert not [1 for torn, complete in reads if torn and complete]


class Spied:
    """A window that records the name and byte range of each call."""

    def __init__(self, window):
        self.window = window
        self.calls = []

    def __getattr__(self, name):
        method = getattr(self.window, name)

        def call(*args):
            if name in ("Get", "Put", "Accumulate"):
                target = args[2]
                item = 1 if name in ("Get", "Put") else 8
                self.calls.append((name, target[0], target[0] + item * target[1]))
            if name == "Fetch_and_op":
                self.calls.append((name, args[3], args[3] + 8))
            return method(*args)

        return call


@with_world
def accesses(world, rounds):
    """Return the accesses to windows, and the byte ranges of counters and sequence numbers."""
    from mpigossip.mixing.asynchronous import ROUND, Asynchronous

    mixer = Asynchronous(graph("ring", world.size), LAYOUT, world)
    mixer._window = spied = Spied(mixer._window)
    x = start(mixer, world.rank)
    for t in range(rounds):
        x = exchange(mixer, x, ExchangeKind.GOSSIP, t)
        world.barrier()
    window_map = mixer._map
    mixer.close()
    return spied.calls, [(0, 8 * ROUND), (window_map.sequence_numbers, window_map.buffers)]


def test_counters_and_sequence_numbers_are_accessed_atomically(ranks):
    for calls, words in ranks(3)(accesses, 4):
        for begin, end in words:
            names = {name for name, first, last in calls if first < end and last > begin}
            assert names == {"Accumulate", "Fetch_and_op"}, names
            assert all(last - first == 8 for name, first, last in calls if name in names)


@with_world
def mean_under_delays(world, name, count):
    from mpigossip.mixing.asynchronous import Asynchronous

    draw = random.Random(world.rank)
    layout = MessageLayout((512, 512), vectors=1, scalars=1)
    mixer = Asynchronous(graph(name, world.size), layout, world, timeout_s=60)
    x = [
        tuple(part.float() if part.shape[1] > 1 else part for part in s)
        for s in start(mixer, world.rank)
    ]
    begin = [tuple(part.clone() for part in s) for s in x]
    for t in range(count):
        if t % 10 == 0:
            world.barrier()  # on few cores, one rank could end before another one begins
        kind = (
            ExchangeKind.GLOBAL
            if t % 40 == 39
            else ExchangeKind.LOCAL
            if t % 7 == 6
            else ExchangeKind.GOSSIP
        )
        x = exchange(mixer, x, kind, t)
        time.sleep(draw.random() * 2e-4 * (draw.random() < 0.3))
    pending = mixer.pending()
    sums = [
        torch.cat([part[0].double() for segment in what for part in segment]).numpy()
        for what in (begin, x, pending)
    ]
    sent = mixer.bytes_sent[0]
    mixer.close()
    return (*sums, sent)


@pytest.mark.parametrize(
    "n, name",
    [
        *((3, "ring"), every(1, "ring"), every(6, "random-matching")),
        *((4, "one-peer-exponential"), every(3, "random-matching")),
    ],
)
def test_the_mean_stays_on_ranks_under_random_delays(ranks, n, name):
    begin, end, pending, sent = zip(*ranks(n)(mean_under_delays, name, 110), strict=True)
    assert np.allclose(sum(begin), sum(end) + sum(pending), atol=2e-5)
    mean = sum(begin) / n
    distances = [np.abs(model - mean).max() for model in end]
    assert max(distances) < 0.5 * max(np.abs(model - mean).max() for model in begin) or n == 1
    assert all(count > 0 for count in sent) or n == 1


@with_world
def one_waits(world, algorithm):
    """Let rank 0 exchange 30 times while others wait; return the models before and after."""
    from mpigossip.runs.node import wait_for_nodes

    job = assemble.load(JOB, f"algorithm.name={algorithm}".split())
    assembly = assemble.assemble(job, world, world.size)
    trainer = assembly.trainer
    x = trainer.replicas.x[0]
    x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(world.rank)))
    before = x[0].numpy().copy()
    rounds = 0
    until = time.monotonic() + 20
    while world.rank == 0 and rounds - trainer.mixer.skipped < 30 and time.monotonic() < until:
        trainer.average()
        rounds += 1
        time.sleep(1e-3)
    group = trainer.engine.group
    waiting = SimpleNamespace(mixer=trainer.mixer, group=group, average=trainer.average)
    wait_for_nodes(waiting, world)
    pending = trainer.mixer.pending()[0][0][0].numpy()
    behind = x[0].numpy().copy()
    index = trainer.engine.index
    assembly.close()
    return before, behind, pending, index


@pytest.mark.parametrize("algorithm", ["dsgd", "dsgt", "gasloc algorithm.outer_lr=1"])
def test_a_waiting_node_continues_averaging(ranks, algorithm):
    before, behind, pending, index = zip(*ranks(2)(one_waits, algorithm), strict=True)
    assert np.allclose(sum(before), sum(behind) + sum(pending), atol=1e-4)
    distance = np.linalg.norm(behind[0] - behind[1]) / np.linalg.norm(before[0] - before[1])
    assert distance < 0.05, "one answered exchange would leave half of the distance"
    assert index == (0, 0)


# -- jobs ------------------------------------------------------------------------------------------


class Late(Hook):
    """Rank 1 sleeps in its third step, before the log is written."""

    def __init__(self, world):
        self.world = world

    def step(self, progress, record):
        if self.world.rank == 1 and record.index == 2:
            time.sleep(2.5)


@with_world
def exchanges_while_waiting(world, folder):
    """Return the number of exchanges of this rank without a step, in a job."""
    from mpigossip.training.loop import Trainer

    settings = [f"run.output={folder}", "log.flush_steps=4", "run.steps=6"]
    job = assemble.load(JOB, [*settings, f'log.hooks=["{__name__}:Late"]'])
    average = Trainer.average
    count = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "average", lambda self: count.append(average(self)))
        start_and_resume.train(job, world)
    return len(count)


def test_a_node_that_waits_for_the_log_continues_exchanging(ranks, tmp_path):
    first, _ = ranks(2)(exchanges_while_waiting, tmp_path)
    assert first > 10
    assert read(tmp_path / "log.h5").steps["step"].tolist() == list(range(6))


JOB = {
    "run": {"steps": 40, "evaluate_every": 0},
    "data": {"source": "digits", "batch": 8, "workers": 0},
    "model": {"name": "mlp"},
    "schedule": {"lr": 0.2, "name": "constant"},
    "node": {"mixer": "asynchronous"},
    "log": {"flush_steps": 20},
}


def train(job, tmp_path, name, n=4):
    loaded = assemble.load(job, [f"run.output={tmp_path / name}"])
    with SingleProcess() as world:
        return start_and_resume.train(loaded, world, n)


def test_a_simulated_run_repeats_itself_and_logs_staleness(tmp_path):
    ill = JOB | {"faults": {"slow_times": 4.0, "lost": 0.05}}
    one, two = (train(ill, tmp_path, name) for name in ("one", "two"))
    assert one["digest"] == two["digest"] != train(JOB, tmp_path, "well")["digest"]
    staleness = read(tmp_path / "one" / "log.h5").steps["staleness"]
    assert staleness.shape == (40, 4) and np.nanmax(staleness) > 1
    assert one["accuracy"] > 0.7


@with_world
def trained_on_ranks(world, folder):
    start_and_resume.train(assemble.load(JOB, [f"run.output={folder}"]), world)


def test_a_run_on_ranks_logs_staleness(ranks, tmp_path):
    ranks(3)(trained_on_ranks, tmp_path / "run")
    log = read(tmp_path / "run" / "log.h5")
    assert log.steps["staleness"].shape == (40, 3)
    # the number of complete copies depends on the machine, but each node has seen some
    assert np.isfinite(log.steps["staleness"]).any(axis=0).all()
    assert log.summary["accuracy"] > 0.5, json.dumps(log.summary)


@on_each(
    ("settings", "message"),
    [
        ("algorithm.name=d2", '"d2" needs the models'),
        ("algorithm.name=parallel", "one of dsgd, dmsgd"),
        ("node.wire=bf16", 'node.wire = "bf16": an asynchronous run'),
        ("node.devices=cuda:0", 'node.devices = "cuda:0": '),
        ("node.exchange=nccl", 'node.mixer = "asynchronous": NCCL'),
        ("node.exchange=nccl run.survive=true", "run.survive = true: NCCL"),
        ("node.mixer=synchronous faults.slow_times=3", "faults.slow_times = 3"),
    ],
)
def test_settings_that_asynchronous_nodes_do_not_support_are_rejected(settings, message):
    job = assemble.load(JOB, settings.split())
    assert any(message in problem for problem in assemble.mistakes(job, 4)), assemble.mistakes(
        job, 4
    )


def test_invalid_faults_are_rejected():
    with pytest.raises(JobError, match=naming("faults.lost")):
        assemble.load({"faults": {"lost": 1.0}})


def test_the_dry_run_counts_copies_and_corrections():
    from mpigossip.training.costs import exchanges, subject

    waiting, free = (
        exchanges(subject(assemble.load(JOB, [f"node.mixer={mixer}"]))[0], 4)
        for mixer in ("synchronous", "asynchronous")
    )
    assert free.bytes_per_step == 2 * waiting.bytes_per_step > 0


def test_ranks_reject_faults_of_the_simulator():
    world = SingleProcess()
    world.comm = object()
    with pytest.raises(JobError, match=naming("faults", "`mpigossip simulate`")):
        assemble.assemble(assemble.load(JOB, ["faults.lost=0.1"]), world, 2)


@with_world
def stores_during_corrections(world):
    """Return for each store of a counter whether the progress thread still sent corrections."""
    from mpigossip.mixing.asynchronous import Asynchronous

    layout = MessageLayout(widths=(64,))
    mixer = Asynchronous(graph("ring", world.size), layout, world, timeout_s=20)
    sending = threading.Event()
    send = mixer._send_corrections
    store = mixer._store
    overlaps = []

    def slow_send(corrections):
        sending.set()
        time.sleep(0.1)
        send(corrections)
        sending.clear()

    def observed_store(word, value):
        overlaps.append(sending.is_set())
        store(word, value)

    mixer._send_corrections = slow_send
    mixer._store = observed_store
    x = [(torch.full((1, 64), float(world.rank)),)]
    for t in range(3):
        exchange(mixer, x, ExchangeKind.GOSSIP, t)
        sending.wait(0.05)
        world.barrier()
    sent_count = int(mixer._sent_counts.sum())
    mixer.close()
    return sent_count > 0, overlaps


def test_counters_are_not_stored_while_corrections_are_sent(ranks):
    for any_sent, overlaps in ranks(2)(stores_during_corrections):
        assert any_sent and not any(overlaps)
