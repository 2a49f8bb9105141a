"""The contract of a group, the same for one slot, threads and NCCL; devices by their names."""

import queue
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from mpigossip.cluster import deadline, local_devices
from mpigossip.cluster.deadline import WaitTimeoutError
from mpigossip.groups import devices, threads
from mpigossip.groups.base import Single, Unsharded, shard_views
from mpigossip.groups.threads import ThreadGroup
from mpigossip.mixing.combine import weighted_sum
from tests.cases import naming, on_each, some

GPUS = torch.cuda.device_count()


def by_nccl(slots):
    if slots == 1 or slots > GPUS:
        pytest.skip(f"NCCL joins two GPUs or more, torch sees {GPUS}")
    return devices.make_group(tuple(f"cuda:{k}" for k in range(slots)), 1, True, 60)


MAKERS = {
    "single": lambda slots: Single() if slots == 1 else pytest.skip("one slot is all it has"),
    "threads": ThreadGroup,
    "threads-on-a-gpu": lambda slots: (
        ThreadGroup(slots, devices=["cuda:0"] * slots) if GPUS else pytest.skip("torch sees no GPU")
    ),
    "whole": lambda slots: Unsharded(ThreadGroup(slots)),
    "nccl": by_nccl,
}


ON_GPUS = ("threads-on-a-gpu", "nccl")
SLOTS = pytest.mark.parametrize("slots", some(range(1, 9), [1, 2, 3, 8]))


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.gpu] * (name in ON_GPUS)) for name in MAKERS]
)
def make(request):
    """Return a function of the number of slots; its groups are closed after the test."""
    made = []

    def one(slots):
        made.append(MAKERS[request.param](slots))
        return made[-1]

    yield one
    for group in made:
        group.close()


def arrays(group, rows, size, seed=0):
    """Return the same numbers on every device, and a copy on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    given = [torch.randn(rows, size, generator=draw) for _ in range(group.slots)]
    return [g.to(d, copy=True) for g, d in zip(given, group.devices, strict=True)], given


def same(found, expected):
    return torch.equal(found.cpu(), expected)


@SLOTS
@on_each("rows, shard", [(1, 1), (3, 7), (1, 512), (3, 33_333)])
def test_shards_hold_the_mean_summed_in_slot_order(make, slots, rows, shard):
    group = make(slots)
    full, given = arrays(group, rows, slots * shard)
    mean = weighted_sum([1 / slots] * slots, given, torch.empty_like(given[0]))
    result = group.reduce_scatter_mean(full)
    assert len(result) == group.segments
    for index, part in enumerate(result):
        assert part.device == torch.device(group.devices[index])
        assert same(part, mean.chunk(group.segments, dim=1)[index])


@SLOTS
@on_each("shard", [1, 7, 512])
def test_gathering_gives_every_slot_all_shards(make, slots, shard):
    group = make(slots)
    full, given = arrays(group, 2, slots * shard)
    whole = torch.cat(shard_views(given, group.segments), dim=1)
    group.all_gather(shard_views(full, group.segments), full)
    for array in full:
        assert torch.equal(array.cpu(), whole)
    # shards that are not views of the vectors
    copies = [array.clone() for array in shard_views(full, group.segments)]
    for array in full:
        array.zero_()
    group.all_gather(copies, full)
    for array in full:
        assert torch.equal(array.cpu(), whole)


@SLOTS
@on_each("size", [1, 5, 70_001])
def test_a_broadcast_takes_any_size(make, slots, size):
    """Sizes that L doesn't divide, and fewer columns than slots."""
    group = make(slots)
    full, _ = arrays(group, 2, size)
    first = full[0].cpu()
    group.broadcast(full)
    for array in full:
        assert torch.equal(array.cpu(), first)


@SLOTS
def test_a_padded_vector_comes_back_without_its_padding(make, slots):
    """As in training, 1,003 parameters are padded so that L shards are whole buckets."""
    group = make(slots)
    size = -(-1003 // (512 * slots)) * 512 * slots
    full, given = arrays(group, 1, size)
    for array in full:
        array[:, 1003:] = 0
    mean = weighted_sum([1 / slots] * slots, given, torch.empty_like(given[0]))
    group.all_gather(group.reduce_scatter_mean(full), full)
    for array in full:
        assert same(array[:, :1003], mean[:, :1003])
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
def test_work_runs_once_per_slot_concurrently(make, slots):
    group = make(slots)
    meeting = threading.Barrier(slots)  # passes only if all slots arrive at the same time

    def work(slot):
        meeting.wait(20)
        return slot * slot

    assert group.run(work) == [slot * slot for slot in range(slots)]
    assert len(group.on_shards(lambda index: index)) == group.segments


@pytest.mark.parametrize("slots", [2, 4])
def test_a_failure_names_its_slot_and_the_group_continues(slots):
    group = ThreadGroup(slots)
    ended = []

    def work(slot):
        if slot == slots - 1:
            raise ValueError("a bad sample")
        time.sleep(0.05)
        ended.append(slot)

    with pytest.raises(ValueError, match=naming("bad sample")) as caught:
        group.run(work)
    assert f"in slot {slots - 1}" in caught.value.__notes__[0]
    assert len(ended) == slots - 1, "the other slots are waited for"
    assert group.run(lambda slot: slot) == list(range(slots))
    group.close()


def test_a_slot_that_does_not_finish_is_named_in_time(monkeypatch):
    monkeypatch.setattr(threads, "GRACE_S", 0.2)
    group = ThreadGroup(3, first=4, timeout_s=1.5)
    over = threading.Event()
    began = time.monotonic()
    with pytest.raises(
        WaitTimeoutError, match=naming("slot 6", "cpu", "waited 1.2 s", "node.timeout_s")
    ):
        group.run(lambda slot: over.wait(20) if slot == 2 else time.sleep(0.1 * slot))
    group.close()
    assert 1.3 <= time.monotonic() - began < 10, "counted from the slot that ended last"
    over.set()


def test_a_pause_has_no_limit():
    group = ThreadGroup(2, timeout_s=0.2)
    heard = SimpleNamespace(poll_paused=lambda: True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpigossip.cluster.deadline.this_rank.monitor", heard)
        for late in (0, 1):
            group.run(lambda slot, late=late: time.sleep(0.7 * (slot == late)))
    group.close()


def test_after_a_pause_slots_have_a_full_time_limit(monkeypatch):
    looks = []

    def nothing(entries, limit_s):
        looks.append(limit_s)
        raise queue.Empty

    group = ThreadGroup(1)
    paused = iter([True, True, False, False])
    monkeypatch.setattr(deadline, "any_rank_paused", lambda: next(paused))
    monkeypatch.setattr(threads, "_next", nothing)
    with pytest.raises(queue.Empty):
        group._take(queue.SimpleQueue(), failed=False)
    assert len(looks) == 4, "the look after the pause ended, and one more"
    group.close()


STILL = """
import time
from mpigossip.groups.threads import ThreadGroup
ThreadGroup(2, timeout_s=0.5).run(lambda slot: time.sleep(0 if slot else 60))
"""


def test_the_training_thread_that_does_not_finish_is_named_by_a_slot():
    done = subprocess.run(
        [sys.executable, "-c", STILL], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert re.search(naming("slot 0", "cpu", "waited 0.4 s"), done.stderr)


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
    assert local_devices.slots_of(setting, {}, 8) == tuple(slots)


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
        # Slurm has assigned the GPUs: each rank sees only its own
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
def test_auto_divides_the_gpus_of_a_host(environ, visible, slots):
    expected = ("cpu",) if slots == "cpu" else tuple(f"cuda:{k}" for k in slots)
    assert local_devices.slots_of("auto", environ, visible) == expected


CUDA = {"CUDA_VISIBLE_DEVICES": "2"}
FLUX = {"FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2"}


@on_each(
    "environ, visible, on_host, expected",
    [
        ({}, 0, 0, ("cpu:1", 1)),
        (slurm(1, "4"), 0, 0, ("cpu:1", 1)),  # mpirun -n 4 on a laptop: four nodes
        ({}, 4, 4, ("gpu:4", 1)),
        (slurm(1, "4"), 4, 4, ("gpu:1", 4)),
        (FLUX, 4, 4, ("gpu:1", 4)),
        (slurm(1, "2"), 8, 8, ("gpu:4", 2)),
        (slurm(1, "4"), 1, 1, ("gpu:1", 1)),  # fewer GPUs than ranks: each is a node
        # assigned by the launcher, so not divided again
        (slurm(1, "2", SLURM_GPUS_ON_NODE="8"), 4, 8, ("gpu:4", 2)),
        (slurm(1, "4") | CUDA, 1, 4, ("gpu:1", 4)),
        (FLUX | {"ROCR_VISIBLE_DEVICES": "1"}, 1, 8, ("gpu:1", 4)),
        (slurm(1, "4") | CUDA, 1, 1, ("gpu:1", 1)),
    ],
)
def test_auto_becomes_devices_and_ranks_a_node(environ, visible, on_host, expected):
    assert local_devices.resolve_auto("auto", "auto", environ, visible, on_host) == expected
    assert local_devices.resolve_auto("auto", 1, environ, visible, on_host) == (expected[0], 1)


@on_each(
    "environ, visible, slots",
    [
        (slurm(2, "4"), 4, "2"),
        (slurm(1, "2"), 4, "1"),
        (slurm(2, "4"), 1, "0"),
        (slurm(3, "4"), 2, "1"),
        ({}, 0, "0"),  # and a message that there is none
    ],
)
def test_one_gpu_per_rank_is_chosen_by_local_rank(environ, visible, slots):
    assert local_devices.slots_of("gpu:1", environ, visible) == tuple(f"cuda:{k}" for k in slots)
    assert local_devices.slots_of("gpu:2", {}, 2) == ("cuda:0", "cuda:1")


@on_each(
    "setting, visible, said",
    [
        ("cuda:0", 0, "sees no GPU"),
        ("cuda:0-7", 4, "GPU 7"),
        ("cuda:0,0,1", 4, "name each GPU once"),
    ],
)
def test_unavailable_devices_are_rejected(setting, visible, said):
    (message,) = devices.device_problems(setting, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, visible)
    assert said in message and setting in message


@on_each(
    "slots, environ, count, on_host, note",
    [
        (("cpu",), {}, 0, 0, ""),
        (("cuda:0",), {}, 1, 1, ""),
        (("cuda:0",), {}, 4, 4, "; torch sees 4 GPUs"),
        (("cuda:1",), slurm(3, "4"), 2, 2, "; 4 ranks share 2 GPUs"),
        (("cuda:0",), slurm(3, "4") | CUDA, 1, 4, ""),  # assigned
        (("cuda:0",), slurm(3, "4") | CUDA, 1, 1, "; 4 ranks share 1 GPU"),
    ],
)
def test_unused_gpus_are_reported(monkeypatch, slots, environ, count, on_host, note):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(local_devices, "_on_host", lambda: on_host)
    assert devices.unused_gpus_note(slots, environ) == note


def test_gpus_of_a_host_are_counted_whether_visible_or_not(monkeypatch, tmp_path):
    """NVIDIA's device files; AMD's nodes of the topology, of which processors have the id 0."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    for node, number in enumerate(("0", "4098", "4099")):
        place = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        place.mkdir(parents=True)
        (place / "gpu_id").write_text(f"{number}\n")
    monkeypatch.setattr(local_devices, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert local_devices._on_host() == 4
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    (nodes / "2/gpu_id").unlink()
    (nodes / "2/gpu_id").mkdir()  # can't be read: it belongs to another user
    assert local_devices._on_host() == 4


def test_available_devices_are_accepted():
    assert devices.device_problems("cpu:64", {}, 0) == []
    assert devices.device_problems("cuda:0,0", {}, 1) == []
    assert devices.device_problems("auto", {}, 0) == []


def test_several_gpus_without_nccl_are_rejected_with_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    (message,) = devices.device_problems("cuda:0-1", {}, 2)
    assert "has no NCCL (RCCL)" in message and "name one GPU" in message


def test_groups_by_devices():
    group = devices.make_group(("cpu",), 1, True)
    assert isinstance(group, Single)
    for shard, kind in ((True, ThreadGroup), (False, Unsharded)):
        group = devices.make_group(("cpu",) * 3, 1, shard)
        assert isinstance(group, kind)
        assert (group.slots, group.segments) == (3, 3 if shard else 1)
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
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.training import assemble

    torch.set_num_threads(1)
    base = ["data.batch=2", "run.epochs=1", "schedule.scale=none", "log.consensus_every=2"]
    job = assemble.load({"model": {"name": "lenet"}}, [*base, *settings.split()])
    assembly = assemble.assemble(job, SingleProcess(), 3)
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
    from mpigossip.cluster.world import SingleProcess
    from mpigossip.training import assemble

    job = assemble.load({"model": {"name": "mlp"}}, ["node.devices=cpu:3", "node.shard=false"])
    assembly = assemble.assemble(job, SingleProcess(), 2)
    trainer = assembly.trainer
    assert len(trainer.engine.states) == len(trainer.replicas.x) == 1
    assert trainer.engine.states[0].momentum.shape == trainer.replicas.full[0].shape
    assert trainer.mixer.outbox(0)[0][0].shape == trainer.replicas.full[0].shape
    assembly.close()
