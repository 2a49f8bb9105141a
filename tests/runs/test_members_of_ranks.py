"""Members of several ranks: rank 0 reads records and decides; each rank writes its part."""

import json
import math
import os
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.distributed import checkpoint as dcp

from mpigossip import cli
from mpigossip.members.live import digest, read_model
from mpigossip.members.parts import Part, cut, joined, parts_of
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore, Round, Shard, Start, Unusable, parse
from mpigossip.runs.members.fork import fork
from mpigossip.runs.members.replay import matches, replay
from mpigossip.store import StoreError
from mpigossip.store.checkpoint import NodeState
from tests.cases import naming
from tests.launch import Launch, mpirun, until

COUNTS = (7, 5, 0, 4)
"""Number of elements of each of the four slots; a slot may have none."""

SETTINGS = [
    "run.epochs=40",
    "model.name=mlp",
    "cadence.name=every",
    "cadence.period=4",
    "local.name=adamw",
    "schedule.lr=0.003",
    "schedule.name=constant",
    "data.batch=16",
    "algorithm.style=atc",
    "node.devices=cpu:2",
    "node.ranks_per_node=host",
]
MEMBER = """
import sys
from pathlib import Path
from mpigossip.runs.members.join import join
from mpigossip.training.assemble import load
job = load("jobs/digits.toml", sys.argv[2:]) if sys.argv[2:] else None
summary = join(Path(sys.argv[1]), job, lease_s=20.0, poll_s=0.1)
print("rank", summary.pop("rank", 0), summary, flush=True)
"""


def member(folder, *settings):
    return [sys.executable, "-c", MEMBER, folder, *settings]


def model():
    count = sum(COUNTS)
    arrays = {"state/first": np.arange(count) * 2.0, "state/step": np.array([3.0])}
    arrays |= {f"buffers/{slot}/mean": np.full(2, float(slot)) for slot in range(4)}
    x = np.arange(count, dtype=np.float32)
    return NodeState(x, ("w",), ((count,),), arrays, {"index": 1})


def part(rank, ranks):
    each = 4 // ranks
    first = sum(COUNTS[: each * rank])
    return Part(rank, ranks, 4, first, sum(COUNTS[each * rank : each * (rank + 1)]))


def shards(ranks):
    parts = [part(rank, ranks) for rank in range(ranks)]
    states = [cut(model(), own) for own in parts]
    return tuple(
        Shard(f"000000-{'0' * 16}-{rank:04d}.h5", 1, "", own.first, own.count, digest(state))
        for rank, (own, state) in enumerate(zip(parts, states, strict=True))
    )


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_a_model_is_read_by_another_number_of_ranks(writers, readers):
    written = [cut(model(), part(rank, writers)) for rank in range(writers)]
    assert digest(joined(written)) == digest(model())
    for rank in range(readers):
        own = part(rank, readers)
        needed = [n for n in range(writers) if own.needs(n, writers)]
        assert len(needed) == max(1, writers // readers)
        read = joined([written[n] for n in needed])
        assert digest(cut(read, own, part(needed[0], writers).first)) == digest(cut(model(), own))


def test_a_part_that_the_shards_do_not_contain_is_rejected():
    with pytest.raises(StoreError, match=naming("12 to 15", "0 to 11")):
        cut(joined([cut(model(), part(1, 2))]), part(0, 2), 12)


@pytest.fixture
def record():
    return Round(
        place=0,
        round=1,
        claim="c",
        chunk=0,
        peer=(),
        age=1,
        progress=1,
        promise=1.0,
        step=1,
        file=shards(2)[0].file,
        bytes=2,
        checksum="",
        parameters=16,
        digest="",
        shards=shards(2),
    )


def test_a_record_lists_shards_only_if_there_are_several(record):
    assert parse(record.encode(), "r", Round) == record
    assert matches(record, model(), 4) and len(parts_of(model(), record.shards, 4)) == 2
    changed = model()
    changed.arrays["buffers/3/mean"][0] += 1
    assert not matches(record, changed, 4)
    text = record.encode()
    with pytest.raises(Unusable, match=naming("invalid name")):
        parse(text.replace(b"-0001.h5", b"-0001/../x.h5"), "r", Round)
    with pytest.raises(Unusable, match=naming('"shards"', "invalid entry")):
        parse(text.replace(b', "shards": [[', b', "shards": [["x"], ['), "r", Round)


def test_files_of_a_model_that_do_not_follow_one_another_are_rejected(record):
    """A reader of the whole model joins them in the order of the record."""
    first, second = record.shards
    for wrong in (
        (second, first),
        (first,),
        (first, second._replace(first=second.first + 1)),
        (first, second._replace(parameters=second.parameters + 1)),
    ):
        with pytest.raises(Unusable, match=naming("contain the elements")):
            parse(replace(record, shards=wrong).encode(), "r", Round)


def has_round(folder, place, number):
    return lambda: (folder / f"chain/{place:06d}/{number:06d}").exists()


def check_exported(folder, place, ranks, to):
    """Export the newest round of a place as shards; check them with safetensors and torch's DCP."""
    to.mkdir()
    words = ["checkpoint", "export", str(folder), "--place", str(place), "--max-shard-size", "9KB"]
    assert cli.main([*words, "--out", str(to / "model.safetensors")]) == 0
    reader = Place(RecordStore(folder), TrainingPlan(1, 1, 1.0))
    version = reader.refresh(place).last
    assert len(version.files) == ranks
    state = read_model(reader, version)
    index = json.loads((to / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * version.parameters
    arrays = {
        name: torch.zeros(shape) for name, shape in zip(state.names, state.shapes, strict=False)
    }
    dcp.load(arrays, storage_reader=dcp.HuggingFaceStorageReader(str(to)))
    begin = 0
    for name, shape in zip(state.names, state.shapes, strict=True):
        end = begin + math.prod(shape)
        expected = state.parameters[begin:end].reshape(shape)
        with safe_open(to / index["weight_map"][name], "np") as file:
            assert (file.get_tensor(name) == expected).all()
        assert (arrays[name].numpy() == expected).all()
        begin = end


# Without a process group, torch warns that it loads in a single process.
@pytest.mark.every
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_members_of_2_and_4_ranks_and_of_one_process_train_together(tmp_path):
    """One rank is killed, which ends its member; members of 4 ranks and of one process join."""
    folder = tmp_path / "run"
    first = Launch(2, member(folder, *SETTINGS))
    until(has_round(folder, 0, 2), 90, "the first member")
    second = Launch(2, member(folder))
    until(has_round(folder, 1, 3), 90, "the second member")
    os.kill(first.ranks()[1], signal.SIGKILL)
    assert first.finish(60).returncode != 0
    last = max(int(path.name) for path in (folder / "chain/000001").iterdir())
    until(has_round(folder, 1, last + 3), 90, "a round of the second member, alone")
    for pid in second.ranks():
        os.kill(pid, signal.SIGTERM)
    left = second.finish(60)
    assert len(list((folder / "models").glob("000001-*-0001.h5"))) == 3
    assert left.returncode == 0 and "'finished': False" in left.stdout, left.stderr
    check_exported(folder, 1, 2, tmp_path / "two")
    third = Launch(4, member(folder))
    until(has_round(folder, 2, 3), 120, "the member of 4 ranks")
    os.kill(third.ranks()[3], signal.SIGTERM)  # one rank is enough
    left = third.finish(60)
    assert left.returncode == 0 and left.stdout.count("'finished': False") == 4, left.stderr
    check_exported(folder, 2, 4, tmp_path / "four")
    odd = mpirun(3, member(folder), 90, warm=False)
    assert odd.returncode == 2 and "which 3 ranks can't divide" in odd.stderr
    alone = Launch(0, member(folder)).finish(150)
    assert alone.returncode == 0 and "'finished': True" in alone.stdout, alone.stderr
    message = replay(folder)
    digest_of = alone.stdout.partition("'digest': '")[2][:64]
    assert "every digest is equal" in message and digest_of in message
    assert digest_of in fork(folder, 4, tmp_path / "same")
    fork(folder, 4, tmp_path / "other", ["schedule.lr=0.001"])
    names = sorted((tmp_path / "other/chain").glob("*/*"))
    records = [parse(name.read_bytes(), "r", Round, Start) for name in names]
    changed = [r for r in records if isinstance(r, Round) and r.age > 4]
    # A fork has no files of ranks, and each changed model has the digest of the whole model.
    assert changed and not any(record.shards for record in changed)
