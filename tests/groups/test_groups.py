"""The contract of a group, the same for one slot, threads and NCCL; devices by their names."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mpigossip.cluster.process import libraries
from mpigossip.groups import devices, nccl
from mpigossip.groups.base import GroupError, Single, Whole, shards
from mpigossip.groups.nccl_watchdog import Watchdog
from mpigossip.groups.threads import Threads
from mpigossip.mixing.combine import combine
from tests.cases import on_each, some

GPUS = torch.cuda.device_count()


def nccl_or_skip(slots):
    reason = nccl.missing() if slots > 1 else "NCCL joins two GPUs or more"
    if reason is None and slots > GPUS:
        reason = f"{slots} slots by NCCL need {slots} GPUs, torch sees {GPUS}"
    if reason:
        pytest.skip(reason)
    return nccl.Nccl([f"cuda:{k}" for k in range(slots)])


MAKERS = {
    "single": lambda slots: Single() if slots == 1 else pytest.skip("one slot is all it has"),
    "threads": Threads,
    "threads-on-a-gpu": lambda slots: (
        Threads(slots, devices=["cuda:0"] * slots) if GPUS else pytest.skip("torch sees no GPU")
    ),
    "whole": lambda slots: Whole(Threads(slots)),
    "nccl": nccl_or_skip,
}


ON_GPUS = ("threads-on-a-gpu", "nccl")
SLOTS = pytest.mark.parametrize("slots", some(range(1, 9), [1, 2, 3, 8]))


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.gpu] * (name in ON_GPUS)) for name in MAKERS]
)
def make(request):
    """A function of the number of slots; what it makes is closed after the test."""
    made = []

    def one(slots):
        made.append(MAKERS[request.param](slots))
        return made[-1]

    one.exact = request.param != "nccl"  # NCCL sums in an order of its own
    yield one
    for group in made:
        group.close()


def arrays(group, rows, size, seed=0):
    """The same numbers on every device, and a copy on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    given = [torch.randn(rows, size, generator=draw) for _ in range(group.slots)]
    return [g.to(d, copy=True) for g, d in zip(given, group.devices, strict=True)], given


def same(found, expected, exact):
    found = found.cpu()
    if exact:
        return torch.equal(found, expected)
    return torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@SLOTS
@on_each("rows, shard", [(1, 1), (3, 7), (1, 512), (3, 33_333)])
def test_shards_hold_the_mean_summed_in_slot_order(make, slots, rows, shard):
    group = make(slots)
    full, given = arrays(group, rows, slots * shard)
    mean = combine([1 / slots] * slots, given, torch.empty_like(given[0]))
    found = group.reduce_scatter_mean(full)
    assert len(found) == group.segments
    for index, part in enumerate(found):
        assert part.device == torch.device(group.devices[index])
        assert same(part, mean.chunk(group.segments, dim=1)[index], make.exact)


@SLOTS
@on_each("shard", [1, 7, 512])
def test_gathering_gives_every_slot_all_shards(make, slots, shard):
    group = make(slots)
    full, given = arrays(group, 2, slots * shard)
    whole = torch.cat(shards(given, group.segments), dim=1)
    group.all_gather(shards(full, group.segments), full)
    for array in full:
        assert torch.equal(array.cpu(), whole)
    # shards that are no views of the vectors
    apart = [array.clone() for array in shards(full, group.segments)]
    for array in full:
        array.zero_()
    group.all_gather(apart, full)
    for array in full:
        assert torch.equal(array.cpu(), whole)


@SLOTS
@on_each("size", [1, 2, 5, 1000, 70_001])
def test_the_whole_mean_and_its_broadcast_take_any_size(make, slots, size):
    """Sizes that L doesn't divide, and fewer columns than slots."""
    group = make(slots)
    full, given = arrays(group, 2, size)
    mean = combine([1 / slots] * slots, given, torch.empty_like(given[0]))
    assert same(group.reduce_mean(full), mean, make.exact)
    first = full[0].cpu()
    group.broadcast(full)
    for array in full:
        assert torch.equal(array.cpu(), first)


@SLOTS
def test_a_padded_vector_comes_back_without_its_padding(make, slots):
    """What training does: 1,003 parameters padded so that L shards are whole buckets."""
    group = make(slots)
    size = -(-1003 // (512 * slots)) * 512 * slots
    full, given = arrays(group, 1, size)
    for array in full:
        array[:, 1003:] = 0
    mean = combine([1 / slots] * slots, given, torch.empty_like(given[0]))
    group.all_gather(group.reduce_scatter_mean(full), full)
    for array in full:
        assert same(array[:, :1003], mean[:, :1003], make.exact)
        assert not array[:, 1003:].any()


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_scalars_are_summed_in_slot_order(make, slots):
    group = make(slots)
    terms = [torch.tensor([[10.0 ** (17 - slot)]], dtype=torch.float64) for slot in range(slots)]
    expected = terms[0].clone()
    for term in terms[1:]:
        expected += term
    assert torch.equal(group.sum_scalars(terms), expected)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_work_runs_once_a_slot_and_all_at_once(make, slots):
    group = make(slots)
    meeting = threading.Barrier(slots)  # passes only when all are there at the same time

    def work(slot):
        meeting.wait(20)
        return slot * slot

    assert group.run(work) == [slot * slot for slot in range(slots)]
    assert len(group.on_shards(lambda index: index)) == group.segments


@pytest.mark.parametrize("slots", [2, 4])
def test_a_failure_names_its_slot_and_the_group_goes_on(slots):
    group = Threads(slots)
    ended = []

    def work(slot):
        if slot == slots - 1:
            raise ValueError("a bad sample")
        time.sleep(0.05)
        ended.append(slot)

    with pytest.raises(ValueError, match="a bad sample") as caught:
        group.run(work)
    assert f"in slot {slots - 1}" in caught.value.__notes__[0]
    assert len(ended) == slots - 1, "the other slots are waited for"
    assert group.run(lambda slot: slot) == list(range(slots))
    group.close()


# -- devices -----------------------------------------------------------------------------------


@on_each(
    "setting, slots",
    [
        ("cpu:1", ["cpu"]),
        ("cpu:3", ["cpu"] * 3),
        ("cuda:0", ["cuda:0"]),
        ("cuda:0-3", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:0,2-3", ["cuda:0", "cuda:2", "cuda:3"]),
        ("cuda:0,0", ["cuda:0", "cuda:0"]),
    ],
)
def test_listed_devices(setting, slots):
    assert devices.slots_of(setting, {}, 8) == tuple(slots)


def slurm(place, ranks, **more):
    return {"SLURM_LOCALID": str(place), "SLURM_STEP_TASKS_PER_NODE": ranks} | more


@on_each(
    "environ, visible, slots",
    [
        ({}, 0, "cpu"),
        ({}, 2, "01"),
        (slurm(0, "1"), 8, "01234567"),
        (slurm(1, "2(x4)"), 8, "4567"),
        (slurm(3, "4(x2),1"), 2, "1"),
        (slurm(2, "3"), 8, "45"),
        # Slurm has dealt the GPUs out: each rank sees its own only
        (slurm(3, "4", SLURM_GPUS_ON_NODE="4"), 1, "0"),
        (slurm(1, "2", SLURM_GPUS_ON_NODE="8"), 8, "4567"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4, "1"),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, 2, "0"),
        ({"PALS_LOCAL_RANKID": "5", "PALS_LOCAL_SIZE": "6"}, 6, "5"),
        # mpirun inside a Slurm step that holds one task a host
        ({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"} | slurm(0, "1"), 4, "23"),
        ({"SLURM_LOCALID": "0"}, 4, "0123"),
    ],
)
def test_auto_shares_a_host_out_among_its_ranks(environ, visible, slots):
    expected = ("cpu",) if slots == "cpu" else tuple(f"cuda:{k}" for k in slots)
    assert devices.slots_of("auto", environ, visible) == expected


@on_each(
    "setting, visible, said",
    [
        ("cuda:0", 0, "sees no GPU"),
        ("cuda:0-7", 4, "GPU 7 is asked for, torch sees 4"),
        ("cuda:0,0,1", 4, "name each GPU once"),
    ],
)
def test_devices_that_cannot_be_had(setting, visible, said):
    (message,) = devices.mistakes(setting, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, visible)
    assert said in message and setting in message


def test_devices_that_can_be_had():
    assert devices.mistakes("cpu:64", {}, 0) == []
    assert devices.mistakes("cuda:0,0", {}, 1) == []
    assert devices.mistakes("auto", {}, 0) == []


def test_several_gpus_without_cupy_are_refused_with_a_remedy(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    (message,) = devices.mistakes("cuda:0-1", {}, 2)
    assert "pip install cupy-cuda" in message and "one GPU a rank" in message
    with pytest.raises(GroupError, match="cuda:0, cuda:1.*CuPy"):
        nccl.Nccl(["cuda:0", "cuda:1"])


def test_groups_by_devices():
    group = devices.make_group(("cpu",), 1, True)
    assert isinstance(group, Single)
    for shard, kind in ((True, Threads), (False, Whole)):
        group = devices.make_group(("cpu",) * 3, 1, shard)
        assert isinstance(group, kind)
        assert (group.slots, group.segments) == (3, 3 if shard else 1)
        group.close()


def test_clashing_libraries_are_named():
    wheel, site = "/env/nvidia/nccl/lib/libnccl.so.2", "/usr/lib/libnccl.so.2.27"
    assert nccl.clashes([wheel, "/lib/libc.so.6"], "13.0", 13000) == []
    assert nccl.clashes([], None, 12080) == []
    rccl = ["/opt/rocm/lib/librccl.so.1", "/env/torch/lib/librccl.so.1"]
    assert "2 copies" in nccl.clashes(rccl, None, 6)[0]
    (two,) = nccl.clashes([wheel, site], "13.0", 13010)
    assert wheel in two and site in two and "2 copies" in two
    (majors,) = nccl.clashes([wheel], "13.0", 12080)
    assert "CUDA 13.0" in majors and "CUDA 12" in majors and "cupy-cuda13x" in majors
    assert any("libtorch" in path for path in libraries())


class FakeNccl:
    """The calls of CuPy's NCCL, noted down in place of being made; some fail."""

    NCCL_FLOAT32, NCCL_SUM = 7, 0

    def __init__(self, fails=""):
        self.calls, self.fails = [], fails

    def groupStart(self):
        self.calls.append("start")

    def groupEnd(self):
        self.calls.append("end")
        if self.fails == "groupEnd":
            raise RuntimeError("NCCL_ERROR_UNHANDLED_CUDA_ERROR: unhandled cuda error")

    def check_async_error(self):
        if self.fails == "before":
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: a GPU fell off the bus")
        if self.fails == "unnamed":
            raise KeyError(6)

    def destroy(self):
        self.calls.append("destroy")

    def abort(self):
        self.calls.append("abort")

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, args))


class FakeStream:
    cuda_stream = 99

    def wait_stream(self, other):
        pass

    def synchronize(self):
        pass

    def record_event(self):
        return SimpleNamespace(query=lambda: True)


@pytest.fixture
def faked(monkeypatch):
    """An NCCL group of CPU arrays whose calls are noted: what is sent where, and in one group."""
    import contextlib

    def make(slots, fails=""):
        group = nccl.Nccl.__new__(nccl.Nccl)
        Threads.__init__(group, slots)
        group._nccl = FakeNccl(fails)
        group._comms, group._numbers = [group._nccl] * slots, list(range(slots))
        group._streams = [FakeStream()] * slots
        group._watchdog = Watchdog(group._comms, group.devices, 300.0, nccl.REMEDY)
        return group

    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "device", lambda number: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return make


def test_nccl_calls_of_all_slots_stand_in_one_group_and_work_in_place(faked):
    group = faked(4)
    full = [torch.ones(2, 64) for _ in range(4)]
    parts = group.reduce_scatter_mean(full)
    calls = group._nccl.calls
    assert calls[0] == "start" and calls[-1] == "end" and len(calls) == 2 + 4 * 2
    for slot, array in enumerate(full):
        for row in range(2):
            name, args = calls[1 + 2 * slot + row]
            source, target, count, dtype, op, stream = args
            assert (name, count, dtype, op, stream) == ("reduceScatter", 16, 7, 0, 99)
            # NCCL's rule for working in place: the result where the slot's own part lies
            assert (source, target) == (array[row].data_ptr(), array[row].data_ptr() + slot * 64)
        assert (parts[slot] == 0.25).all(), "the sum is scaled to a mean"
    calls.clear()
    group.all_gather(parts, full)
    for slot, (name, args) in enumerate(calls[1:-1:2]):
        assert (name, args[2:]) == ("allGather", (16, 7, 99))
        assert args[0] == args[1] + slot * 64
    group.close()
    assert calls[-4:] == ["destroy"] * 4


@pytest.mark.parametrize("fails", ["groupEnd", "before", "unnamed"])
def test_errors_of_nccl_name_devices_call_and_remedy(faked, fails):
    group = faked(2, fails)
    with pytest.raises(GroupError, match="NCCL broadcast over cpu, cpu failed: .*NCCL_DEBUG"):
        group.broadcast([torch.ones(1, 8)] * 2)
    group.close()
    # destroying a broken communicator would wait for what never ends
    assert group._nccl.calls[-2:] == ["abort"] * 2


def test_what_the_watchdog_found_is_raised_before_the_next_call(faked):
    group = faked(2)
    group._watchdog._failure = "cuda:1 was lost"
    with pytest.raises(GroupError, match="cuda:1 was lost"):
        group.all_gather([torch.ones(1, 4)] * 2, [torch.ones(1, 8)] * 2)
    assert not group._nccl.calls, "nothing more is begun"
    group.close()
    assert group._nccl.calls == ["abort"] * 2


def test_long_vectors_are_broadcast_in_cuts(faked, monkeypatch):
    monkeypatch.setattr(nccl, "CUT", 3)
    group = faked(2)
    full = [torch.ones(1, 8) for _ in range(2)]
    group.broadcast(full)
    place = full[1].data_ptr()
    calls = [args[:3] for _, args in group._nccl.calls[4:7]]
    assert calls == [(place + at, place + at, count) for at, count in ((0, 3), (12, 3), (24, 2))]
    group.close()


def test_nccl_needs_equal_shards(faked):
    group = faked(3)
    with pytest.raises(GroupError, match="8 columns can't be cut into 3"):
        group.reduce_scatter_mean([torch.ones(1, 8)] * 3)
    assert group.reduce_mean([torch.ones(1, 8)] * 3).shape == (1, 8)
    group.close()


# -- node.shard = false ------------------------------------------------------------------------


ELEMENTWISE = [
    "algorithm.name=dmsgd",
    "algorithm.name=dsgd algorithm.style=awc local.name=adamw schedule.lr=0.01 "
    "local.decoupled_decay=0.01",
    "algorithm.name=parallel algorithm.weight_decay=1e-3 algorithm.decay_all=false",
    "algorithm.name=dsgd algorithm.accumulate=2 node.wire=bf16",
]


def trained(settings, steps=6):
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble

    torch.set_num_threads(1)
    base = ["data.batch=2", "run.epochs=1", "schedule.scale=none", "log.consensus_every=2"]
    job = assemble.load({"model": {"name": "lenet"}}, [*base, *settings.split()])
    assembly = assemble.assemble(job, Alone(), 3)
    records = [assembly.trainer.step() for _ in range(steps)]
    replicas = assembly.trainer.replicas
    full = [replicas.flat.pack(array[row]) for array in replicas.full for row in range(3)]
    assembly.close()
    return torch.stack(full), records


@on_each("slots", [2, 3])
@on_each("settings", ELEMENTWISE)
def test_unsharded_equals_sharded_to_the_last_bit(settings, slots):
    sharded, records = trained(f"{settings} node.devices=cpu:{slots}")
    whole, others = trained(f"{settings} node.devices=cpu:{slots} node.shard=false")
    assert torch.equal(whole, sharded)
    assert len(whole) == 3 * slots
    for slot in range(1, slots):
        assert torch.equal(whole[:3], whole[3 * slot : 3 * slot + 3]), "all slots hold the same"
    for one, other in zip(records, others, strict=True):
        assert torch.equal(one.loss, other.loss)


def test_unsharded_and_clipped_is_close_to_sharded():
    """The norm is summed in other blocks, so the factor differs in its last bits."""
    clipped = "algorithm.name=dmsgd algorithm.clip_norm=0.5 node.devices=cpu:2"
    sharded, _ = trained(clipped)
    whole, _ = trained(f"{clipped} node.shard=false")
    assert torch.allclose(whole, sharded, rtol=1e-5, atol=1e-5)


def test_unsharded_state_is_held_once(tmp_path):
    from mpigossip.cluster.ranks import Alone
    from mpigossip.training import assemble

    job = assemble.load({"model": {"name": "mlp"}}, ["node.devices=cpu:3", "node.shard=false"])
    assembly = assemble.assemble(job, Alone(), 2)
    trainer = assembly.trainer
    assert len(trainer.engine.states) == len(trainer.replicas.x) == 1
    assert trainer.engine.states[0].momentum.shape == trainer.replicas.full[0].shape
    assert trainer.mixer.outbox(0)[0][0].shape == trainer.replicas.full[0].shape
    assembly.close()
