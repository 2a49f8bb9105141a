"""Members that join a training in a folder and leave it; its replay."""

import errno
import json
import os
import re
import shutil
import threading
import time

import numpy as np
import pytest
from torch import nn

from mpigossip import cli
from mpigossip.analysis.report import stays
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.members import outages
from mpigossip.members.live import FolderExchange
from mpigossip.members.place import Place, TrainingPlan
from mpigossip.members.records import RecordStore
from mpigossip.runs import start_and_resume
from mpigossip.runs.members import join as joining
from mpigossip.runs.members.join import join
from mpigossip.runs.members.replay import ReplayMismatch, replay
from mpigossip.store import StoreError, checkpoint
from mpigossip.store.log import LogWriter, read
from mpigossip.training.assemble import load
from mpigossip.training.rules import check_member
from tests.cases import every, naming, on_each
from tests.members.storm import begin

SMALL = [
    "run.epochs=2",
    "model.name=mlp",
    "cadence.name=every",
    "cadence.period=4",
    "local.name=adamw",
    "schedule.lr=0.003",
    "schedule.name=constant",
    "data.batch=64",
]


def job(*settings, algorithm="dsgd"):
    return load({}, [f"algorithm.name={algorithm}", *SMALL, *settings])


@pytest.fixture(autouse=True)
def one_draws_at_a_time(monkeypatch):
    lock_draws(monkeypatch)


def lock_draws(monkeypatch):
    """Lock torch's random generator, because members are threads here and not processes."""
    lock = threading.Lock()
    assemble = joining.assemble

    def locked(*given):
        with lock:
            made = assemble(*given)
        if parties:
            parties[0].wait(60)  # no member trains while another draws its model
        return made

    monkeypatch.setattr(joining, "assemble", locked)


parties = []


def members(folder, count, *settings, algorithm="dsgd"):
    """Train with several members at once to the end; return their summaries."""
    results = []

    def work():
        made = job(*settings, algorithm=algorithm)
        results.append(join(folder, made, lease_s=30.0, poll_s=0.05))

    threads = [threading.Thread(target=work) for _ in range(count)]
    parties[:] = [threading.Barrier(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    parties.clear()
    assert len(results) == count
    return results


@pytest.mark.parametrize("algorithm", ["dsgd", "noloco", "gasloc"])
def test_members_train_and_replay_is_equal(tmp_path, algorithm):
    folder = tmp_path / "run"
    result = members(folder, 3, algorithm=algorithm)
    assert all(one["finished"] for one in result)
    digest = checkpoint.digest(checkpoint.latest(folder))
    assert {one["digest"] for one in result if "digest" in one} == {digest}
    message = replay(folder)
    assert "every digest is equal" in message and digest in message
    best = max(one.get("accuracy", 0) for one in result)
    assert best > 0.6, result


UNEQUAL = ("cadence.period=auto", "cadence.shortest=2", "cadence.longest=8")
"""Settings of members whose number of steps in a round follows their speed."""


def slow_down(monkeypatch, waits):
    """Let the steps of each further member wait for one of the times in ``waits``, in seconds."""
    assemble = joining.assemble
    waits = [*waits]

    def slowed(*given):
        made = assemble(*given)
        step = made.trainer.step
        wait = waits.pop()

        def late_step(*steps):
            time.sleep(wait)
            return step(*steps)

        made.trainer.step = late_step
        return made

    monkeypatch.setattr(joining, "assemble", slowed)


@pytest.mark.parametrize("algorithm", ["dsgd", "noloco"])
def test_fast_members_train_several_chunks_per_round(tmp_path, monkeypatch, algorithm):
    folder = tmp_path / "run"
    slow_down(monkeypatch, [0.2, 0.01, 0.01])
    # Members know the speed of the slow one only after its first round.
    result = members(folder, 3, *UNEQUAL, "run.epochs=6", algorithm=algorithm)
    assert all(one["finished"] for one in result)
    paths = folder.glob("chain/??????/??????")
    records = [json.loads(path.read_text()) for path in paths]
    rounds = [record for record in records if record["kind"] == "round"]
    assert {1} < {record.get("chunks", 1) for record in rounds} <= {1, 2, 3, 4}
    message = replay(folder)
    assert "every digest is equal" in message
    assert checkpoint.digest(checkpoint.latest(folder)) in message
    last = max(record["round"] for record in rounds if record["place"] == 1)
    assert "every digest is equal" in replay(folder, 1, (last, last))
    steps = read(folder / "logs/000001/log.h5").steps["step"]
    assert (np.diff(np.ravel(steps)) == 1).all()


def test_only_members_have_a_period_that_follows_speed(tmp_path):
    with pytest.raises(JobError, match=naming('cadence.period = "auto"', "mpigossip join")):
        start_and_resume.train(
            job("cadence.period=auto", f"run.output={tmp_path}"), SingleProcess(), 2
        )


def test_the_time_of_a_round_excludes_waiting_for_a_chunk(tmp_path, monkeypatch):
    """A lease must last five rounds; rounds are measured without waits."""
    chunk = FolderExchange.chunk
    asked = []

    def late(live):
        asked.append(1)
        time.sleep(2.1 * (len(asked) == 2))
        return chunk(live)

    monkeypatch.setattr(FolderExchange, "chunk", late)
    assert join(tmp_path / "run", job(), lease_s=10.0, poll_s=0.05)["finished"]
    lease_of = joining.check_lease
    monkeypatch.setattr(joining, "check_lease", lambda _, round_s: lease_of(0.0, round_s))
    with pytest.raises(JobError, match=naming("members.lease_s = 0", "five times")):
        join(tmp_path / "other", job(), lease_s=30.0, poll_s=0.05)


def test_the_time_of_a_round_excludes_an_outage(tmp_path, monkeypatch):
    """All of the time is an outage here."""
    rounds = []
    monkeypatch.setattr(outages.Outages, "seconds", lambda self: time.monotonic())
    monkeypatch.setattr(joining, "check_lease", lambda _, round_s: rounds.append(round_s))
    assert join(tmp_path / "run", job("run.epochs=1"), lease_s=30.0, poll_s=0.05)["finished"]
    assert len(rounds) == 1 and abs(rounds[0]) < 1e-3


def test_a_member_reports_that_its_rounds_are_too_short_for_the_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(joining, "seconds_per_round", lambda disk: 100.0)
    assert join(tmp_path / "run", job("run.epochs=1"), lease_s=30.0, poll_s=0.05)["finished"]
    note = capsys.readouterr().err
    assert note.count("hint") == 1 and re.search(naming("100 s", "instead of 4"), note)


@pytest.mark.parametrize("steps", [66, 67])
def test_more_steps_than_the_epochs_give_are_reported(tmp_path, capsys, steps):
    made = job("run.epochs=3", f"run.steps={steps}")
    assert not join(tmp_path / "run", made, lease_s=30.0, stop=lambda: True)["finished"]
    note = capsys.readouterr().err
    is_noted = bool(re.search(naming("run.steps = 67", "run.epochs = 3", "66 steps"), note))
    assert is_noted == (steps > 66) and ("with run.epochs=4" in note) == is_noted


def test_a_member_leaves_and_another_continues(tmp_path, capsys):
    folder = tmp_path / "run"
    asked = []

    def stop():
        asked.append(1)
        return len(asked) > 9

    assert not join(folder, job(), lease_s=30.0, stop=stop)["finished"]
    export = ["checkpoint", "export", str(folder), "--out", str(tmp_path / "model.pt")]
    assert cli.main(export) == 2
    text = capsys.readouterr().err
    assert "has not ended" in text and "--place P --round R" in text
    assert cli.main([*export, "--place", "0", "--round", "1"]) == 0
    (one,) = members(folder, 1)
    assert one["finished"] and one["places"] == [1]
    capsys.readouterr()
    assert cli.main(export) == 0
    nodes = checkpoint.read_manifest(checkpoint.latest(folder)).n
    assert f"{nodes} of 2 places" in capsys.readouterr().out
    assert cli.main(["replay", str(folder), "--place", "0", "--rounds", "1:2"]) == 0
    assert "2 rounds of 1 place repeated" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["replay", str(folder), "--rounds", "2:1"])
    assert '"2:1": the first round' in capsys.readouterr().err
    log = read(folder / "logs" / "000001" / "log.h5")
    assert (log.steps["chunk"] >= 0).all() and len(log.steps["step"]) > 10
    assert np.isnan(log.steps["consensus_distance"]).all()  # a member does not know the average
    assert cli.main(["log", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("dsgd, 2 places\n") and one["digest"] in shown
    assert "step 44 (2.00 epochs), 2 places x 1 slot" in shown
    steps = shown.partition("\nmetrics of steps:\n\n")[2].partition("\n\n")[0]
    assert steps.split()[0] == "step" and "loss" in steps and len(steps.split("\n")) > 4
    assert re.search(
        r"^  44   2\.00 ", shown, re.M
    )  # the history does not count steps after the newest model
    assert cli.main(["report", str(folder)]) == 0
    page = capsys.readouterr() and (folder / "report.html").read_text()
    assert re.search(r"^ +0  \S+ +\d+  left$", page, re.M)
    assert re.search(r"^ +1  \S+ +\d+  open", page, re.M)
    assert re.search(r"^1 claim of chunks", page, re.M)
    both = read(folder / "log.h5")
    assert both.summary["digest"] == one["digest"] and both.summary["nodes"] == 2
    assert both.summary["seconds"] > np.ptp(log.steps["time"])  # from the first member's step
    assert both.evaluations["accuracy"].tolist() == [pytest.approx(one["accuracy"])]
    # the steps of a newcomer continue the steps of the model that it started from
    begun = both.steps["step"][np.isfinite(both.steps["loss"][:, 1])]
    known = both.steps["step"][np.isfinite(both.steps["loss"][:, 0])]
    assert begun[0] == 4 * ((known[-1] + 1) // 4) > 0 and (np.diff(begun) >= 1).all()


def test_a_place_that_another_member_has_closed_is_reported(tmp_path):
    begin(tmp_path)
    messages: list[str] = []
    one, other = (
        Place(RecordStore(tmp_path), TrainingPlan(9, 1, 0.0), report=messages.append)
        for _ in range(2)
    )
    for place in (one, other):
        place.join()
        place.start([], {"host": "vm"})
    other.refresh(one.number)
    other.fence(one.number)
    assert "silent; closed by place 1\n" in stays(tmp_path)
    assert [line.partition(":")[0] for line in messages] == [
        "place 0 has been silent for longer than its lease"
    ]


def test_a_job_that_fails_at_the_start_leaves_no_folder(tmp_path):
    with pytest.raises(JobError, match=naming("data.source")):
        join(tmp_path / "run", job("data.source=missing.h5"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("algorithm", "count"), [("gasloc", 1), ("dsgd", 2)])
def test_replay_starts_from_stored_models(tmp_path, capsys, algorithm, count):
    """The last round of a place needs its last model, an early round all earlier models."""
    folder = tmp_path / "run"
    members(folder, count, algorithm=algorithm)
    results = [json.loads(path.read_text()) for path in (folder / "chain").glob("*/*")]
    rounds = [(one["round"], one["place"]) for one in results if one["kind"] == "round"]
    last, place = max(rounds)
    messages = [replay(folder, place, (at, at)) for at in (last, last - 4)]
    begun = capsys.readouterr().err
    assert "repeating 1 round" in begun and "that they depend on" in begun
    assert "equal\nstarted from" in messages[0]
    if count == 1:
        assert "still has\ndigest" in messages[0]
        assert [int(one.split()[0]) for one in messages] == [1, last - 4]
    shutil.rmtree(folder / "models")
    assert int(replay(folder, place, (last, last)).split()[0]) >= last


def test_replay_detects_a_changed_record(tmp_path):
    folder = tmp_path / "run"
    members(folder, 1)
    record = folder / "chain/000000/000002"
    text = record.read_text()
    at = text.index('"digest": "') + 11
    record.unlink()
    record.write_text(text[:at] + "0" * 64 + text[at + 64 :])
    with pytest.raises(ReplayMismatch, match=naming("round 2", "place 0", "another model")):
        replay(folder)
    start = folder / "chain/000000/000000"
    other = start.read_text().replace('"threads": "', '"threads": "7')
    start.unlink()
    start.write_text(other)
    with pytest.raises(ReplayMismatch, match=naming("round 2", "threads")):
        replay(folder)
    record.unlink()
    for rounds in (None, (3, 3)):
        with pytest.raises(StoreError, match=naming("chain/000000/000002")):
            replay(folder, rounds=rounds)
    assert "1 round of" in replay(folder, rounds=(1, 1))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.name=dmsgd"], ('"dmsgd"', "dsgd", "noloco")),
        (["algorithm.name=diloco"], ('"diloco"', "dsgd, dmsgd-vanilla, noloco, gasloc")),
        (
            ["algorithm.name=my_module:my_algorithm"],
            ('"my_module:my_algorithm"', "one model", "dsgd"),
        ),
        (["cadence.name=gossip-pga"], ('cadence.name = "gossip-pga"', 'cadence.name = "every"')),
        (["algorithm.style=awc"], ('algorithm.style = "awc"', 'algorithm.style = "atc"')),
        (["node.wire=bf16"], ('node.wire = "bf16"', '"fp32"')),
        (["graph.name=ring"], ('graph.name = "ring"', '"one-peer-exponential"')),
        (["node.precision=fp16"], ('node.precision = "fp16"', "bf16")),
    ],
)
def test_jobs_that_members_cannot_train(tmp_path, settings, said):
    with pytest.raises(JobError, match=naming(said)):
        join(tmp_path / "run", job(*settings))


def test_a_file_system_without_hard_links_is_rejected(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(JobError, match=naming("hard links", "Operation not permitted")):
        join(tmp_path / "run", job())


@pytest.fixture(scope="module")
def finished_folder(tmp_path_factory):
    """Return the folder of a training that one member has finished; tests change copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    members(folder, 1)
    return folder


@pytest.fixture
def folder(finished_folder, tmp_path):
    return shutil.copytree(finished_folder, tmp_path / "run")


def in_job_file(old, new):
    """Return a change of a folder: a text in its copy of the job is replaced."""

    def change(folder):
        text = (folder / "job.toml").read_text()
        assert old in text
        (folder / "job.toml").write_text(text.replace(old, new, 1))

    return change


def let_others_write(folder):
    folder.chmod(0o777)


def of_other_files(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").touch()


def overwrite_the_end(folder):
    (folder / "END").write_text("{}")


def replace_by_a_file(folder):
    shutil.rmtree(folder)
    folder.touch()


def link_the_job_file(folder):
    (folder / "job.toml").rename(folder.parent / "moved")
    (folder / "job.toml").symlink_to(folder.parent / "moved")


def unchanged(folder):
    pass


def join_with_a_job(folder):
    join(folder, job())


def join_with_another_rate(folder):
    join(folder, job("schedule.lr=0.5"))


def replay_with_a_job(folder):
    replay(folder, job=job())


OTHER_VERSION = "another version or model"
CUSTOM = 'model.name = "os:system"'
name_custom_code = in_job_file('name = "mlp"', 'name = "os:system"')


REJECTED_FOLDERS = {
    "another job": (
        *(unchanged, join_with_another_rate),
        ("another job", "schedule.lr = 0.5", "0.003"),
    ),
    "writable by others": (let_others_write, join, "chmod go-w"),
    "other files, join": (of_other_files, join, ("belong", "no training")),
    "other files, join with a job": (of_other_files, join_with_a_job, ("belong", "no training")),
    "other files, replay": (of_other_files, replay, ("belong", "no training")),
    "no folder": (shutil.rmtree, join, "no training yet"),
    "a file": (replace_by_a_file, join_with_a_job, "is a file"),
    "another torch": (in_job_file("torch 2", "torch 1"), join, OTHER_VERSION),
    "another format": (in_job_file("members 2", "members 9"), join, OTHER_VERSION),
    "another model": (in_job_file("parameters ", "x"), join, OTHER_VERSION),
    "custom code, join": (name_custom_code, join, (CUSTOM, "own copy", "`mpigossip join")),
    "custom code, replay": (name_custom_code, replay, (CUSTOM, "own copy", "`mpigossip replay")),
    # the user's copy of the job does not name the code
    "custom code, replay with a job": (name_custom_code, replay_with_a_job, CUSTOM),
    "no record of the end": (overwrite_the_end, replay, ("END", "record")),
    "linked job, join": (link_the_job_file, join, "symbolic link"),
    "linked job, replay": (link_the_job_file, replay, "symbolic link"),
}
"""For each case: a change of the folder of a finished training, a call, and part of the message."""


@pytest.mark.parametrize("name", REJECTED_FOLDERS)
def test_folders_that_are_rejected(folder, name):
    change, call, message = REJECTED_FOLDERS[name]
    change(folder)
    with pytest.raises((JobError, StoreError), match=naming(message)):
        call(folder)


def test_a_lease_is_at_least_two_minutes():
    with pytest.raises(JobError, match=naming("120")):
        job("members.lease_s=10")


@on_each("words", [["resume", "FOLDER"], ["train", "digits", "run.output=FOLDER"]])
def test_commands_for_runs_name_the_command_for_members(folder, capsys, words):
    assert cli.main([word.replace("FOLDER", str(folder)) for word in words]) == 2
    assert f"continue it with `mpigossip join {folder}`" in capsys.readouterr().err


def test_devices_of_another_machine_are_read_from_the_folder(folder):
    in_job_file('"cpu:1"', '"gpu:1"')(folder)
    assert joining.job_there(RecordStore(folder)).node.devices == "gpu:1"


def test_only_a_graph_may_name_a_file(tmp_path):
    """A model named "file:evil" would import the module ``file``."""
    for setting, code in (("model.name", True), ("graph.name", False)):
        section, _, key = setting.partition(".")
        (tmp_path / "job.toml").write_text(f'[{section}]\n{key} = "file:evil"\n')
        with pytest.raises(JobError) as raised:
            check_member(joining.job_there(RecordStore(tmp_path)))
        assert (f'imports {setting} = "file:evil"' in str(raised.value)) == code


def test_a_placement_may_name_a_file(tmp_path):
    (tmp_path / "job.toml").write_text('[graph]\nplacement = "file:racks.txt"\n')
    assert joining.job_there(RecordStore(tmp_path)).graph.placement == "file:racks.txt"


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOTCONN, 75), (errno.EACCES, 2), every(errno.ESTALE, 75)]
)
def test_an_unreadable_folder_ends_the_command(tmp_path, monkeypatch, capsys, number, code):
    """Only errors that may disappear have the exit code that queues a job again."""
    folder = tmp_path / "run"
    real = os.open
    begin(folder)
    (folder / "job.toml").touch()

    def fails(path, *more, **settings):
        if str(path).endswith("job.toml"):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *more, **settings)

    monkeypatch.setattr(os, "open", fails)
    monkeypatch.setattr(outages, "START_S", 0.05)
    monkeypatch.setattr(outages.Outages.__init__, "__defaults__", (outages.print_note, 0.05))
    assert cli.main(["join", str(folder)]) == code
    said = capsys.readouterr().err
    assert said.count(os.strerror(number)) == 2 and said.count("trying again") == 1


def test_a_short_failure_of_the_log_does_not_end_a_member(tmp_path, monkeypatch):
    append = LogWriter.append
    failed = []

    def fails(writer, columns):
        if not failed:
            failed.append(1)
            raise StoreError("log.h5 can't be written") from OSError(errno.EIO, "input/output")
        append(writer, columns)

    monkeypatch.setattr(LogWriter, "append", fails)
    result = join(tmp_path / "run", job("run.epochs=1"), lease_s=30.0, poll_s=0.05)
    assert result["finished"] and failed
    steps = read(tmp_path / "run/logs/000000/log.h5").steps["step"]
    assert steps.tolist() == list(range(len(steps))) and len(steps) > 10


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def test_custom_code_is_replayed_with_the_users_copy_of_the_job(tmp_path, capsys):
    path = tmp_path / "job.toml"
    folder = str(tmp_path / "run")
    path.write_text(f'[model]\nname = "{__name__}:linear"\n[algorithm]\nname = "dsgd"\n')
    own = [str(path), "run.output=runs:1", *(one for one in SMALL if "model" not in one)]
    assert cli.main(["join", folder, *own]) == 0
    for command in ("join", "replay"):  # only the folder's copy names it
        assert cli.main([command, folder]) == 2
        assert f"own copy: `mpigossip {command} {folder} JOB.toml`" in capsys.readouterr().err
        assert cli.main([command, folder, "run.epochs=3"]) == 2
        assert '"run.epochs=3" is a setting' in capsys.readouterr().err
    assert cli.main(["replay", folder, *own, "run.epochs=3"]) == 2
    assert re.search(naming("another job", "run.epochs = 3", "2"), capsys.readouterr().err)
    own.remove("run.output=runs:1")  # copies may differ in this setting
    assert cli.main(["replay", folder, *own]) == 0
    assert "every digest is equal" in capsys.readouterr().out


def test_stop_ends_all_members_and_the_end_is_reported(tmp_path, capsys):
    folder = tmp_path / "run"
    path = tmp_path / "job.toml"
    path.write_text('[algorithm]\nname = "dsgd"\n')
    words = ["join", str(folder), str(path), *SMALL]
    folder.mkdir()
    (folder / "STOP").touch()
    assert cli.main(words) == 0
    assert "STOP" in capsys.readouterr().out
    (folder / "STOP").unlink()
    assert cli.main(words) == 0
    assert "accuracy" in capsys.readouterr().out
    assert cli.main(["join", str(folder)]) == 0  # no chunk remains
    assert "digest" in capsys.readouterr().out
    shutil.rmtree(folder / "checkpoints")
    assert cli.main(["join", str(folder)]) == 0


def test_a_later_member_writes_the_checkpoint_of_a_killed_one(tmp_path, monkeypatch):
    """The killed member had linked END; its files do not change for a lease."""
    folder = tmp_path / "run"

    def killed(*_, **__):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(joining.checkpoint, "commit", killed)
        with pytest.raises(SystemExit):
            join(folder, job("run.epochs=1"), lease_s=5.0, poll_s=0.05)
    assert checkpoint.latest(folder) is None
    given_up = joining._given_up
    both = threading.Barrier(2)
    writers = []
    results = []

    def at_once(*given):
        writes = given_up(*given)
        writers.append(writes)
        both.wait(60)
        return writes

    def later():
        results.append(join(folder, job("run.epochs=1"), lease_s=5.0, poll_s=0.05))

    monkeypatch.setattr(joining, "_given_up", at_once)
    again = [threading.Thread(target=later) for _ in range(2)]
    for thread in again:
        thread.start()
    for thread in again:
        thread.join(120)
    assert sorted(writers) == [False, True] and [one["finished"] for one in results] == [True] * 2
    assert checkpoint.latest(folder) is not None
