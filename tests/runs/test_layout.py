"""Layout of checkpoints of jobs and custom loops: names, types and numbers."""

import re

import h5py
import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store import checkpoint
from mpigossip.training import assemble
from tests.cases import with_world
from tests.optim.loops import run_loop, train_on_nodes
from tests.optim.loops import train_sharded as sharded

JOB = ["data.batch=2", "run.steps=3", "log.flush_steps=2", "run.evaluate_every=0"]
MLP = ["model.name=mlp", "model.hidden=[4]"]
COUNTERS = "index:int born:int round:int"
SPENT = "spent/compute_s:float spent/node_s:float spent/exchange_s:float spent/idle_s:float"
RUN = f"shift:int seconds:float samples:int bytes_sent:int local_steps:int {SPENT}"
META = "nodes:int asked:int slots:int lost:str lost_at:int"
PARTITION = "partition:str numpy:str"
"""Facts of a job: the digest of its partition, and the version of NumPy that drew it."""
OPTIMIZER = ("exp_avg:float32", "exp_avg_sq:float32", "step:float32")


def found(folder, file="node-0001.h5"):
    """Return datasets, numbers and facts of a node's file and the manifest, with their types."""
    path = checkpoint.latest(folder)
    arrays = set()

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and name not in ("layout", "numbers"):
            arrays.add(f"{name}:{item.dtype}")

    with h5py.File(path / file) as content:
        assert "layout" in content and "numbers" in content
        content.visititems(visit)
    slot = re.fullmatch(r"node-\d+-(\d+)\.h5", file)
    manifest = checkpoint.read_manifest(path)
    numbers = checkpoint.read_node(path, 0 if slot else 1).numbers
    return arrays, typed(numbers), typed(manifest.meta)


def typed(values):
    return {f"{name}:{type(value).__name__}" for name, value in values.items()}


def words(*texts):
    return {word for text in texts for word in text.split()}


def train(folder, *settings, world=None):
    job = assemble.load({}, [*JOB, *settings, f"run.output={folder}"])
    start_and_resume.train(job, world or SingleProcess(), None if world else 2)


BUFFERS = {"num_batches_tracked": "int64", "running_mean": "float32", "running_var": "float32"}


def buffers(module, *slots):
    every = [(slot, name, kind) for slot in slots for name, kind in BUFFERS.items()]
    return {f"arrays/buffers/{slot}/{module}.{name}:{kind}" for slot, name, kind in every}


@pytest.mark.parametrize(
    ("settings", "arrays", "numbers"),
    [
        (
            "algorithm.name=dmsgd node.precision=fp16 node.devices=cpu:2",
            "arrays/state/momentum:float32",
            "loss_scale:float clean_steps:int",
        ),
        (
            "algorithm.name=diloco cadence.period=2 cadence.fragments=2",
            "arrays/state/anchor:float32 arrays/state/inner/first:float32 "
            "arrays/state/inner/second:float32 arrays/state/slow:float32",
            "",
        ),
        (
            "algorithm.name=sgp graph.name=exponential graph.weights=push",
            "arrays/state/inner/momentum:float32 arrays/state/weight:float64",
            "",
        ),
        (
            "algorithm.name=gossip-aga cadence.warmup=1",
            "",
            "cadence/first_loss:float cadence/period:int cadence/samples:int cadence/since:int",
        ),
    ],
)
def test_layout_of_a_job(tmp_path, settings, arrays, numbers):
    train(tmp_path, *MLP, *settings.split())
    assert found(tmp_path) == (
        words("parameters:float32", arrays),
        words(COUNTERS, RUN, numbers),
        words(META, PARTITION, "steps_per_epoch:int"),
    )


def test_layout_of_a_job_with_buffers(tmp_path):
    train(tmp_path, "model.name=resnet20", "run.steps=1")
    arrays, *_ = found(tmp_path)
    assert buffers("1", 0) < arrays and "arrays/state/momentum:float32" in arrays
    assert {name.split("/")[1] for name in arrays if "/" in name} == {"state", "buffers"}


@with_world
def by_slot(world, folder):
    shape = ["node.ranks_per_node=2", "node.devices=cpu:1", "checkpoint.one_file_gb=0"]
    push = ["algorithm.name=sgp", "graph.name=exponential", "graph.weights=push"]
    train(folder, *MLP, *push, *shape, world=world)


def test_layout_of_a_job_with_a_file_per_slot(ranks, tmp_path):
    ranks(4)(by_slot, tmp_path)
    numbers = words(COUNTERS, RUN)
    meta = words(META, PARTITION, "steps_per_epoch:int")
    pieces = words("parameters:float32 pieces/state/inner/momentum:float32")
    for slot, more in enumerate([{"arrays/state/weight:float64"}, set()]):
        assert found(tmp_path, f"node-0001-000{slot}.h5") == (pieces | more, numbers, meta)


def moments(*parameters):
    return {f"arrays/torch/{name}/{key}" for name in parameters for key in OPTIMIZER}


def test_layout_of_a_loop(ranks, tmp_path):
    ranks(2)(run_loop, tmp_path, 2)
    arrays, numbers, meta = found(tmp_path)
    trained = [f"{at}.{name}" for at in (0, 1, 3) for name in ("bias", "weight")]
    assert arrays == buffers("1", 0) | moments(*trained) | words(
        "parameters:float32 arrays/rng/torch:uint8 arrays/own/draw:uint8"
    )
    assert numbers == words(COUNTERS, RUN, "torch:str ranks:int own:str")
    assert meta == words(META, "door:str")


def test_layout_of_a_loop_on_nodes_of_two_ranks(ranks, tmp_path):
    ranks(4)(train_on_nodes, tmp_path, 2)
    arrays, numbers, meta = found(tmp_path)
    trained = [f"{at}.{name}" for at in (0, 2, 3) for name in ("bias", "weight")]
    each = "arrays/rng/torch:uint8 arrays/own/draw:uint8"
    second = "arrays/rng/#1/torch:uint8 arrays/own/#1/draw:uint8"
    assert arrays == buffers("2", 0, 1) | moments(*trained) | words(
        "parameters:float32", each, second
    )
    assert numbers == words(COUNTERS, RUN, "torch:str ranks:int own:str own/#1:str")
    assert meta == words(META, "door:str")


def test_layout_of_a_sharded_loop(ranks, tmp_path):
    ranks(4)(sharded, tmp_path, 2, 2)
    arrays, numbers, meta = found(tmp_path)
    moments = {name for name in arrays if name.startswith("arrays/torch/")}
    assert "arrays/torch/blocks.0.attend.weight/exp_avg:float32" in moments
    assert {name.rpartition("/")[2] for name in moments} == set(OPTIMIZER)
    assert arrays - moments == words(
        "parameters:float32 arrays/rng/torch:uint8 arrays/rng/#1/torch:uint8",
        "arrays/own/draw:uint8 arrays/own/#1/draw:uint8",
        "arrays/state/adapted:float32",
    )
    assert numbers == words(COUNTERS, RUN, "torch:str ranks:int own:str own/#1:str")
    assert meta == words(META, "door:str")
