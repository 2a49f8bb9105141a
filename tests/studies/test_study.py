"""Studies: grids, seeds and rates; what is there isn't repeated; intervals, tables, curves."""

import contextlib
import itertools
import math
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import mpigossip
from mpigossip import cli
from mpigossip.config import JobError
from mpigossip.config.errors import Failure
from mpigossip.runs.lock import lock
from mpigossip.store import StoreError
from mpigossip.store import log as logs
from mpigossip.studies import Study, running, tables
from mpigossip.studies.drawing import _said
from mpigossip.studies.grid import Cell, arguments, cells_of
from mpigossip.studies.running import Runner, RunResult
from mpigossip.studies.search import Tried, _best, chosen
from mpigossip.studies.seeds import interval, many_to_one
from tests import launch
from tests.cases import on_each
from tests.launch import REPO

pytestmark = pytest.mark.usefixtures("warm")

SMALL = [
    "model.name=mlp",
    "data.source=synthetic",
    "data.samples=64",
    "data.test_samples=32",
    "data.batch=4",
    "run.epochs=2",
    "node.devices=cpu:1",
    "schedule.warmup_epochs=0",
    "schedule.milestones=[]",
]
GRID = {"algorithm.name": ["dsgd", "dmsgd"], "graph.name": ["ring"]}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a small job."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[log]\nflush_steps = 4\n")
    return tmp_path


def small(grid=GRID, **options):
    given = {"nodes": 3, "seeds": 2, "settings": SMALL, "processes": 2} | options
    return mpigossip.study("job.toml", grid, **given)


def when(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("log.h5")}


def test_a_grid_is_run_once_and_its_table_is_the_logs(here, capsys):
    study = small()
    assert len(study.rows) == 2 and study.axes == ["algorithm.name", "graph.name"]
    for cell, row in zip(study.cells, study.rows, strict=True):
        found = [
            logs.read(Path("runs/study-job") / cell.name / f"seed-{seed}/log.h5").summary
            for seed in (0, 1)
        ]
        values = [one["accuracy"] for one in found]
        assert row["accuracy"] == pytest.approx(np.mean(values)) and row["seeds"] == 2
        assert row["accuracy_std"] == pytest.approx(np.std(values, ddof=1))
        # Student's t of one degree of freedom
        half = 12.706 * np.std(values, ddof=1) / 2**0.5
        assert row["accuracy_high"] - row["accuracy"] == pytest.approx(half, rel=1e-3)
        assert row["MB"] == pytest.approx(np.mean([one["bytes_sent"] for one in found]) / 1e6)
        (sent, *_) = [run.so_far("bytes_sent") for run in study.runs(cell)]
        assert sent[-1] == pytest.approx(found[0]["bytes_sent"])
    assert capsys.readouterr().out.count("seed-") == 4
    before = when("runs")
    again = small(seeds=3)
    assert {path: at for path, at in when("runs").items() if path in before} == before
    assert capsys.readouterr().out.count("seed-2") == 2 and len(when("runs")) == 6
    assert [row["seeds"] for row in again.rows] == [3] * 2
    assert small().table() == study.table() and not capsys.readouterr().out


@pytest.mark.every
def test_what_was_killed_is_done_again_to_the_same_bits(here):
    grid = {"graph.name": ["ring", "complete"]}
    whole = small(grid, output="whole")
    program = (
        "import mpigossip\n"
        f"mpigossip.study('job.toml', {grid!r}, nodes=3, seeds=2, settings={SMALL!r},"
        " processes=1, output='killed')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    going = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while not when("killed") and going.poll() is None:
        time.sleep(0.02)
    going.send_signal(signal.SIGINT)
    going.wait()
    assert 1 <= len(when("killed")) < 4
    assert small(grid, output="killed").table("csv") == whole.table("csv")


def programs(folder):
    """Other processes that work there."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if place.readlink() == folder and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return found


@pytest.mark.every
@pytest.mark.skipif(sys.platform != "linux", reason="runs end with their study on Linux")
def test_runs_end_with_a_study_that_is_killed(here):
    settings = [*SMALL, "run.epochs=100000"]
    program = (
        "import mpigossip\n"
        f"mpigossip.study('job.toml', nodes=3, seeds=2, settings={settings!r}, processes=2,"
        " output='killed')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    going = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        while not when("killed") and going.poll() is None:
            time.sleep(0.05)
        assert len(programs(here)) >= 3
        going.kill()
        going.wait()
        launch.until(lambda: not programs(here), 60, "the programs' end")
    finally:
        for each in programs(here):
            os.kill(each, signal.SIGKILL)


@pytest.mark.every
def test_each_point_takes_its_own_rate_by_a_seed_that_is_not_reported(here):
    study = small({"algorithm.name": ["dsgd"]}, rates=[1e-4, 0.5, 1e9], judge="loss", seeds=1)
    assert study.rows[0]["lr"] == 0.5
    assert {(one.rate, math.isnan(one.judged)) for one in study.tried} == {
        (1e-4, False),
        (0.5, False),
        (1e9, True),
    }
    assert study.judge == "loss" and study.figures[0] == "loss"
    places = {path.parent.name for path in Path("runs").rglob("log.h5")}
    assert places == {"seed-0", "seed-1000"}


class Invented:
    """Runs whose training loss is least at one rate."""

    def __init__(self, job, best):
        self.job = job
        self.best = best

    def fill(self, keys):
        return {key: RunResult(self.log(abs(math.log(key[1] / self.best)))) for key in keys}

    def log(self, loss):
        steps = {"loss": np.full((40, 2), loss), "kind": np.tile([[0], [1]], (20, 2))}
        return SimpleNamespace(steps=steps, summary={"metrics": "accuracy"})


def test_a_search_goes_on_where_the_best_lies_at_an_end(here):
    settings = [*SMALL, "schedule.lr=1e-5"]
    (cell,), _ = cells_of(Path("job.toml"), {"algorithm.name": ["dsgd"]}, [2], settings, False)
    rates, tried = chosen([cell], "search", "train_loss", Invented(Path("job.toml"), 1.0))
    found = sorted(one.rate for one in tried)
    assert len(found) == 8 and found[-1] == rates[cell] == pytest.approx(32e-5)


@pytest.mark.parametrize(
    ("best", "further", "chosen_rate"),
    [(0.13, [0.0707, 0.141], 0.141), (2.0, [0.8, 1.6, 3.2, 1.13, 2.26], 2.26)],
)
def test_a_fine_search_tries_the_rates_between_too(here, best, further, chosen_rate):
    (cell,), _ = cells_of(Path("job.toml"), {"algorithm.name": ["dsgd"]}, [2], SMALL, False)
    runner = Invented(Path("job.toml"), best)
    rates, tried = chosen([cell], "fine", "train_loss", runner)
    assert rates == {cell: chosen_rate}
    assert [one.rate for one in tried[5:]] == pytest.approx(further)
    assert RunResult(runner.log(0.5)).last("exchanges") == 20


def test_a_run_that_diverges_is_a_result(here):
    study = small({"schedule.lr": [0.01, 1e9]}, seeds=1)
    good, bad = study.rows
    assert (good["diverged"], bad["diverged"]) == (0, 1) and math.isnan(bad["accuracy"])
    assert study.best() is good and study.ties() == []
    assert "1 of 1 diverged" in study.table() and "--" in study.table("latex")
    before = when("runs")
    assert small({"schedule.lr": [0.01, 1e9]}, seeds=1).rows[1]["diverged"] == 1
    assert when("runs") == before
    study.plot()


def test_many_to_one_is_dunnetts_test_with_seeds_as_blocks():
    random = np.random.default_rng(3)
    two = random.normal(size=(2, 5))
    assert many_to_one(two)[0] == pytest.approx(stats.ttest_rel(*two).pvalue, rel=1e-3)
    many = random.normal(size=(6, 200))
    many -= many.mean(0)  # no blocks, which scipy's has not; they cost a sixth of the freedom
    means = many.mean(1, keepdims=True)
    plain = means + np.sqrt(6 / 5) * (many - means)
    wanted = stats.dunnett(*plain[1:], control=plain[0], rng=0).pvalue
    assert many_to_one(many + random.normal(size=200)) == pytest.approx(wanted, abs=0.005)
    assert many_to_one(np.array([[1.0, 1], [2, 2], [1, 1]])).round(6).tolist() == [0, 1]


def test_equal_points_are_ties_though_they_are_many():
    random = np.random.default_rng(0)
    missed = 0
    for _ in range(30):
        study = study_of([[told(a) for a in row] for row in random.normal(size=(10, 5))])
        missed += len(study.ties()) < 9
    assert missed <= 9  # 4 expected; by a t-test for each point it is 17


def test_what_diverged_late_is_no_tie():
    study = study_of([[told(0.5), told(0.6)], [told(0.501), told(0.599)]])
    (other,) = study.ties()
    other["late"] = 1
    assert study.ties() == []


def test_a_run_that_diverges_late_is_told_from_one_that_converged():
    t = np.linspace(0, 1, 200)[:, None]
    noise = 0.05 * np.random.default_rng(0).standard_normal((200, 3))
    curves = {
        "converges": 2.3 - 1.5 * t,
        "slowly": 2.3 * (1 - 0.01 * t),
        "never learns": 2.3 + 0 * t,
        "rises a little": 0.8 + 1.5 * (t - 0.8) ** 2,
        "late": np.where(t < 0.7, 2.3 - 1.5 * t, 2.2),
        "beyond its start": np.where(t < 0.7, 2.3 - 1.5 * t, 50.0),
    }
    found = {
        name: RunResult(SimpleNamespace(steps={"loss": curve + noise})).late
        for name, curve in curves.items()
    }
    assert [name for name, late in found.items() if late] == ["late", "beyond its start"]
    tried = [Tried(None, 0.1, 0.4), Tried(None, 0.2, 0.5, late=True), Tried(None, 0.3, math.nan)]
    assert _best(tried, "accuracy") == 0.1 and _best(tried[1:], "accuracy") == 0.2


def test_what_rounding_leaves_of_equal_values_is_no_interval():
    rows = [{"MB": 227.08224, "MB_high": 227.08224 + 3e-14}, {"MB": 99.34848, "MB_high": 99.34848}]
    assert tables.column(rows, "MB") == ["227.08", "99.35"]
    rows[0]["MB_high"] = 228.0
    assert tables.column(rows, "MB") == ["227.08 ± 0.92", "99.35"]


def test_labels_as_latex_has_to_have_them():
    row = tables.Row(["κ^2~{50 %}_\\", "1"], 1, "", False)
    words = tables.latex(["graph", "loss"], [row], 1)
    letter = r"\ensuremath{\kappa}"
    hat = r"\textasciicircum{}"
    tilde = r"\textasciitilde{}"
    assert letter + hat + "2" + tilde + r"\{50 \%\}\_\textbackslash{} & 1 \\" in words


def test_tables_and_curves_of_the_command_and_of_python(here, capsys):
    methods = {"one": "algorithm.name=dsgd", "two & a half": "algorithm.name=d2"}
    settings = [*SMALL, "graph.name=ring"]
    lines = [f"{name!r} = {value!r}" for name, value in methods.items()]
    text = f'job = "job.toml"\nnodes = [2, 3]\nseeds = 2\nsettings = {settings!r}\n[grid.method]\n'
    Path("study.toml").write_text(text + "\n".join(lines))
    assert cli.main(["study", "study.toml", "--out", "found"]) == 0
    said = capsys.readouterr().out
    assert "best by accuracy: " in said and "two & a half" in said
    there = {path.name for path in Path("found").iterdir() if path.is_file()}
    assert there == {"lock", "table.csv", "table.tex", "accuracy.png", "loss.png"}
    before = when("found")
    study = small({"method": methods}, nodes=[2, 3], settings=settings, output="found")
    assert when("found") == before
    assert study.axes == ["method", "nodes"]
    assert study.table().splitlines()[0].split()[:2] == ["method", "nodes"]
    latex = study.table("latex")
    assert r"two \& a half & 2" in latex and r"\pm" in latex
    assert (r"\mathbf" in latex) == (len(study.ties()) < 3)
    header, *lines = study.table("csv").splitlines()
    assert header.startswith("method,nodes,seeds,diverged,late,accuracy,") and len(lines) == 4
    data = study.dataset()
    assert data["accuracy"].shape == (4, 2)
    assert list(data["method"].values[:2]) == ["one", "two & a half"]
    assert study.frame()["method"][0] == "one"
    for x in ("step", "epoch", "bytes"):
        made = study.plot("consensus_distance", x, out=here / f"{x}.png")
        assert len(made.axes[0].lines) == 4 and (here / f"{x}.png").stat().st_size > 5000
    assert made._repr_png_()[1:4] == b"PNG" and "<pre>" in study._repr_html_()
    with pytest.raises(JobError, match="no such figure"):
        study.plot("beauty")
    with pytest.raises(JobError, match="choose one of text, csv, latex"):
        study.table("html")


def test_a_single_evaluation_is_drawn_as_a_point_with_its_interval():
    runs = [[told(0.5), told(0.6)], [told(0.7), told(0.8)]]
    for one in itertools.chain(*runs):
        one.log.evaluations = {name: v[-1:] for name, v in one.log.evaluations.items()}
    (axes,) = study_of(runs).plot().axes
    points = [bars.lines[0].get_ydata().item() for bars in axes.containers]
    assert points == pytest.approx([0.55, 0.75])
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert low == 0 and high == 1  # as far as an accuracy goes
    assert axes.containers[0].lines[2][0].get_alpha() is None


@on_each(
    ("axis", "label", "said"),
    [
        ("nodes", "8", "n = 8"),
        ("graph.slack", "0.05", "slack = 0.05"),
        ("schedule.lr", "1e-3", "lr = 1e-3"),
        ("node.vmap", "True", "vmap = True"),
        ("graph.name", "base-2", "base-2"),
        ("graph.name", "one-peer-exponential", "one-peer exponential"),
        ("algorithm.name", "dsgd", "D-PSGD"),
        ("method", "dsgd", "dsgd"),  # a label of the user's
        ("method", "D²", "D²"),
        ("method", "e", "e"),
    ],
)
def test_a_label_that_says_nothing_by_itself_is_named(axis, label, said):
    assert _said(axis, label) == said


def cells(**sizes):
    """The points of a grid of axes with so many labels."""
    labels = itertools.product(*[[f"{axis}{k}" for k in range(sizes[axis])] for axis in sizes])
    return [Cell(tuple(zip(sizes, each, strict=True)), (), 3) for each in labels]


def told(accuracy, loss=0.5, late=False, sent=12345678):
    """A run that nobody made: its log has these figures at both of its evaluations."""
    steps = {"loss": np.full((40, 3), 1.0), "step": np.arange(40)}
    steps["loss"][:20] = 1.5
    steps["loss"][-8:] += late
    figures = {"accuracy": accuracy, "loss": loss}
    evaluations = {"step": np.array([20, 40]), "epoch": np.array([1.0, 2.0])}
    evaluations |= {name: np.full(2, value) for name, value in figures.items()}
    summary = figures | {"metrics": "accuracy", "bytes_sent": sent, "steps": 40}
    job = "[schedule]\nscale = 'linear'\nreference_batch = 128\n"
    return RunResult(
        SimpleNamespace(steps=steps, evaluations=evaluations, summary=summary, job=job)
    )


def study_of(runs, rate=None, tried=()):
    """A study whose points have these runs, one a seed; rows of a list share an axis."""
    points = cells(method=len(runs))
    seeds = range(len(runs[0]))
    found = {
        (c, rate, k): one for c, row in zip(points, runs, strict=True) for k, one in enumerate(row)
    }
    return Study(points, dict.fromkeys(points, rate), seeds, found, None, tried, {}, Path())


def test_a_band_of_what_is_above_0_stays_above_it_and_curves_have_names_and_markers():
    made = study_of([[told(0.9, 0.01), told(0.9, 1.0)], [told(0.9, 0.4), told(0.9, 0.6)]]).plot(
        "loss"
    )
    (axes,) = made.axes
    for line, band, (mean, half) in zip(
        axes.lines, axes.collections, [(0.505, 6.29), (0.5, 1.27)], strict=True
    ):
        heights = band.get_paths()[0].vertices[:, 1]
        low = mean**2 / (mean + half)
        high = mean + half
        assert (heights.min(), heights.max()) == pytest.approx((low, high), rel=2e-3)
        assert len(line.get_marker()) == 1
    study = study_of([[told(0.9), told(0.8)]])
    for one in study.runs(study.cells[0]):
        one.log.evaluations["consensus_distance"] = np.array([1.0, 0.1])
    assert study.plot("consensus_distance").axes[0].get_ylabel() == "consensus distance"


def test_no_row_is_bold_where_all_are_equal_and_a_column_has_equal_decimals():
    study = study_of([[told(0.9, 1.0), told(0.8, 2.0)], [told(0.91, 0.1), told(0.79, 0.11)]])
    latex = study.table("latex")
    assert "mathbf" not in latex and "% no point can be told from the best accuracy" in latex
    losses = [line.split("&")[2].strip(" $") for line in latex.splitlines() if "method" in line][1:]
    assert losses == [r"1.5 \pm 6.4", r"0.1 \pm 0.1"]
    sent = study_of([[told(0.9, sent=9_876_543)], [told(0.9, sent=123_456_789)]]).table()
    assert [line.split()[-1] for line in sent.splitlines()[1:3]] == ["9.877", "123.457"]


class Ends(Runner):
    """Its runs end at once with a code; `begun` are their folders."""

    def __init__(self, folder, code, said=""):
        super().__init__(Path("job.toml"), Path(folder), 2)
        self.code = code
        self.said = said
        self.begun = []

    def _start(self, key):
        place = self.place(key)
        place.mkdir(parents=True)
        (place / "output.txt").write_text(self.said)
        self.begun.append(place)
        return subprocess.Popen([sys.executable, "-SEc", f"raise SystemExit({self.code})"])


def test_how_runs_end(here, capsys):
    cell = Cell((("method", "a"),), (), 3)
    keys = [(cell, None, seed) for seed in (0, 1, 2)]
    with pytest.raises(Failure, match="ended with code 1: mpigossip: the loss of node"):
        Ends("said", 1, "mpigossip: the loss of node 3 is in the text of another failure").fill(
            keys
        )
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == "said: 3 of 3 runs are missing; up to 2 at once, output in output.txt of each"
    runner = Ends("lost", running.LOST, "mpigossip: anything")
    with pytest.raises(Failure, match="its log is not complete"):  # there is none
        runner.fill(keys)
    assert [(one / "diverged.txt").exists() for one in runner.begun] == [True] * 3
    small, large = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, large))
    try:
        with pytest.raises(StoreError, match="full can't be written: File too large; free space"):
            Ends("full", 1).fill(keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, large))
    with (
        lock(Path("two"), "output") as _,
        pytest.raises(JobError, match='output: "two" is in use by'),
    ):
        (busy := Ends("two", 0)).fill(keys)
    assert not busy.begun


def test_a_dry_run_of_a_file_prints_commands_and_makes_nothing(here, capsys):
    Path("jobs").mkdir()
    text = """job = "job.toml"
seeds = 2
output = "found"
settings = ["data.source=synthetic", "schedule.lr=0.5"]
[grid.method]
"D²" = "algorithm.name=d2 algorithm.lazy=true"
"DSGT" = "algorithm.name=dsgt"
"""
    Path("jobs/study.toml").write_text(text, "utf-8")
    before = {*Path().rglob("*")}
    assert cli.main(["study", "jobs/study.toml", "--dry-run"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "found: 4 of 4 runs are missing"
    assert lines[1] == (
        "mpigossip simulate job.toml --nodes 8 data.source=synthetic schedule.lr=0.5 "
        "algorithm.name=d2 algorithm.lazy=true run.seed=1 'run.output=found/D²_n8/seed-1'"
    )
    assert len(lines) == 4 and {*Path().rglob("*")} == before
    Path("jobs/old.toml").write_text(f"together = true\n{text}", "utf-8")
    assert cli.main(["study", "jobs/old.toml", "--dry-run"]) == 2
    assert "together: removed; leave it out; seeds run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["simulate", "job.toml", "--nodes", "2", "--seeds", "0,1"])
    assert "--seeds: removed; `mpigossip study` runs" in capsys.readouterr().err
    Path("jobs/job.toml").write_text("")  # beside the file, as it was found always
    assert arguments(Path("jobs/study.toml"), mpigossip.study)["job"] == Path("jobs/job.toml")


def test_a_task_without_metrics_is_judged_by_its_loss_and_what_has_no_curve_is_not_drawn():
    (one,) = runs = [told(0.9)]
    study = study_of([runs])
    assert study.curves == study.figures == ["accuracy", "loss"]
    study.judge = "exchanges"
    assert study.figures == ["exchanges", "accuracy", "loss"]
    assert study.curves == ["accuracy", "loss"]
    one.log.summary["metrics"] = ""
    assert study_of([runs]).judge == "loss"


def test_which_of_a_metric_of_ones_own_is_better_is_said():
    runs = [told(0.9), told(0.9)]
    for run, overlap in zip(runs, (0.2, 0.7), strict=True):
        run.log.summary.update(metrics="overlap", overlap=overlap)
        run.log.evaluations["overlap"] = np.full(2, overlap)
    found = {(c, None, 0): run for c, run in zip(cells(method=2), runs, strict=True)}
    given = cells(method=2), dict.fromkeys(cells(method=2)), [0], found
    assert Study(*given, None, (), {}, Path()).judge == "loss"
    for larger, best in ((True, 0.7), (False, 0.2), (None, 0.2)):
        assert Study(*given, "overlap", (), {}, Path(), larger).best()["overlap"] == best


def test_a_table_says_what_its_figures_are_and_what_was_lost():
    good = [told(0.9, 0.25), told(0.91, 0.25)]
    tie = [told(0.88), told(0.92)]
    late = [told(0.5, late=True), told(0.52, late=True)]
    points = cells(method=5)
    tried = [Tried(points[2], 0.1, 0.6, late=True), Tried(points[2], 1.0, math.nan)]
    tried += [Tried(points[3], 0.1, 0.6), Tried(points[3], 1.0, math.nan)]
    runs = [good, tie, late, [RunResult(None), told(0.5)], late[::-1]]
    study = study_of(runs, rate=0.1, tried=tried)
    comments, lines = study.table("latex").split(r"\begin{tabular}")
    assert comments.splitlines() == [
        "% ±: half the 95 % interval of the mean of 2 seeds (Student's t); n = 3, 40 steps",
        "% diverged late: lost again over half of what they had learnt",
        "% bold: can't be told from the best accuracy (Dunnett's test, paired by seed)",
    ]
    assert lines.splitlines()[2:] == [
        r"method & lr per 128 samples & accuracy & loss & MB a node \\",
        r"\midrule",
        r"method0 & 0.1 & $\mathbf{0.91 \pm 0.06}$ & 0.2500 & 12.35 \\",
        r"method1 & 0.1 & $\mathbf{0.90 \pm 0.25}$ & 0.5000 & 12.35 \\",
        r"method2 & 0.1 & $0.51 \pm 0.13$\rlap{$^{\dagger}$} & 0.5000 & 12.35 \\",
        r"method3 & 0.1 & 0.50\rlap{$^{\ddagger}$} & 0.5000 & 12.35 \\",
        r"method4 & 0.1 & $0.51 \pm 0.13$\rlap{$^{\S}$} & 0.5000 & 12.35 \\",
        r"\bottomrule",
        r"\multicolumn{5}{l}{\footnotesize $^{\dagger}$ "
        r"2 of 2 diverged late; no tried rate converged} \\",
        r"\multicolumn{5}{l}{\footnotesize $^{\ddagger}$ 1 of 2 diverged} \\",
        r"\multicolumn{5}{l}{\footnotesize $^{\S}$ 2 of 2 diverged late} \\",
        r"\end{tabular}",
    ]
    assert study.table("latex").endswith("\n")
    text = study.table().splitlines()
    assert [line.endswith("12.35") for line in text[1:3]] == [True, True]
    assert text[3].endswith("  †") and text[6] == "† 2 of 2 diverged late; no tried rate converged"
    assert text[9:] == [line.removeprefix("% ") for line in comments.splitlines()[:2]]
    one = study_of([[told(0.9)]]).table("latex")
    assert one.startswith("% one seed, no intervals; n = 3, 40 steps\n% bold: the best accuracy\n")
    assert r"$\mathbf{0.9000}$" in one


@pytest.mark.parametrize(
    ("grid", "options", "words"),
    [
        ({"graph.weight": ["ring"]}, {}, "graph.weight"),
        ({"method": ["dsgd"]}, {}, '"method" is no setting'),
        ({"graph.name": "ring"}, {}, "an axis is a list"),
        ({"algorithm.beta": 0.9}, {}, "beta = 0.9: an axis is a list"),
        ({}, {"nodes": "8"}, "nodes = '8': needs a whole number"),
        ({}, {"seeds": 2.5}, "seeds = 2.5: needs a whole number"),
        ({}, {"seeds": 0}, "seeds: needs at least one"),
        ({"algorithm.name": ["decentlam", "dsgd"]}, {}, "static"),
        ({}, {"nodes": [0]}, "at least 1"),
        ({}, {"rates": "best"}, '"search"'),
        ({}, {"rates": np.array([0.1, -1])}, "above 0"),
        ({}, {"rates": ["0.1", 0.2]}, "above 0"),
        ({"run.epochs": [1, 1]}, {}, "the same labels"),
        ({"lr": {"low": "schedule.lr=0.01"}}, {}, "is a column of the table"),
    ],
)
def test_mistakes_are_found_before_anything_runs(here, grid, options, words):
    with pytest.raises(JobError, match=words):
        small(grid, **options)
    assert not Path("runs").exists()


def test_numbers_of_numpy_are_numbers(here):
    grid = {"schedule.lr": np.geomspace(0.01, 1, 3), "data.batch": np.array([4, 8])}
    found, _ = cells_of(Path("job.toml"), grid, [2], [], False)
    assert found[0].settings == ("schedule.lr=0.01", "data.batch=4") and len(found) == 6


def test_points_that_do_not_go_together_can_be_left_out(here):
    cells, unfit = cells_of(
        Path("job.toml"), {"algorithm.name": ["decentlam", "dsgd"]}, [4], SMALL, True
    )
    assert [cell.name for cell in cells] == ["dsgd_n4"] and "static" in unfit["decentlam_n4"]


@pytest.mark.every
def test_a_folder_of_another_study_is_not_overwritten(here):
    small({}, seeds=1)
    with pytest.raises(Failure, match="holds a run of another job"):
        small({}, seeds=1, settings=[*SMALL, "run.epochs=3"])
    with pytest.raises(JobError, match='judge = "beauty".*accuracy'):
        small({}, seeds=1, judge="beauty")


def test_an_interval_needs_two_seeds():
    mean, half = interval(np.array([[1.0, 2.0]]))
    assert mean.tolist() == [1, 2] and np.isnan(half).all()
    mean, half = interval(np.array([[1.0], [2.0], [3.0]]))
    assert mean == 2 and half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


def test_runs_go_side_by_side_as_cores_allow(here):
    assert Runner(Path("job.toml"), Path("runs")).processes == len(os.sched_getaffinity(0))
