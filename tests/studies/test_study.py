"""Studies: grids, seeds, rates, existing runs, intervals, tables and curves."""

import contextlib
import itertools
import math
import os
import re
import resource
import shutil
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
from mpigossip.studies.drawing import _label_text
from mpigossip.studies.grid import Cell, arguments, cells_of
from mpigossip.studies.running import Runner, RunResult
from mpigossip.studies.search import Trial, best_rate, chosen
from mpigossip.studies.seeds import confidence_band, interval, many_to_one
from tests import launch
from tests.cases import naming, on_each
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
def job_folder(tmp_path, monkeypatch):
    """Return a folder with a small job, the current one."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[log]\nflush_steps = 4\n")
    return tmp_path


def small(grid=GRID, **options):
    arguments = {"nodes": 3, "seeds": 2, "settings": SMALL, "processes": 2} | options
    return mpigossip.study("job.toml", grid, **arguments)


def log_times(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("log.h5")}


def test_a_grid_is_run_once_and_its_table_is_computed_from_the_logs(job_folder, capsys):
    study = small()
    assert len(study.rows) == 2 and study.axes == ["algorithm.name", "graph.name"]
    for cell, row in zip(study.cells, study.rows, strict=True):
        summaries = [
            logs.read(Path("runs/study-job") / cell.name / f"seed-{seed}/log.h5").summary
            for seed in (0, 1)
        ]
        values = [summary["accuracy"] for summary in summaries]
        assert row["accuracy"] == pytest.approx(np.mean(values)) and row["seeds"] == 2
        assert row["accuracy_std"] == pytest.approx(np.std(values, ddof=1))
        # Student's t with one degree of freedom
        half = 12.706 * np.std(values, ddof=1) / 2**0.5
        assert row["accuracy_high"] - row["accuracy"] == pytest.approx(half, rel=1e-3)
        assert row["MB"] == pytest.approx(
            np.mean([summary["bytes_sent"] for summary in summaries]) / 1e6
        )
        (sent, *_) = [run.so_far("bytes_sent") for run in study.runs(cell)]
        assert sent[-1] == pytest.approx(summaries[0]["bytes_sent"])
    assert capsys.readouterr().out.count("seed-") == 4
    before = log_times("runs")
    again = small(seeds=3)
    assert {path: time for path, time in log_times("runs").items() if path in before} == before
    assert capsys.readouterr().out.count("seed-2") == 2 and len(log_times("runs")) == 6
    assert [row["seeds"] for row in again.rows] == [3] * 2
    assert small().table() == study.table() and not capsys.readouterr().out


@pytest.mark.every
def test_a_killed_study_continues_with_bitwise_identical_results(job_folder):
    grid = {"graph.name": ["ring", "complete"]}
    complete = small(grid, output="complete")
    program = (
        "import mpigossip\n"
        f"mpigossip.study('job.toml', {grid!r}, nodes=3, seeds=2, settings={SMALL!r},"
        " processes=1, output='killed')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    while not log_times("killed") and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.wait()
    assert 1 <= len(log_times("killed")) < 4
    assert small(grid, output="killed").table("csv") == complete.table("csv")


def processes_in(folder):
    """Return the IDs of other processes whose current folder is ``folder``."""
    identifiers = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder and int(path.parent.name) != os.getpid():
                identifiers.append(int(path.parent.name))
    return identifiers


@pytest.mark.every
@pytest.mark.skipif(sys.platform != "linux", reason="runs end with their study on Linux")
def test_runs_end_with_a_study_that_is_killed(job_folder):
    settings = [*SMALL, "run.epochs=100000"]
    program = (
        "import mpigossip\n"
        f"mpigossip.study('job.toml', nodes=3, seeds=2, settings={settings!r}, processes=2,"
        " output='killed')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        while not log_times("killed") and process.poll() is None:
            time.sleep(0.05)
        assert len(processes_in(job_folder)) >= 3
        process.kill()
        process.wait()
        launch.until(lambda: not processes_in(job_folder), 60, "the end of the processes")
    finally:
        for identifier in processes_in(job_folder):
            os.kill(identifier, signal.SIGKILL)


@pytest.mark.every
def test_the_rate_of_each_point_is_chosen_with_a_seed_that_is_not_reported(job_folder):
    study = small({"algorithm.name": ["dsgd"]}, rates=[1e-4, 0.5, 1e9], judge="loss", seeds=1)
    assert study.rows[0]["lr"] == 0.5
    assert {(trial.rate, math.isnan(trial.judged)) for trial in study.tried} == {
        (1e-4, False),
        (0.5, False),
        (1e9, True),
    }
    assert study.judge == "loss" and study.figures[0] == "loss"
    folders = {path.parent.name for path in Path("runs").rglob("log.h5")}
    assert folders == {"seed-0", "seed-1000"}


class SyntheticRunner:
    """Runner whose runs have the smallest training loss at one rate."""

    def __init__(self, job, best):
        self.job = job
        self.best = best

    def fill(self, keys, about=""):
        return {key: RunResult(self.log(abs(math.log(key[1] / self.best)))) for key in keys}

    def log(self, loss):
        steps = {"loss": np.full((40, 2), loss), "kind": np.tile([[0], [1]], (20, 2))}
        return SimpleNamespace(steps=steps, summary={"metrics": "accuracy"})


def test_a_search_continues_if_the_best_rate_is_the_last_one(job_folder):
    settings = [*SMALL, "schedule.lr=1e-5"]
    (cell,), _ = cells_of(Path("job.toml"), {"algorithm.name": ["dsgd"]}, [2], settings, False)
    rates, tried = chosen([cell], "search", "train_loss", SyntheticRunner(Path("job.toml"), 1.0))
    tried_rates = sorted(trial.rate for trial in tried)
    assert len(tried_rates) == 8 and tried_rates[-1] == rates[cell] == pytest.approx(32e-5)


@pytest.mark.parametrize(
    ("best", "further", "chosen_rate"),
    [(0.13, [0.0707, 0.141], 0.141), (2.0, [0.8, 1.6, 3.2, 1.13, 2.26], 2.26)],
)
def test_a_fine_search_also_tries_rates_in_between(job_folder, best, further, chosen_rate):
    (cell,), _ = cells_of(Path("job.toml"), {"algorithm.name": ["dsgd"]}, [2], SMALL, False)
    runner = SyntheticRunner(Path("job.toml"), best)
    rates, tried = chosen([cell], "fine", "train_loss", runner)
    assert rates == {cell: chosen_rate}
    assert [trial.rate for trial in tried[5:]] == pytest.approx(further)
    assert RunResult(runner.log(0.5)).last("exchanges") == 20


def test_a_run_that_diverges_is_a_result(job_folder):
    study = small({"schedule.lr": [0.01, 1e9]}, seeds=1)
    good, bad = study.rows
    assert (good["diverged"], bad["diverged"]) == (0, 1) and math.isnan(bad["accuracy"])
    assert study.best() is good and study.ties() == []
    assert "1 of 1 diverged" in study.table() and "--" in study.table("latex")
    before = log_times("runs")
    assert small({"schedule.lr": [0.01, 1e9]}, seeds=1).rows[1]["diverged"] == 1
    assert log_times("runs") == before
    study.plot()


def test_many_to_one_is_dunnetts_test_with_seeds_as_blocks():
    random = np.random.default_rng(3)
    two = random.normal(size=(2, 5))
    assert many_to_one(two)[0] == pytest.approx(stats.ttest_rel(*two).pvalue, rel=1e-3)
    many = random.normal(size=(6, 200))
    many -= many.mean(0)  # scipy has no blocks, which cost a sixth of the degrees of freedom
    means = many.mean(1, keepdims=True)
    without_blocks = means + np.sqrt(6 / 5) * (many - means)
    expected = stats.dunnett(*without_blocks[1:], control=without_blocks[0], rng=0).pvalue
    assert many_to_one(many + random.normal(size=200)) == pytest.approx(expected, abs=0.005)
    assert many_to_one(np.array([[1.0, 1], [2, 2], [1, 1]])).round(6).tolist() == [0, 1]


def test_many_equal_points_are_ties():
    random = np.random.default_rng(0)
    missed = 0
    for _ in range(30):
        study = study_of([[run_of(a) for a in row] for row in random.normal(size=(10, 5))])
        missed += len(study.ties()) < 9
    assert missed <= 9  # 4 are expected; with a t-test for each point, there are 17


def test_a_point_that_diverged_late_is_not_a_tie():
    study = study_of([[run_of(0.5), run_of(0.6)], [run_of(0.501), run_of(0.599)]])
    (other,) = study.ties()
    other["late"] = 1
    assert study.ties() == []


def test_a_run_that_diverges_late_is_distinguished_from_one_that_converged():
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
    late_runs = {
        name: RunResult(SimpleNamespace(steps={"loss": curve + noise})).late
        for name, curve in curves.items()
    }
    assert [name for name, late in late_runs.items() if late] == ["late", "beyond its start"]
    tried = [Trial(0.1, 0.4), Trial(0.2, 0.5, late=True), Trial(0.3, math.nan)]
    assert best_rate(tried, larger=True) == 0.1 and best_rate(tried[1:], larger=True) == 0.2


def test_rounding_errors_of_equal_values_are_not_an_interval():
    rows = [{"MB": 227.08224, "MB_high": 227.08224 + 3e-14}, {"MB": 99.34848, "MB_high": 99.34848}]
    assert tables.column(rows, "MB") == ["227.08", "99.35"]
    rows[0]["MB_high"] = 228.0
    assert tables.column(rows, "MB") == ["227.08 ± 0.92", "99.35"]


def test_tiny_and_infinite_values_have_cells_of_their_own():
    def cells(*values):
        rows = []
        for mean, half in values:
            rows.append({"loss": mean, "loss_high": mean + half})
        return tables.column(rows, "loss")

    assert cells((2e-16, 1e-16), (6e-17, 3e-17)) == ["2.00e-16 ± 1.00e-16", "6.00e-17 ± 3.00e-17"]
    assert cells((2e-9, 1e-9)) == ["0.0000000020 ± 0.0000000010"]
    assert cells((math.inf, math.nan)) == ["inf"]
    assert cells((math.inf, math.nan), (0.5, math.nan)) == ["inf", "0.5000"]


def test_labels_are_escaped_in_latex():
    row = tables.Row(["κ^2~{50 %}_\\", "1"], 1, "", False)
    words = tables.latex(["graph", "loss"], [row], 1)
    letter = r"\ensuremath{\kappa}"
    hat = r"\textasciicircum{}"
    tilde = r"\textasciitilde{}"
    assert letter + hat + "2" + tilde + r"\{50 \%\}\_\textbackslash{} & 1 \\" in words


def test_the_command_and_the_function_give_the_same_tables_and_curves(job_folder, capsys):
    methods = {"one": "algorithm.name=dsgd", "two & a half": "algorithm.name=d2"}
    settings = [*SMALL, "graph.name=ring"]
    lines = [f"{name!r} = {value!r}" for name, value in methods.items()]
    text = f'job = "job.toml"\nnodes = [2, 3]\nseeds = 2\nsettings = {settings!r}\n[grid.method]\n'
    Path("study.toml").write_text(text + "\n".join(lines))
    assert cli.main(["study", "study.toml", "--out", "out"]) == 0
    output = capsys.readouterr().out
    line = re.search("best by accuracy: (.*)", output)[1]
    best, *equal = re.split("; not significantly [^:]*: ", line)
    named = equal[0].split("; ") if equal else []
    names = {"one, 2", "one, 3", "two & a half, 2", "two & a half, 3"}
    assert best in names and {*named} <= names - {best}
    files = {path.name for path in Path("out").iterdir() if path.is_file()}
    figures = {"accuracy", "loss", "accuracy-by-MB"}
    assert files == {"lock", "table.csv", "table.tex"} | {
        f"{name}.{suffix}" for name in figures for suffix in ("png", "pdf")
    }
    assert {name for name in files if name in output} == files - {"lock"}
    pdf = Path("out/accuracy-by-MB.pdf").read_bytes()
    width = float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf)[1])
    assert width == pytest.approx(3.4 * 72)
    assert b"/FontFile2" in pdf and b"/Type3" not in pdf
    assert b"/Subtype /Image" not in pdf
    before = log_times("out")
    study = small({"method": methods}, nodes=[2, 3], settings=settings, output="out")
    assert len(named) == len(study.ties())
    assert log_times("out") == before
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
        figure = study.plot("consensus_distance", x, out=job_folder / f"{x}.png")
        assert len(figure.axes[0].lines) == 4 and (job_folder / f"{x}.png").stat().st_size > 5000
    assert figure._repr_png_()[1:4] == b"PNG" and "<pre>" in study._repr_html_()
    with pytest.raises(JobError, match=naming('y = "beauty"')):
        study.plot("beauty")
    with pytest.raises(JobError, match=naming("text, csv, latex")):
        study.table("html")


def test_a_single_evaluation_is_drawn_as_a_point_with_its_interval():
    runs = [[run_of(0.5), run_of(0.6)], [run_of(0.7), run_of(0.8)]]
    for run in itertools.chain(*runs):
        run.log.evaluations = {name: v[-1:] for name, v in run.log.evaluations.items()}
    (axes,) = study_of(runs).plot().axes
    points = [bars.lines[0].get_ydata().item() for bars in axes.containers]
    assert points == pytest.approx([0.55, 0.75])
    low, high = axes.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert low == 0 and high == 1  # the range of an accuracy
    assert axes.containers[0].lines[2][0].get_alpha() is None


def test_a_figure_for_a_paper_has_the_width_of_a_column_and_no_title():
    study = study_of([[run_of(0.5), run_of(0.6)], [run_of(0.7), run_of(0.8)]])
    for run in itertools.chain(*(study.runs(cell) for cell in study.cells)):
        run.log.job += "[task]\nname = 'classification'\n"
        run.log.steps["bytes_sent"] = np.full((40, 3), 1e6) * np.arange(1, 41)[:, None]
    paper = study.plot("accuracy", "bytes", width=3.4)
    (axes,) = paper.axes
    assert paper.get_size_inches()[0] == 3.4 and paper.get_suptitle() == ""
    assert axes.get_xlabel() == "MB sent per node"
    assert axes.get_ylabel() == "test accuracy of the averaged model"
    assert axes.xaxis.label.get_size() == 8 and axes.get_legend().get_texts()[0].get_size() == 7
    assert axes.lines[0].get_xdata()[-1] == pytest.approx(40)
    screen = study.plot("loss")
    assert screen.axes[0].get_ylabel() == "test loss of the averaged model (nat)"
    assert screen.get_suptitle().startswith("n = 3, mean of 2 seeds")
    assert screen.get_size_inches()[0] == 5.4 and screen.axes[0].lines[0].get_linewidth() == 1.8


@on_each(
    ("axis", "label", "text"),
    [
        ("nodes", "8", "n = 8"),
        ("graph.slack", "0.05", "slack = 0.05"),
        ("schedule.lr", "1e-3", "lr = 1e-3"),
        ("node.vmap", "True", "vmap = True"),
        ("graph.name", "base-2", "base-2"),
        ("graph.name", "one-peer-exponential", "one-peer exponential"),
        ("algorithm.name", "dsgd", "D-PSGD"),
        ("method", "dsgd", "dsgd"),  # a label of the user
        ("method", "D²", "D²"),
        ("method", "e", "e"),
    ],
)
def test_a_number_as_a_label_gets_the_name_of_its_axis(axis, label, text):
    assert _label_text(axis, label) == text


def cells(**sizes):
    """Return the points of a grid; ``sizes`` are the numbers of labels by axis."""
    labels = itertools.product(*[[f"{axis}{k}" for k in range(sizes[axis])] for axis in sizes])
    return [Cell(tuple(zip(sizes, point, strict=True)), (), 3) for point in labels]


def test_accuracies_near_chance_and_wide_intervals_are_reported():
    def warnings(*accuracies):
        runs = [run_of(accuracy) for accuracy in accuracies]
        for run in runs:
            run.log.job += "[data]\nsource = 'digits'\nclasses = 10\n"
        lines = study_of([runs]).table().splitlines()
        return [line for line in lines if line.startswith("warning: ")]

    assert warnings(0.97, 0.96, 0.98) == []
    (near,) = warnings(0.11, 0.12, 0.11)
    assert "0.11 is near chance (1/10)" in near
    (wide,) = warnings(0.5, 0.9, 0.7)
    assert "1 of 1 intervals exceed ± 0.1" in wide


def test_few_seeds_and_a_single_node_are_reported():
    def warnings(study):
        return [line for line in study.table().splitlines() if line.startswith("warning: ")]

    (one,) = warnings(study_of([[run_of(0.9)]]))
    assert "one seed: " in one and "seeds = 3" in one
    (two,) = warnings(study_of([[run_of(0.97), run_of(0.971)]]))
    assert "one degree of freedom" in two and "12.7" in two
    assert warnings(study_of([[run_of(0.97), run_of(0.971), run_of(0.97)]])) == []
    point = Cell((), (), 1)
    runs = {(point, None, seed): run_of(0.97) for seed in range(3)}
    (alone,) = warnings(Study([point], {point: None}, range(3), runs, None, (), {}, Path()))
    assert alone.startswith("warning: n = 1")


def test_an_error_in_the_settings_of_a_point_names_the_point(job_folder):
    methods = {"good": "graph.name=ring", "Misspelt": "graph.name=rnig"}
    with pytest.raises(JobError, match=naming("Misspelt_n3", 'graph.name = "rnig"')):
        small({"method": methods})
    with pytest.raises(JobError, match=naming('graph.name = "rnig"')):  # of all points
        small({"algorithm.name": ["dsgd"]}, settings=[*SMALL, "graph.name=rnig"])


def run_of(accuracy, loss=0.5, late=False, sent=12345678):
    """Return a synthetic run whose log has these metrics at both of its evaluations."""
    steps = {"loss": np.full((40, 3), 1.0), "step": np.arange(40)}
    steps["loss"][:20] = 1.5
    steps["loss"][-8:] += late
    metrics = {"accuracy": accuracy, "loss": loss}
    evaluations = {"step": np.array([20, 40]), "epoch": np.array([1.0, 2.0])}
    evaluations |= {name: np.full(2, value) for name, value in metrics.items()}
    summary = metrics | {"metrics": "accuracy", "bytes_sent": sent, "steps": 40}
    job = "[schedule]\nscale = 'linear'\nreference_batch = 128\n"
    return RunResult(
        SimpleNamespace(steps=steps, evaluations=evaluations, summary=summary, job=job)
    )


def study_of(runs, rate=None, tried=()):
    """Return a study with a point for each list of ``runs``, which has one run for each seed."""
    points = cells(method=len(runs))
    seeds = range(len(runs[0]))
    results = {
        (c, rate, k): run for c, row in zip(points, runs, strict=True) for k, run in enumerate(row)
    }
    return Study(points, dict.fromkeys(points, rate), seeds, results, None, tried, {}, Path())


def test_a_band_of_positive_values_is_positive_and_curves_have_names_and_markers():
    figure = study_of(
        [[run_of(0.9, 0.01), run_of(0.9, 1.0)], [run_of(0.9, 0.4), run_of(0.9, 0.6)]]
    ).plot("loss")
    (axes,) = figure.axes
    for line, band, (mean, half) in zip(
        axes.lines, axes.collections, [(0.505, 6.29), (0.5, 1.27)], strict=True
    ):
        heights = band.get_paths()[0].vertices[:, 1]
        low = mean**2 / (mean + half)
        high = mean + half
        assert (heights.min(), heights.max()) == pytest.approx((low, high), rel=2e-3)
        assert len(line.get_marker()) == 1
    study = study_of([[run_of(0.9), run_of(0.8)]])
    for run in study.runs(study.cells[0]):
        run.log.evaluations["consensus_distance"] = np.array([1.0, 0.1])
    assert study.plot("consensus_distance").axes[0].get_ylabel() == "consensus distance"


def test_no_row_is_bold_if_all_are_equal_and_a_column_has_equal_decimals():
    study = study_of(
        [[run_of(0.9, 1.0), run_of(0.8, 2.0)], [run_of(0.91, 0.1), run_of(0.79, 0.11)]]
    )
    latex = study.table("latex")
    assert "mathbf" not in latex and "% no point is significantly" in latex
    losses = [line.split("&")[2].strip(" $") for line in latex.splitlines() if "method" in line][1:]
    assert losses == [r"1.5 \pm 6.4", r"0.1 \pm 0.1"]
    sent = study_of([[run_of(0.9, sent=9_876_543)], [run_of(0.9, sent=123_456_789)]]).table()
    assert [line.split()[-1] for line in sent.splitlines()[1:3]] == ["9.88", "123.46"]


def test_the_complete_runs_of_a_study_have_a_table_and_a_copied_folder_is_complete(
    job_folder, capsys
):
    with pytest.raises(Failure, match=naming("none of 4 runs")):
        small(partial=True)
    small({"algorithm.name": ["dsgd"], "graph.name": ["ring"]})
    small({"algorithm.name": ["dmsgd"], "graph.name": ["ring"]}, seeds=1)
    capsys.readouterr()
    table = small(partial=True)
    assert [row["seeds"] for row in table.rows] == [2, 1]
    assert [row["diverged"] for row in table.rows] == [0, 0]
    assert "1 of 2 seeds" in table.table()
    assert "of up to 2 seeds" in table.table()
    assert "warning: one seed: " in table.table()
    assert "diverged" not in table.table() and table.ties() == []
    table.plot()
    assert len(small(partial=True, seeds=1).rows) == 2
    assert capsys.readouterr().out == ""
    shutil.copytree("runs/study-job", "copied")
    assert small(partial=True, output="copied").table() == table.table()
    lines = [f"{name} = {values!r}" for name, values in GRID.items()]
    text = f'job = "job.toml"\nnodes = 3\nseeds = 2\nsettings = {SMALL!r}\n[grid]\n'
    Path("study.toml").write_text(text + "\n".join(lines))
    assert cli.main(["study", "study.toml", "--partial"]) == 0
    assert capsys.readouterr().out == f"{table.table()}\n"
    with pytest.raises(Failure, match=naming("4 of 4 runs", "3 with other", "run.epochs")):
        small(settings=[*SMALL, "run.epochs=3"], processes=0)


def test_the_remaining_time_follows_from_the_mean_duration():
    assert running.remaining_time([10, 20], [5], waiting=3, processes=2) == (3 * 15 + 10) / 2
    assert running.remaining_time([10], [30], waiting=0, processes=8) == 0
    # Only the last runs count, because the load of the machine may have changed.
    assert running.remaining_time([90, 10, 10, 10, 10], [], waiting=2, processes=2) == 10


class EndingRunner(Runner):
    """Runner whose runs end at once with a code; `started` are their folders."""

    def __init__(self, folder, code, output=""):
        super().__init__(Path("job.toml"), Path(folder), 2)
        self.code = code
        self.output = output
        self.started = []

    def _start(self, key):
        folder = self.run_directory(key)
        folder.mkdir(parents=True)
        (folder / "output.txt").write_text(self.output)
        self.started.append(folder)
        return subprocess.Popen([sys.executable, "-SEc", f"raise SystemExit({self.code})"])


def test_ends_of_runs(job_folder, capsys):
    cell = Cell((("method", "a"),), (), 3)
    keys = [(cell, None, seed) for seed in (0, 1, 2)]
    with pytest.raises(Failure, match=naming("code 1", "loss of node")):
        EndingRunner(
            "failed", 1, "mpigossip: the loss of node 3 is in the text of another failure"
        ).fill(keys)
    first, ended, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("failed: 3 of 3 runs ")
    assert re.fullmatch(r"\[1/3\] failed/.*: [\d.]+ s; about .* remain", ended)
    runner = EndingRunner("lost", running.LOST, "mpigossip: anything")
    with pytest.raises(Failure, match=naming("log", "not complete")):  # it does not exist
        runner.fill(keys)
    assert [(path / "diverged.txt").exists() for path in runner.started] == [True] * 3
    small, large = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, large))
    try:
        with pytest.raises(StoreError, match=naming("full", "File too large")):
            EndingRunner("full", 1).fill(keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, large))
    with (
        lock(Path("two"), "output") as _,
        pytest.raises(JobError, match=naming('output: "two"', "in use")),
    ):
        (busy := EndingRunner("two", 0)).fill(keys)
    assert not busy.started


def test_a_dry_run_of_a_file_prints_commands_and_writes_nothing(job_folder, capsys):
    Path("jobs").mkdir()
    text = """job = "job.toml"
seeds = 2
output = "out"
settings = ["data.source=synthetic", "schedule.lr=0.5"]
[grid.method]
"D²" = "algorithm.name=d2 algorithm.lazy=true"
"DSGT" = "algorithm.name=dsgt"
"""
    Path("jobs/study.toml").write_text(text, "utf-8")
    before = {*Path().rglob("*")}
    assert cli.main(["study", "jobs/study.toml", "--dry-run"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "out: 4 of 4 runs are missing"
    assert lines[1] == (
        "mpigossip simulate job.toml --nodes 8 data.source=synthetic schedule.lr=0.5 "
        "algorithm.name=d2 algorithm.lazy=true run.seed=1 'run.output=out/D²_n8/seed-1'"
    )
    assert len(lines) == 4 and {*Path().rglob("*")} == before
    Path("jobs/old.toml").write_text(f"together = true\n{text}", "utf-8")
    assert cli.main(["study", "jobs/old.toml", "--dry-run"]) == 2
    assert "together is unknown; " in capsys.readouterr().err
    assert cli.main(["study", "digits"]) == 2
    said = capsys.readouterr().err
    assert "digits.toml describes a job" in said and "not a study: " in said
    Path("jobs/job.toml").write_text("")  # a job in the folder of the study file is preferred
    assert arguments(Path("jobs/study.toml"), mpigossip.study)["job"] == Path("jobs/job.toml")


def test_a_task_without_metrics_is_compared_by_its_loss_and_metrics_without_a_curve_are_not_drawn():
    (run,) = runs = [run_of(0.9)]
    study = study_of([runs])
    assert study.curves == study.figures == ["accuracy", "loss"]
    study.judge = "exchanges"
    assert study.figures == ["exchanges", "accuracy", "loss"]
    assert study.curves == ["accuracy", "loss"]
    run.log.summary["metrics"] = ""
    assert study_of([runs]).judge == "loss"


def test_larger_decides_which_values_of_a_custom_metric_are_better():
    runs = [run_of(0.9), run_of(0.9)]
    for run, overlap in zip(runs, (0.2, 0.7), strict=True):
        run.log.summary.update(metrics="overlap", overlap=overlap)
        run.log.evaluations["overlap"] = np.full(2, overlap)
    results = {(c, None, 0): run for c, run in zip(cells(method=2), runs, strict=True)}
    arguments_of_study = cells(method=2), dict.fromkeys(cells(method=2)), [0], results
    assert Study(*arguments_of_study, None, (), {}, Path()).judge == "loss"
    for larger, best in ((True, 0.7), (False, 0.2), (None, 0.2)):
        assert (
            Study(*arguments_of_study, "overlap", (), {}, Path(), larger).best()["overlap"] == best
        )


def test_a_table_explains_its_numbers_and_lists_diverged_runs():
    good = [run_of(0.9, 0.25), run_of(0.91, 0.25)]
    tie = [run_of(0.88), run_of(0.92)]
    late = [run_of(0.5, late=True), run_of(0.52, late=True)]
    points = cells(method=5)
    tried = [Trial(0.1, 0.6, late=True, cell=points[2]), Trial(1.0, math.nan, cell=points[2])]
    tried += [Trial(0.1, 0.6, cell=points[3]), Trial(1.0, math.nan, cell=points[3])]
    runs = [good, tie, late, [RunResult(None), run_of(0.5)], late[::-1]]
    study = study_of(runs, rate=0.1, tried=tried)
    comments, lines = study.table("latex").split(r"\begin{tabular}")
    assert comments.splitlines() == [
        "% ±: half the 95 % interval of the mean of 2 seeds (Student's t); n = 3, 40 steps",
        "% diverged late: the training loss rose again by over half of its decrease",
        "% warning: 2 seeds: intervals have one degree of freedom, and are 12.7 standard errors "
        "wide on either side: use at least seeds = 3",
        "% warning: 3 of 5 intervals exceed ± 0.1: use more seeds, train longer, or use an easier "
        "problem (model.name=mlp)",
        "% bold: not significantly different from the best accuracy (paired Dunnett's test)",
        r"% \caption{Test results of the averaged model; n = 3, 40 steps. ±: half the 95 \% "
        "interval of the mean of 2 seeds (Student's t). Bold: not significantly different from the "
        "best accuracy (paired Dunnett's test).}",
    ]
    assert lines.splitlines()[2:] == [
        r"method & lr per 128 samples & accuracy & loss & MB per node \\",
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
    assert text[9:] == [line.removeprefix("% ") for line in comments.splitlines()[:4]]
    single = study_of([[run_of(0.9)]]).table("latex")
    first, second, third, *_ = single.splitlines()
    assert first.startswith("% one seed") and "n = 3, 40 steps" in first
    assert second.startswith("% warning: one seed") and "seeds = 3" in second
    assert third.startswith("% bold: ") and "accuracy" in third
    assert r"$\mathbf{0.9000}$" in single


def test_a_table_states_the_rate_of_the_job_and_the_partition():
    runs = [[run_of(0.9), run_of(0.8), run_of(0.7)] for _ in range(2)]
    for run in itertools.chain(*runs):
        run.log.job += "lr = 0.15\n[data]\npartition = 'dirichlet'\ndirichlet_alpha = 0.1\n"
    study = study_of(runs)
    assert "schedule.lr = 0.15 per 128 samples" in study.table()
    assert "not tuned" in study.table()
    assert r"data.partition = dirichlet, \ensuremath{\alpha} = 0.1" in study.table("latex")
    assert [row["lr"] for row in study.rows] == [0.15, 0.15] and "lr" not in study.axes
    for run in runs[1]:
        run.log.job = run.log.job.replace("0.15", "0.3")
    different = study_of(runs)
    assert "not tuned" not in different.table()
    assert different.table().splitlines()[0].split()[1:3] == ["lr", "per"]


def test_an_axis_of_accuracies_shows_how_the_last_evaluations_differ():
    runs = [[run_of(0.97), run_of(0.97)], [run_of(0.92), run_of(0.92)]]
    for run in itertools.chain(*runs):
        last = run.log.evaluations["accuracy"][0]
        run.log.evaluations = {
            "step": np.arange(10),
            "accuracy": np.linspace(last - 0.01, last, 10) - [0.8, *[0.0] * 9],
        }
    (axes,) = study_of(runs).plot("accuracy").axes
    assert 0.75 <= axes.get_ylim()[0] <= 0.85
    runs[1][0].log.evaluations["accuracy"][-1] = runs[1][1].log.evaluations["accuracy"][-1] = 0.1
    (axes,) = study_of(runs).plot("accuracy").axes
    assert axes.get_ylim()[0] < 0.1


def test_a_dry_run_of_a_search_names_the_runs_that_follow(job_folder):
    with pytest.raises(running.Missing, match=naming("10 of 10 runs")) as error:
        mpigossip.study(
            "job.toml",
            {"graph.name": ["ring", "exponential"]},
            nodes=4,
            seeds=3,
            rates="search",
            output="searched",
            processes=0,
        )
    assert "6 runs" in str(error.value) and "2 points x 3 seeds" in str(error.value)
    assert "3 further rates" in str(error.value)


@pytest.mark.parametrize(
    ("grid", "options", "words"),
    [
        ({"graph.weight": ["ring"]}, {}, "graph.weight"),
        ({"method": ["dsgd"]}, {}, ('"method"', "setting")),
        ({"graph.name": "ring"}, {}, "graph.name = 'ring'"),
        ({"algorithm.beta": 0.9}, {}, "algorithm.beta = 0.9"),
        ({}, {"nodes": "8"}, ("nodes = '8'", "whole number")),
        ({}, {"seeds": 2.5}, ("seeds = 2.5", "whole number")),
        ({}, {"seeds": 0}, "seeds = []"),
        ({}, {"settings": "run.epochs=5"}, "settings = 'run.epochs=5'"),
        ({"algorithm.name": ["decentlam", "dsgd"]}, {}, ('"decentlam"', "static")),
        ({}, {"nodes": [0]}, ("0", "1")),
        ({}, {"rates": "best"}, '"search"'),
        ({}, {"rates": np.array([0.1, -1])}, "above 0"),
        ({}, {"rates": ["0.1", 0.2]}, "above 0"),
        ({"run.epochs": [1, 1]}, {}, "same labels"),
        ({"lr": {"low": "schedule.lr=0.01"}}, {}, ('"lr"', "column")),
    ],
)
def test_invalid_arguments_are_rejected_before_any_run(job_folder, grid, options, words):
    with pytest.raises(JobError, match=naming(words)):
        small(grid, **options)
    assert not Path("runs").exists()


def test_numbers_of_numpy_are_numbers(job_folder):
    grid = {"schedule.lr": np.geomspace(0.01, 1, 3), "data.batch": np.array([4, 8])}
    points, _ = cells_of(Path("job.toml"), grid, [2], [], False)
    assert points[0].settings == ("schedule.lr=0.01", "data.batch=4") and len(points) == 6


def test_a_long_list_as_a_value_is_not_shortened(job_folder):
    milestones = list(range(1, 40))
    points, _ = cells_of(Path("job.toml"), {"schedule.milestones": [milestones]}, [2], [], False)
    assert points[0].settings == (f"schedule.milestones={milestones}",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("job = 5", ("study.toml", "job = 5")),
        ("output = 5", ("study.toml", "output = 5")),
        ('processes = "2"', ("study.toml", 'processes = "2"', "whole number")),
        ('settings = "run.epochs=5"', ("study.toml", 'settings = "run.epochs=5"')),
        ("settings = [5]", ("study.toml", "settings = 5")),
        ('larger = "false"', ("study.toml", 'larger = "false"')),
        ("judge = 3", ("study.toml", "judge = 3")),
    ],
)
def test_values_of_a_study_file_have_the_types_of_its_keys(job_folder, line, words):
    job = "" if line.startswith("job") else 'job = "job.toml"'
    Path("study.toml").write_text(f"{job}\n{line}\n")
    with pytest.raises(JobError, match=naming(words)):
        arguments(Path("study.toml"), mpigossip.study)


def test_a_folder_with_the_name_of_an_example_is_no_job(job_folder):
    Path("digits").mkdir()
    Path("study.toml").write_text('job = "digits"')
    assert arguments(Path("study.toml"), mpigossip.study)["job"] == Path("digits")
    assert cli.main(["study", "study.toml", "--dry-run"]) == 0


def test_the_output_may_be_in_the_home_of_the_user(job_folder, monkeypatch):
    """A child process expands ~ in run.output, so that the study has to expect its log there."""
    monkeypatch.setenv("HOME", str(job_folder / "home"))
    with pytest.raises(running.Missing) as error:
        small({}, output="~/out", processes=0, seeds=1)
    assert f"run.output={job_folder}/home/out/n3/seed-0" in str(error.value)


def test_incompatible_points_can_be_left_out(job_folder):
    cells, incompatible = cells_of(
        Path("job.toml"), {"algorithm.name": ["decentlam", "dsgd"]}, [4], SMALL, True
    )
    assert [cell.name for cell in cells] == ["dsgd_n4"] and "static" in incompatible["decentlam_n4"]


@pytest.mark.every
def test_a_folder_of_another_study_is_not_overwritten(job_folder):
    small({}, seeds=1)
    with pytest.raises(Failure, match=naming("another job")):
        small({}, seeds=1, settings=[*SMALL, "run.epochs=3"])
    with pytest.raises(JobError, match=naming('judge = "beauty"', "accuracy")):
        small({}, seeds=1, judge="beauty")


def test_a_band_stays_among_possible_values():
    values = np.array([[0.9, 0.2], [1.0, 0.3]])
    mean, low, high = confidence_band("accuracy", values)
    assert np.allclose(mean, [0.95, 0.25]) and high.tolist() == [1, pytest.approx(0.8853, abs=1e-4)]
    assert low.tolist() == [pytest.approx(0.3147, abs=1e-4), 0]
    mean, low, high = confidence_band(
        "loss", values
    )  # symmetric in ratio, because one end would reach 0
    assert (low > 0).all() and np.allclose(mean / low, high / mean)
    mean, low, high = confidence_band("shift", values - 1)
    assert np.allclose(mean - low, high - mean)


def test_an_interval_needs_two_seeds():
    mean, half = interval(np.array([[1.0, 2.0]]))
    assert mean.tolist() == [1, 2] and np.isnan(half).all()
    mean, half = interval(np.array([[1.0], [2.0], [3.0]]))
    assert mean == 2 and half == pytest.approx(4.3027 / 3**0.5, rel=1e-4)


def test_there_is_one_simultaneous_run_per_core(job_folder):
    assert Runner(Path("job.toml"), Path("runs")).processes == len(os.sched_getaffinity(0))
