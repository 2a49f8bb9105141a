"""The virtual clock: a column of simulated runs, which changes nothing else."""

import io
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mpigossip.analysis import panels, plot
from mpigossip.analysis.logged_runs import load
from mpigossip.cluster.nodes import racks
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.graphs import graph
from mpigossip.mixing.delayed import Faults
from mpigossip.runs import start_and_resume
from mpigossip.store.log import COLUMNS, VIRTUAL, read
from mpigossip.studies.drawing import _places
from mpigossip.studies.running import RunResult
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, subject
from mpigossip.training.machines import named
from mpigossip.training.time_model import Timing, normal
from tests.cases import naming, some

NODES = 4
SMALL = [
    "model.name=mlp",
    "data.source=synthetic",
    "data.samples=128",
    "data.test_samples=32",
    "data.batch=4",
    "run.epochs=3",
    "algorithm.name=dsgd",
    "schedule.warmup_epochs=0",
]
CLOCK = ["clock.network=1gbit", "clock.compute_s=0.01"]
UNEVEN = [*CLOCK, "clock.jitter=0.1", "clock.slow_times=5", "clock.slow_steps=3"]


def job(folder, *settings):
    return assemble.load({}, [*SMALL, f"run.output={folder}", *settings])


def trained(folder, *settings):
    """Return the summary and the log of a simulated run."""
    with SingleProcess() as alone:
        summary = start_and_resume.train(job(folder, *settings), alone, NODES)
    return summary, read(Path(folder) / "log.h5")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a run without a clock, one with uneven nodes, and its first 10 steps."""
    folder = tmp_path_factory.mktemp("clock")
    given = {"bare": (), "timed": UNEVEN, "begun": (*UNEVEN, "run.steps=10")}
    return folder, {name: trained(folder / name, *more) for name, more in given.items()}


def test_digests_and_columns_equal_those_of_a_run_without_a_clock(runs):
    (bare, without), (timed, log) = (runs[1][name] for name in ("bare", "timed"))
    assert timed["digest"] == bare["digest"] and timed["bytes_sent"] == bare["bytes_sent"]
    assert VIRTUAL not in without.steps and log.steps.keys() - without.steps.keys() == {VIRTUAL}
    for name in COLUMNS.keys() - {"samples_per_second"}:
        if not name.endswith("_s"):
            np.testing.assert_array_equal(log.steps[name], without.steps[name])
    assert log.units[VIRTUAL] == "s" and (np.diff(log.steps[VIRTUAL], axis=0) > 0).all()


CADENCES = ["always", "every", "every cadence.fragments=2", "cpsgd cadence.period=6"]
SHOWN = [("complete", CADENCES[0]), ("ring", CADENCES[1]), ("one-peer-exponential", CADENCES[2])]


@pytest.mark.parametrize(
    ("graph", "cadence"),
    some(itertools.product(["one-peer-exponential", "ring", "complete"], CADENCES), SHOWN),
)
def test_without_jitter_the_clock_equals_the_plan(tmp_path, graph, cadence):
    settings = [*CLOCK, f"graph.name={graph}", *f"cadence.name={cadence}".split()]
    _, log = trained(tmp_path, *settings)
    made = exchanges(subject(job(tmp_path, *settings))[0], NODES)
    step = Timing(made, named(job(tmp_path, *CLOCK).clock)).step_s()
    assert len(log.steps["step"]) == 24  # whole periods
    np.testing.assert_allclose(log.steps[VIRTUAL][-1], 24 * step, rtol=1e-9, err_msg=cadence)


def test_a_stopped_run_resumes_at_its_virtual_time(runs, tmp_path):
    folder = runs[0]
    (_, whole) = runs[1]["timed"]
    for name in ("parts", "fewer"):
        shutil.copytree(folder / "begun", tmp_path / name)
    with SingleProcess() as alone:
        start_and_resume.resume(tmp_path / "parts", ["run.steps=24"], alone, None)
    parts = read(tmp_path / "parts/log.h5")
    np.testing.assert_array_equal(parts.steps[VIRTUAL], whole.steps[VIRTUAL])
    with SingleProcess() as alone:  # other nodes continue at the time of the slowest one
        start_and_resume.resume(tmp_path / "fewer", ["run.steps=14"], alone, 3)
    fewer = read(tmp_path / "fewer/log.h5").steps[VIRTUAL]
    assert (fewer[10, :3] > whole.steps[VIRTUAL][9].max()).all() and np.isnan(fewer[10, 3])


def test_stragglers_delay_all_reduce_at_once_and_gossip_gradually(tmp_path):
    settings = [*CLOCK, "clock.slow_times=11", "clock.slow_steps=1000"]
    _, every = trained(tmp_path / "all", *settings, "algorithm.name=parallel")
    _, one = trained(tmp_path / "one", *settings)
    assert np.ptp(every.steps[VIRTUAL], axis=1).max() == 0
    late = one.steps[VIRTUAL] > 0.1
    assert late.sum(1)[:3].tolist() == [2, 4, 4] and every.steps[VIRTUAL][0].min() > 0.1


def test_a_straggler_that_makes_fewer_steps_delays_no_other_node(tmp_path):
    settings = [*CLOCK, "algorithm.name=gasloc", "cadence.period=8"]
    slowed = [*settings, "clock.slow_times=4", "clock.slow_steps=1000"]
    late = Faults(NODES, job(tmp_path).run.seed, 4.0, 1, 1000).costs(0).argmax()
    own = [2 if node == late else 8 for node in range(NODES)]
    _, even = trained(tmp_path / "even", *settings)
    _, waiting = trained(tmp_path / "waiting", *slowed)
    _, kept = trained(tmp_path / "kept", *slowed, f"cadence.period={own}")
    end = even.steps[VIRTUAL][-1].max()
    assert waiting.steps[VIRTUAL][-1].max() > 3 * end
    assert kept.steps[VIRTUAL][-1].max() == pytest.approx(end, rel=1e-9)


def test_plots_can_use_virtual_time_as_an_axis(runs):
    folder, _ = runs
    timed, mixed = (load([folder / "timed", folder / name]) for name in ("begun", "bare"))
    assert "virtual" in panels.clock(timed).label and "virtual" not in panels.clock(mixed).label
    end = timed[0].log.steps[VIRTUAL][-1].mean()
    assert timed[0].virtual_seconds(np.array([0, 24])) == pytest.approx([0, end])
    short = read(folder / "timed/log.h5", points=6).steps  # means of four steps each
    folded = load([folder / "timed"])[0]
    folded.log.steps.update(short)
    assert folded.virtual_seconds(np.array([12])) == pytest.approx(
        timed[0].virtual_seconds(np.array([12])), rel=0.15
    )
    assert timed[0].metrics == ["accuracy"]
    picture = io.BytesIO()
    plot.figure(timed).savefig(picture)
    assert picture.tell() > 20_000
    run = RunResult(read(folder / "timed/log.h5"))
    assert run.so_far("virtual_s")[-1] == pytest.approx(end)
    assert _places(run, "time") == pytest.approx(run.so_far("virtual_s"))
    with pytest.raises(JobError, match=naming("clock.network=10gbit")):
        _places(RunResult(read(folder / "bare/log.h5")), "time")


WRONG_VALUES = [
    ("compute_s", "0.1"),
    ("compute_s", -1.0),
    ("jitter", float("nan")),
    ("bandwidth", 0),
    ("combine_rate", 0.0),
    ("global_bandwidth", float("inf")),
    ("sources", []),
]
"""Values that a file of a machine can't have; a run would divide by them, or multiply them."""


def test_paths_in_the_home_of_the_user_are_expanded(tmp_path, monkeypatch):
    """A shell does not expand ~ in clock.network=~/m.json, and a job file is read without one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    named(job(tmp_path, *CLOCK).clock).save(tmp_path / "m.json")
    assert named(job(tmp_path, "clock.network=~/m.json").clock).compute_s == 0.01
    (tmp_path / "g.json").write_text('{"n": 2, "edges": [[0, 1]]}')
    path_graph = graph("file:~/g.json", 2)
    assert path_graph.n == 2 and path_graph.name == "file:~/g.json"
    (tmp_path / "racks").write_text("a left\nb right\n")
    assert racks("file:~/racks", ["a", "b"], []) == ["left", "right"]


def test_a_machine_is_a_name_or_a_file(tmp_path):
    machine = named(job(tmp_path, *CLOCK, "clock.bandwidth=5e6").clock)
    assert (machine.compute_s, machine.bandwidth, machine.latency_s) == (0.01, 5e6, 100e-6)
    assert machine.global_bandwidth == 5e6
    machine.save(tmp_path / "m.json")
    section = job(tmp_path, f"clock.network={tmp_path}/m.json", "clock.jitter=0.2").clock
    result = named(section)
    assert result.jitter == 0.2 and result.bandwidth == 5e6 and result.compute_s == 0.01
    (tmp_path / "wrong.json").write_text(json.dumps({"compute_s": 1}))
    for number, (key, value) in enumerate(WRONG_VALUES):
        changed = json.loads((tmp_path / "m.json").read_text()) | {key: value}
        (tmp_path / f"wrong{number}.json").write_text(json.dumps(changed))
        with pytest.raises(JobError, match=naming(f"wrong{number}.json", "not a file", key)):
            named(job(tmp_path, f"clock.network={tmp_path}/wrong{number}.json").clock)
    (tmp_path / "list.json").write_text("[1, 2]")
    wrong = [
        (["clock.network=1gbit"], "clock.compute_s"),
        (["clock.network=10gigabit"], '"10gigabit"'),
        ([f"clock.network={tmp_path}/wrong.json"], ("wrong.json", "not a file")),
        ([f"clock.network={tmp_path}/list.json"], ("list.json", "JSON object")),
    ]
    for settings, says in wrong:
        with pytest.raises(JobError, match=naming(says)):
            trained(tmp_path / "wrong", *settings)


def test_draws_are_normal_and_the_same_for_ever():
    values = normal((0, 5, 7), 20_000)
    assert abs(values.mean()) < 0.02 and values.std() == pytest.approx(1, abs=0.02)
    assert normal((1, 2, 3), 3) == pytest.approx(
        [0.6162913000388098, -2.8809248627412654, -1.6894876259741072], rel=1e-12
    )
