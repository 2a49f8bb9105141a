"""Forks of a recorded training of members, and blame."""

import json
import re
import shutil
from collections import Counter

import numpy as np
import pytest

from mpigossip import cli
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.members.place import BEHIND, Place, TrainingPlan
from mpigossip.members.records import RecordStore, Round, Start, Version
from mpigossip.runs.members import fork as forks
from mpigossip.runs.members import join as joining
from mpigossip.runs.members import replay as replays
from mpigossip.runs.members.fork import NO_CHANGE, Setting, fork
from mpigossip.runs.members.fork_schedule import Change, ForkSchedule, Turn
from mpigossip.runs.members.member import Member
from mpigossip.runs.members.replay import ReplayLog
from mpigossip.runs.summary import number
from mpigossip.store import checkpoint
from mpigossip.store.log import COLUMNS, LogWriter, read
from mpigossip.training.task import Classification
from tests.cases import naming
from tests.runs.test_join import UNEQUAL, lock_draws, members, slow_down


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a training by three members, and its digest."""
    folder = tmp_path_factory.mktemp("fork") / "run"
    with pytest.MonkeyPatch.context() as patched:
        lock_draws(patched)
        members(folder, 3, "members.keep_every=2", "run.epochs=6")
    return folder, checkpoint.digest(checkpoint.latest(folder))


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Return the folder of a training by a slow member and two fast ones, and its digest."""
    folder = tmp_path_factory.mktemp("fork") / "run"
    with pytest.MonkeyPatch.context() as patched:
        lock_draws(patched)
        slow_down(patched, [0.2, 0.01, 0.01])
        members(folder, 3, *UNEQUAL, "members.keep_every=2", "run.epochs=6")
    return folder, checkpoint.digest(checkpoint.latest(folder))


@pytest.mark.parametrize("cut", [0, 9])
def test_a_fork_of_unequal_rounds_without_a_change_has_the_digest_of_the_run(
    unequal, tmp_path, cut
):
    folder, digest = unequal
    log = log_of(folder, cut=cut)
    assert max(record.chunks for record in log.rounds.values()) > 1
    lines = fork(folder, cut, tmp_path / "new").split("\n")
    length = max(record.age for record in log.rounds.values())
    assert f" after chunk {cut} of {length} of " in lines[0]
    assert lines[-2].split() == ["digest", digest]


@pytest.mark.parametrize("settings", [(), ("cadence.period=2",), ("cadence.period=3",)])
@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_fork_of_unequal_rounds_trains_each_step_once(unequal, settings, leaves_out):
    """Chunks have two steps; chunks of a place that is left out are trained one by one."""
    folder, _ = unequal
    place = places_of(folder, cut=4)[0] if leaves_out else None
    log = log_of(folder, *settings, cut=4, without=place)
    steps = steps_of(log, period=2)
    assert steps == list(range(len(steps))) and 66 * 2 <= len(steps) < 66 * 2 + 3
    check_inputs(log, place)


@pytest.mark.parametrize("cut", [0, 9])
def test_members_of_a_fork_may_be_as_far_apart_as_in_its_past(unequal, monkeypatch, cut):
    """Ages up to the cut count the chunks of rounds of several chunks."""
    changes = []
    monkeypatch.setattr(
        forks, "Change", lambda *values: changes.append(Change(*values)) or NO_CHANGE
    )
    log_of(unequal[0], "cadence.period=2", cut=cut)
    assert changes[0].behind == (BEHIND * 4 if cut else BEHIND)


def test_a_fork_averages_models_that_were_far_apart_at_the_cut():
    """Place 1 was ten chunks behind, which is allowed if rounds may have four chunks."""
    rounds = {Version(place, 1): recorded_round(place, age) for place, age in ((0, 20), (1, 10))}
    turns = [Turn(20.0 + k, place, 20 + 2 * k + place, None) for k in range(4) for place in (0, 1)]
    starts = {place: Start(place=place, inputs=(), promise=1.0, about={}) for place in (0, 1)}
    ends = [Version(0, 1), Version(1, 1)]
    for behind, far in ((BEHIND, True), (4 * BEHIND, False)):
        change = Change(behind=behind)
        schedule = ForkSchedule(rounds, starts, rounds, turns, (), ends, change)
        ages = [schedule.rounds[version].age for version in schedule.end]
        assert (abs(ages[0] - ages[1]) == 10) == far
        assert any(record.peer for record in schedule.rounds.values()) != far


def recorded_round(place, age):
    """Return a round without a peer."""
    return Round(
        place=place,
        round=1,
        claim="",
        chunk=place,
        peer=(),
        age=age,
        progress=1,
        promise=1.0,
        step=2,
        file="",
        bytes=0,
        checksum="",
        parameters=0,
        digest="",
    )


def test_a_fork_does_not_choose_lengths_of_rounds(run, tmp_path):
    with pytest.raises(JobError, match=naming('cadence.period = "auto"', "fork")):
        fork(run[0], 0, tmp_path / "new", ["cadence.period=auto"])


@pytest.mark.parametrize("cut", [0, 3])
def test_a_fork_without_a_change_has_the_digest_of_the_run(run, tmp_path, cut):
    folder, digest = run
    lines = fork(folder, cut, tmp_path / "new").split("\n")
    length = max(record.age for record in log_of(folder).rounds.values())
    assert f" after round {cut} of {length} of {folder}" in lines[0]
    assert lines[1] == "changed: nothing" and lines[-1] == "the digest equals the training's"
    assert lines[-2].split() == ["digest", digest]
    rows = [line.split() for line in lines[5:7]]
    assert [name for name, *_ in rows] == ["loss", "accuracy"]
    assert all(of_fork == of_training for _, of_fork, of_training in rows)
    assert checkpoint.digest(checkpoint.latest(tmp_path / "new")) == digest


NUMBERS = ["loss", "lr", "kind", "gradient_norm", "accuracy", "chunk", "round", "history"]
NUMBERS += ["peer", "staleness"]
"""Columns that are equal in the logs of a training and of a fork that changes nothing."""


@pytest.mark.parametrize("training", ["run", "unequal"])
def test_a_fork_without_a_change_has_the_rows_of_the_recorded_logs(training, request, tmp_path):
    """Rows up to the cut are copied, and later ones are repeated; both have no times."""
    folder, digest = request.getfixturevalue(training)
    new = tmp_path / "new"
    fork(folder, 5, new)
    count = 0
    for path in sorted(new.glob("logs/*/log.h5")):
        steps = read(path).steps
        recorded = read(folder / path.relative_to(new)).steps
        rows = len(steps["step"])
        assert (steps["step"] == np.arange(rows)).all()
        for name in NUMBERS:
            # No record names the peer with which a place averaged after its last round.
            compared = rows - (name in ("peer", "staleness"))
            np.testing.assert_array_equal(steps[name][:compared], recorded[name][:compared], name)
        sent, recorded_sent = steps["bytes_sent"], recorded["bytes_sent"][:rows]
        np.testing.assert_array_equal(sent - sent[0], recorded_sent - recorded_sent[0])
        for name in ("time", "compute_s", "exchange_s", "samples_per_second"):
            assert np.isnan(steps[name]).all(), name
        count += rows
    assert count == 33 * 4
    joined = read(new / "log.h5")
    assert joined.summary["digest"] == digest and joined.summary["finished"]
    assert checkpoint.digest(joined.summary["checkpoint"]) == digest
    assert joined.evaluations["loss"][-1] == joined.summary["loss"]


def test_rows_that_a_killed_member_has_not_written_are_missing_in_a_fork(run, tmp_path):
    """Rows that exist are copied, unless rows after the cut would follow a gap."""
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    left_out, *others = places_of(folder, cut=5)
    for place in (left_out, *others):
        path = folder / f"logs/{place:06d}/log.h5"
        job = read(path).job
        path.unlink()
        log = LogWriter(path, nodes=1, job=job, columns=COLUMNS, environment={})
        log.append({name: np.full((3, 1), 1.0) for name in COLUMNS})
    fork(folder, 5, tmp_path / "new", without=left_out)
    past = Counter(r.place for r in log_of(folder).rounds.values() if r.age <= 5)
    for place in (left_out, *others):
        step = read(tmp_path / f"new/logs/{place:06d}/log.h5").steps["step"].tolist()
        first = 4 * past[place]
        expected = [0, 1, 2] if place == left_out else [*range(first, first + len(step))]
        assert step == expected and (place == left_out or len(step) > 3)
    assert past[left_out]


def test_the_logs_of_a_fork_with_another_period_count_its_steps(run, tmp_path):
    """Without the recorded logs, there are no rows up to the cut."""
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    fork(folder, 5, tmp_path / "with", ["cadence.period=3"])
    shutil.rmtree(folder / "logs")
    fork(folder, 5, tmp_path / "without", ["cadence.period=3"])
    past = 0
    for path in sorted((tmp_path / "with").glob("logs/*/log.h5")):
        steps = read(path).steps
        later = read(tmp_path / "without" / path.relative_to(tmp_path / "with")).steps
        before = len(steps["step"]) - len(later["step"])
        assert (steps["step"] == np.arange(len(steps["step"]))).all()
        for name in ("step", "loss", "chunk", "history"):
            np.testing.assert_array_equal(steps[name][before:], later[name], name)
        assert (np.diff(steps["history"][:, 0]) > 0).all()
        past += before
    assert past == 4 * sum(record.age <= 5 for record in log_of(folder).rounds.values())


def log_of(folder, *settings, cut=0, without=None):
    """Return the schedule of a fork."""
    disk = RecordStore(folder)
    with SingleProcess() as world:
        setting = Setting(disk, None, settings, world)
        try:
            return setting.log(disk, cut, without)
        finally:
            setting.close()


def test_a_fork_without_a_change_has_the_recorded_schedule(run):
    recorded = ReplayLog(Place(RecordStore(run[0]), TrainingPlan(33, 1, 30.0)))
    log = log_of(run[0], cut=4)
    assert log.rounds == recorded.rounds and log.starts == recorded.starts
    assert log.end == recorded.end and not log.is_changed
    assert all(log.round(version).age > 4 for version in log.later)


def test_the_progress_of_a_fork_does_not_say_that_rounds_are_equal(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(replays, "PROGRESS_ROUNDS", 10)
    fork(run[0], 0, tmp_path / "new", ["schedule.lr=0.001"])
    notes = capsys.readouterr().err
    assert re.search(r"^mpigossip: \d+ of 33 rounds are repeated$", notes, re.MULTILINE)
    assert "equal" not in notes


def steps_of(log, period=4):
    """Return the steps that the rounds of a fork train, in ascending order."""
    steps: list[int] = []
    for version, record in log.rounds.items():
        if log.chunks and version in log.later:
            assert record.chunks == 1
            steps += log.chunks[record.chunk]
        else:
            steps += range(record.chunk * period, (record.chunk + record.chunks) * period)
    return sorted(steps)


@pytest.mark.parametrize("period", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("cut", [0, 5])
def test_another_period_trains_each_step_once(run, period, cut):
    """If the new H does not divide the number of steps, the last chunk is completed."""
    log = log_of(run[0], f"cadence.period={period}", cut=cut)
    steps = steps_of(log)
    assert steps == list(range(len(steps))) and 33 * 4 <= len(steps) < 33 * 4 + period
    assert {len(chunk) for chunk in log.chunks} == {period}
    check_inputs(log)


def check_inputs(log, without=None):
    """Each round depends on older rounds only, and on no round of the place that is left out."""
    for version in log.later:
        for dependency in log.inputs(version):
            assert log.round(dependency).age < log.round(version).age
            assert dependency.place != without
    assert all(version in log.rounds and version.place != without for version in log.end)


def places_of(folder, cut):
    """Return the places with rounds after the cut, in ascending order.

    On a busy machine a member may lose its place and join again, so that numbers are missing.
    """
    return sorted({version.place for version in log_of(folder, cut=cut).later})


@pytest.mark.parametrize("index", [0, 1, 2])
def test_chunks_of_a_place_that_is_left_out_are_trained_by_others(run, index):
    places = places_of(run[0], cut=2)
    place = places[index]
    log = log_of(run[0], cut=2, without=place)
    assert steps_of(log) == list(range(33 * 4))
    assert {version.place for version in log.later} == set(places) - {place}
    check_inputs(log, place)
    assert sum(bool(log.round(version).peer) for version in log.later) > len(log.later) / 3


def test_another_graph_chooses_other_peers(run):
    recorded = log_of(run[0]).rounds
    log = log_of(run[0], "graph.name=random-matching")
    assert log.rounds.keys() == recorded.keys()
    assert [r.chunk for r in log.rounds.values()] == [r.chunk for r in recorded.values()]
    assert any(record.peer != recorded[version].peer for version, record in log.rounds.items())
    check_inputs(log)


@pytest.mark.parametrize(
    "changes",
    [
        ["schedule.lr=0.001"],
        ["cadence.period=2"],
        ["graph.name=random-matching"],
        ["--without", "PLACE"],
    ],
)
def test_forks_end_and_can_be_repeated(run, tmp_path, capsys, changes):
    folder, digest = run
    place = str(places_of(folder, cut=0)[1])
    changes = [place if argument == "PLACE" else argument for argument in changes]
    texts = []
    for name in ("a", "b"):
        command = ["replay", str(folder), "--fork", "0", *changes, "--to", str(tmp_path / name)]
        assert cli.main(command) == 0
        texts.append(capsys.readouterr().out.replace(str(tmp_path / name), "NEW"))
    assert texts[0] == texts[1] and "loss " in texts[0] and digest not in texts[0]
    assert cli.main(["replay", str(tmp_path / "a")]) == 2
    assert "is a fork: repeat it" in capsys.readouterr().err
    saved = json.loads((tmp_path / "a/fork.json").read_text())
    losses = [number(saved[name]["loss"]) for name in ("result", "result_of_run")]
    assert re.search(rf"^  loss +{losses[0]} +{losses[1]}$", texts[0], re.MULTILINE)
    assert saved["result"]["loss"] != saved["result_of_run"]["loss"]
    assert saved["digest"] in texts[0] and "the digest equals" not in texts[0]
    change = f"place {place} is left out" if "--without" in changes else changes[0]
    assert f"\nchanged: {change.partition('=')[0]}" in texts[0]
    if "schedule.lr=0.001" in changes:
        assert "changed: schedule.lr = 0.001, in the training 0.003\n" in texts[0]
    assert f"`mpigossip log plot {folder} NEW`" in texts[0]
    plot = ["log", "plot", str(folder), str(tmp_path / "a"), "--out", str(tmp_path / "both.png")]
    for command in (["log", "show", str(tmp_path / "a")], ["report", str(tmp_path / "a")], plot):
        assert cli.main(command) == 0, command
    text = capsys.readouterr().out
    assert losses[0] in text and "not known" in text and "nan" not in text
    assert (
        cli.main(["checkpoint", "export", str(tmp_path / "a"), "--out", str(tmp_path / "m.pt")])
        == 0
    )
    assert cli.main(["join", str(tmp_path / "a")]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--fork", "1000", "--to", "NEW"], "--fork 1000: the longest"),
        (["--fork", "2", "--without", "7", "--to", "NEW"], "--without 7: this place of"),
        (["--fork", "2", "model.name=lenet", "--to", "NEW"], "a fork can't change"),
        (["--fork", "2", "algorithm.name=noloco", "--to", "NEW"], "a fork can't change"),
        (["--fork", "2"], "--fork needs --to NEW"),
        (["--without", "2"], "--without and --to belong to a fork"),
        (["--blame", "--to", "NEW"], "--blame leaves out each place"),
        (["--blame", "schedule.lr=1"], "--blame changes no setting"),
        (["--fork", "2", "--audit", "0.1", "--to", "NEW"], "--audit excludes"),
        (["--audit", "0.1"], "members.keep_every = 2: an audit repeats"),
        (["--audit", "0.1", "--place", "0"], "omit --place and --rounds"),
    ],
)
def test_impossible_forks_are_rejected(run, tmp_path, capsys, arguments, text):
    given = [str(tmp_path / "new") if word == "NEW" else word for word in arguments]
    assert cli.main(["replay", str(run[0]), *given]) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_fork_by_an_earlier_version_has_no_logs(run, tmp_path, capsys):
    fork(run[0], 3, tmp_path / "a")
    shutil.rmtree(tmp_path / "a/logs")
    for command in (["log", "show"], ["report"], ["log", "plot"]):
        assert cli.main([*command, str(tmp_path / "a")]) == 2
        text = capsys.readouterr().err
        assert "has no logs" in text and f"`mpigossip log show {run[0]}`" in text


def test_a_program_is_replayed_by_itself(tmp_path, capsys):
    (tmp_path / "loop.toml").write_text("")
    command = ["replay", str(tmp_path), "--fork", "1", "--to", str(tmp_path / "new")]
    assert cli.main(command) == 2
    text = capsys.readouterr().err
    assert "cover jobs only" in text and "mpigossip.join(…, replay=True)" in text


class Shuffling(Member):
    """Member that uses the labels of other samples in the rounds of place 1."""

    def train(self, exchange, after=lambda record, chunk: None) -> None:
        place = exchange.place
        objective = self.trainer.replicas.objective
        task = objective.task
        if 1 in (place, getattr(place, "number", None)):
            objective.task = ShuffledLabels()
        try:
            super().train(exchange, after)
        finally:
            objective.task = task


class ShuffledLabels(Classification):
    def loss(self, model, batch):
        inputs, targets = batch
        return super().loss(model, (inputs, targets.roll(1, 0)))


def test_the_place_with_shuffled_labels_is_blamed_first(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    lock_draws(monkeypatch)
    monkeypatch.setattr(joining, "Member", Shuffling)
    monkeypatch.setattr(forks, "Member", Shuffling)
    members(folder, 4, "run.epochs=8", "members.claim_rounds=1")
    fork(folder, 5, tmp_path / "new")  # raises an error if a model differs from its record
    assert cli.main(["replay", str(folder), "--blame"]) == 0
    rows = capsys.readouterr().out.split("raises the loss by")[1].split("\n")
    assert rows[1].split()[0] == "1", rows
