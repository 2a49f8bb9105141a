"""A custom loop as a member of a training that other members join and leave."""

import errno
import re
import runpy
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mpigossip
from mpigossip import cli
from mpigossip.config import JobError
from mpigossip.members.outages import Outages
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.optim import join as joining
from mpigossip.optim import member as loop_member
from mpigossip.runs.members.replay import ReplayMismatch
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests.cases import naming
from tests.launch import REPO, environment, warmed
from tests.members.storm import chunks_of

PROGRAM = REPO / "jobs/loops/member.py"
CHUNKS = 12
LOOP = "        for inputs, classes in batches(chunk):\n"
MEETS = """\
        import pathlib, time
        came = pathlib.Path(sys.argv[0]).parent
        (came / f"chunk-{chunk}").touch()
        while not again and len([*came.glob("chunk-*")]) < 2:
            time.sleep(0.02)
"""
"""Code before `LOOP`: the first member waits until the other one has a chunk, too."""


def parts(seed=0, width=4):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(folder, model, optimizer, most=CHUNKS, chunks=CHUNKS, meet=None, **more):
    """Train until the end, or ``most`` chunks; return whether all chunks are trained.

    ``meet`` is a barrier, at which members wait for each other in their first chunk; None: they do
    not wait.
    """
    with mpigossip.join(folder, model, optimizer, chunks=chunks, poll_s=0.02, **more) as member:
        for count, chunk in enumerate(member):
            if count == most:
                break
            if meet and not count:
                meet.wait(60)
            inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(chunk))
            for _ in range(3):
                optimizer.zero_grad()
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
            member.log(loss=loss, extra=chunk)
        return member.finished


def test_an_outage_is_no_part_of_a_round(tmp_path, monkeypatch):
    """The whole time of the training counts as an outage here, so that a round takes 0 seconds."""
    rounds = []
    monkeypatch.setattr(Outages, "seconds", lambda self: time.monotonic())
    monkeypatch.setattr(loop_member, "check_lease", lambda _, round_s: rounds.append(round_s))
    assert train(tmp_path / "run", *parts())
    assert len(rounds) == 1 and abs(rounds[0]) < 1e-3


def test_members_train_each_chunk_once_and_end_with_one_average(tmp_path, capsys):
    models = [parts(seed) for seed in range(3)]
    results = []
    more = {"meet": threading.Barrier(3)}
    folder = tmp_path / "run"
    threads = [
        threading.Thread(target=lambda pair=pair: results.append(train(folder, *pair, **more)))
        for pair in models
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 3
    message = f" of {tmp_path / 'run'}: {CHUNKS} chunks for all members in total"
    assert capsys.readouterr().err.count(message) >= 3
    once = chunks_of(tmp_path / "run", TrainingPlan(CHUNKS, 1, 600.0))
    assert once == dict.fromkeys(range(CHUNKS), 1)
    states = [model.state_dict() for model, _ in models]
    for state in states[1:]:
        assert all(torch.equal(state[name], value) for name, value in states[0].items())
    saved = checkpoint.latest(tmp_path / "run")
    mean = checkpoint.average(saved, checkpoint.read_manifest(saved))["parameters"]
    own = torch.cat([p.detach().ravel() for p in models[0][0].parameters()])
    torch.testing.assert_close(own, torch.from_numpy(mean).float())
    for path in (tmp_path / "run/models").iterdir():  # purged
        path.unlink()
    late, optimizer = parts(9)
    assert train(tmp_path / "run", late, optimizer)
    assert all(
        torch.equal(state, own)
        for state, own in zip(
            late.state_dict().values(), models[0][0].state_dict().values(), strict=True
        )
    )
    log = read(tmp_path / "run/log.h5").steps
    assert {"loss", "chunk", "peer", "extra"} <= log.keys()


def test_a_newcomer_begins_at_the_average_with_the_state_of_adam(tmp_path):
    first = parts(0)
    second = parts(1)
    assert not train(tmp_path / "run", *first, most=5)
    assert not train(tmp_path / "run", *second, most=0)
    state = second[0].state_dict()
    place = Place(RecordStore(tmp_path / "run"), TrainingPlan(CHUNKS, 1, 600.0))
    assert place.refresh(0).closed.why == "left" and place.refresh(0).rounds == 5
    assert all(torch.equal(state[name], value) for name, value in first[0].state_dict().items())
    steps = {float(one["step"]) for one in second[1].state.values()}
    assert steps == {15.0}


def test_a_member_that_is_asked_to_leave_ends_its_loop(tmp_path):
    folder = tmp_path / "run"
    train(folder, *parts(), most=2)
    (folder / "STOP").touch()
    assert not train(folder, *parts())
    (folder / "STOP").unlink()
    assert train(folder, *parts())


def test_an_outage_longer_than_a_lease_ends_the_loop(tmp_path, monkeypatch, capsys):
    """The program then exits with code 75, as if it had been asked to leave."""

    def fails(disk, name, content):
        if name.startswith("chain/") and name.endswith("2"):
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", name)
        return publish(disk, name, content)

    publish = RecordStore.publish_once
    monkeypatch.setattr(RecordStore, "publish_once", fails)
    monkeypatch.setattr(Outages, "limit_s", property(lambda _: 0.1, lambda *_: None), raising=False)
    assert not train(tmp_path / "run", *parts())
    assert "not connected, for 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"chunks": 7}, "another job"),
        ({"chunks": 0}, "chunks = 0"),
        ({"lease_s": 0}, "lease_s = 0"),
    ],
)
def test_rejected(tmp_path, given, words):
    train(tmp_path / "run", *parts(), most=1)
    with pytest.raises(JobError, match=naming(words)):
        train(tmp_path / "run", *parts(), **given)


def test_names_that_no_log_can_have_are_rejected(tmp_path):
    with mpigossip.join(tmp_path / "run", *parts(), chunks=2, poll_s=0.02) as member:
        measured = [(name, "measured already") for name in ("step", "steps")]
        for name, words in (*measured, ("train/loss", "valid name")):
            with pytest.raises(JobError, match=naming(f'log: "{name}"', words)):
                member.log(**{name: 1.0})


def test_a_member_is_one_process(tmp_path):
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(JobError, match=naming("torch.distributed", "2 processes")):
            train(tmp_path / "run", *parts())
    finally:
        torch.distributed.destroy_process_group()
    assert not (tmp_path / "run").exists()


def test_other_models_and_folders_are_rejected(tmp_path, capsys):
    train(tmp_path / "run", *parts(), most=1)
    with pytest.raises(JobError, match=naming("another version", "parameters")):
        train(tmp_path / "run", *parts(width=5))
    assert cli.main(["join", str(tmp_path / "run")]) == 2
    assert cli.main(["replay", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert printed.count("loop.toml") == 2, printed


def test_models_in_several_files_need_a_folder_that_earlier_versions_reject(tmp_path):
    folder = tmp_path / "run"
    train(folder, *parts(), most=1)
    loop = folder / "loop.toml"
    text = loop.read_text()
    assert text.startswith("# mpigossip members 3, ")  # earlier versions expect members 2
    loop.write_text(text.replace("members 3", "members 2", 1))
    train(folder, *parts(), most=1)
    disk, model = RecordStore(folder), parts()[0]
    assert joining._job(disk, model, CHUNKS, False, divided=False)
    assert joining._job(disk, model, CHUNKS, True, divided=True)
    with pytest.raises(JobError, match=naming("earlier version")):
        joining._job(disk, model, CHUNKS, False, divided=True)
    loop.write_text(text)
    assert joining._job(disk, model, CHUNKS, False, divided=True)


def test_a_program_repeats_its_training(tmp_path, capsys):
    folder = tmp_path / "run"
    assert not train(folder, *parts(0), most=5)
    models = [parts(0), parts(1)]
    more = {"meet": threading.Barrier(2)}
    threads = [threading.Thread(target=train, args=(folder, *one), kwargs=more) for one in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    again, optimizer = parts(0)
    assert train(folder, again, optimizer, most=99, replay=True)
    printed = capsys.readouterr().err
    assert f"{CHUNKS} rounds of 3 places repeated" in printed
    assert checkpoint.digest(checkpoint.latest(folder)) in printed
    assert len(list((folder / "places").iterdir())) == 3
    state = models[0][0].state_dict()
    assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    with pytest.raises(ReplayMismatch, match=naming("round 1", "place 0", "another model")):
        train(folder, *parts(5), replay=True)
    with pytest.raises(JobError, match=naming("loop.toml")):
        train(tmp_path / "none", *parts(), replay=True)


def test_a_lease_lasts_at_least_five_rounds(tmp_path):
    with pytest.raises(JobError, match=naming("members.lease_s = 0.001")):
        train(tmp_path / "run", *parts(), lease_s=0.001)
    place = Place(RecordStore(tmp_path / "run"), TrainingPlan(CHUNKS, 1, 600.0))
    assert place.refresh(0).closed.why == "left"  # other members train its chunks


def test_a_program_reports_that_its_chunks_are_too_short_for_the_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(loop_member, "seconds_per_round", lambda disk: 100.0)
    assert train(tmp_path / "run", *parts())
    note = capsys.readouterr().err
    assert note.count("hint") == 1 and re.search(naming("100 s", "times as long"), note)


def test_the_example_program_of_a_member(tmp_path, monkeypatch, capsys):
    """Two processes train half of the chunks each, one repeats them; the average is exported."""
    folder = tmp_path / "run"
    program = tmp_path / "member.py"
    text = PROGRAM.read_text().replace("CHUNKS = 60", "CHUNKS = 30")
    program.write_text(text.replace(LOOP, MEETS + LOOP))
    command = [sys.executable, str(program), str(folder)]
    env = environment("")
    every = [
        subprocess.Popen(warmed(command, {}), stdout=subprocess.PIPE, text=True, env=env)
        for _ in "12"
    ]
    outputs = [one.communicate(timeout=120)[0] for one in every]
    assert all(one.returncode == 0 for one in every)
    right = [float(re.search(r"([\d.]+)% right", text)[1]) for text in outputs]
    assert right[0] == right[1] > 85
    monkeypatch.setattr(sys, "argv", [str(program), str(folder), "--replay"])
    runpy.run_path(str(program))
    out, err = capsys.readouterr()
    assert "30 rounds of 2 places" in err
    assert out == outputs[0]
    assert cli.main(["checkpoint", "export", str(folder), "--out", str(tmp_path / "m.pt")]) == 0
    assert torch.load(tmp_path / "m.pt").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
