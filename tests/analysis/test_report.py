"""`mpigossip log`: plots, tables, CSV files and HTML pages of runs."""

import base64
import csv
import html
import io
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from mpigossip import cli, config
from mpigossip.analysis.logged_runs import PARTS, load, short_names
from mpigossip.analysis.panels import Axis, clock, consensus, members, metric, time, times
from mpigossip.analysis.plot import figure, plot
from mpigossip.analysis.report import page, table, write
from mpigossip.store import StoreError
from mpigossip.store.log import Column, LogWriter, read
from mpigossip.store.log_export import to_csv
from mpigossip.studies.seeds import parted
from tests.analysis.figures import overlapping
from tests.cases import every, naming

pytestmark = pytest.mark.usefixtures("warm")

NAMES = ("loss", "consensus_distance", "compute_s", "node_s", "exchange_s", "idle_s")


def run(
    folder,
    steps=200,
    nodes=3,
    evaluations=(50, 100, 200),
    consensus=1e-4,
    epoch=50,
    seed=0,
    graph="ring",
    lr=0.1,
    simulated=False,
):
    """Create a run directory with a synthetic log."""
    folder.mkdir(parents=True)
    job = config.load({"graph": {"name": graph}, "run": {"seed": seed}, "schedule": {"lr": lr}})
    draw = np.random.default_rng(seed)
    out = LogWriter(
        folder / "log.h5",
        nodes=nodes,
        job=config.dump(job),
        columns={name: Column("s", name) for name in NAMES},
        environment={"simulated": f"{nodes} nodes in one process"} if simulated else {},
    )
    values = {name: draw.uniform(0.001, 0.002, (steps, nodes)) for name in NAMES}
    values["loss"] *= np.geomspace(1000, 10, max(steps, 1))[:steps, None]
    values["compute_s"][:1] = 5.0
    values["consensus_distance"][:] = np.nan
    values["consensus_distance"][::10] = consensus
    out.append(values)
    for step in evaluations:
        accuracy = 1 - (1 + 0.1 * seed) / step
        out.evaluation(
            {
                "step": step,
                "epoch": step / epoch,
                "loss": 10 / step,
                "accuracy": accuracy,
                "local_accuracy": accuracy - 0.01 * np.arange(nodes),
                "consensus_distance": consensus,
                "seconds": step / 100,
            }
        )
    if evaluations:
        out.summary({"accuracy": accuracy, "digest": "ab" * 32})
    return folder


def drawn(path):
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size[0] > 1200
        return np.asarray(image.convert("L")).astype(float)


def test_one_run_from_folder_or_log(tmp_path):
    folder = run(tmp_path / "a")
    plot([folder], tmp_path / "one.png")
    plot([folder / "log.h5"], tmp_path / "two.png")
    pixels = drawn(tmp_path / "one.png")
    assert (pixels == drawn(tmp_path / "two.png")).all()
    for half in np.array_split(pixels, 4):  # something is drawn in all eight panels
        for quarter in np.array_split(half, 2, axis=1):
            assert (quarter < 200).mean() > 0.01


def test_runs_of_several_seeds_are_one_curve_with_a_band(tmp_path):
    folders = [
        run(tmp_path / graph / f"seed-{seed}", seed=seed, graph=graph)
        for graph in ("ring", "exponential")
        for seed in range(3)
    ]
    runs = load(folders)
    assert [run.name for run in runs] == ["ring (3 seeds)", "exponential (3 seeds)"]
    for combined, seeds in zip(runs, (folders[:3], folders[3:]), strict=True):
        logs = [read(folder / "log.h5") for folder in seeds]
        values = np.array([log.evaluations["accuracy"] for log in logs])
        assert np.allclose(combined.log.evaluations["accuracy"], values.mean(0))
        mean, low, high = combined.bands["accuracy"]
        half = 4.3027 * values.std(0, ddof=1) / 3**0.5  # Student's t with two degrees of freedom
        assert np.allclose(mean, values.mean(0))
        assert np.allclose(low, np.clip(mean - half, 0, 1), rtol=1e-4)
        assert np.allclose(high, np.clip(mean + half, 0, 1), rtol=1e-4)
        assert combined.log.steps["loss"].shape == (200, 9)
        assert combined.log.summary["accuracy"] == pytest.approx(values[:, -1].mean())
    write(folders, tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text()
    assert page.count("exponential (3 seeds)") >= 3
    data = base64.b64decode(re.search('base64,([^"]+)', page)[1])
    with Image.open(io.BytesIO(data)) as image:  # transparent, for a light or dark page
        assert image.mode == "RGBA" and image.getpixel((0, 0))[3] == 0
    (only,) = load(folders[:3])
    assert only.name == "dmsgd, ring, 3 nodes (3 seeds)"
    assert len(load([folders[0], folders[0]])) == 2 and len(load([folders[0], folders[3]])) == 2
    longer = run(tmp_path / "further", seed=7, steps=300)
    assert len(load([folders[0], folders[1], longer])) == 2


def test_names_of_runs_are_unique_and_short():
    folders = [Path(f) for f in ("/x/y/a", "/x/y/b", "/x/y/b")]
    assert short_names(folders) == ["a", "b", "b"]
    assert short_names([Path("/x/one/a"), Path("/x/two/a")]) == ["one/a", "two/a"]
    (name,) = short_names([Path("/x") / ("long" * 20)])
    assert len(name) == 32 and name.startswith("…") and name.endswith("long")
    run = "imagenet-resnet50-one-peer-exponential-32"
    first, second = short_names([Path("/x/first") / run, Path("/x/second") / run])
    assert first != second and len(first) == len(second) == 32
    assert first.startswith("first/") and first.endswith("-exponential-32")
    middles = [Path("/x") / f"{'a' * 40}{k}{'b' * 40}" for k in range(2)]
    assert len(set(short_names(middles))) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0, "evaluations": ()},
        {"steps": 1, "evaluations": ()},
        {"steps": 3, "nodes": 1, "evaluations": (3,), "consensus": np.nan},
        {"steps": 3000, "evaluations": (3000,), "consensus": 0.0},
    ],
)
def test_short_long_and_empty_runs(tmp_path, options):
    folder = run(tmp_path / "a", **options)
    plot([folder], tmp_path / "one.png")
    assert drawn(tmp_path / "one.png").std() > 5
    text = table(read(folder / "log.h5"))
    assert ("no evaluation" in text) == (options.get("evaluations") == ())
    assert ("no steps yet" in text) == (options.get("steps") == 0)


def test_metrics_that_a_loop_logs_at_some_steps_are_drawn(tmp_path):
    """A custom loop has no evaluations: its metrics are shown as a table, and as points."""
    (loop,) = load([run(tmp_path / "a", steps=60, evaluations=())])
    values = np.full((60, loop.log.nodes), np.nan)
    values[19::20] = 0.5
    loop.log.steps["val_loss"] = values
    text = table(loop.log)
    assert text.count("0.5000") == 3 and re.search(r"^ *20 .*0\.5000", text, re.MULTILINE)
    axes = Figure().subplots()
    metric(axes, [loop], Axis("step", lambda run, at: at), "val_loss")
    assert axes.get_title(loc="left") == "val_loss" and len(axes.lines[0].get_xdata()) == 3


def test_the_axis_of_members_has_integer_ticks(tmp_path):
    for nodes in (1, 3):
        (training,) = load([run(tmp_path / f"{nodes}", steps=20, nodes=nodes, evaluations=())])
        training.log.steps["time"] = np.arange(20.0)[:, None] + np.zeros(nodes)
        axes = Figure().subplots()
        members(axes, training)
        low, high = sorted(axes.get_ylim())
        assert [tick for tick in axes.get_yticks() if low <= tick <= high] == [*range(nodes)]


@pytest.mark.filterwarnings("error")
def test_a_place_without_a_step_does_not_hide_the_others(tmp_path):
    (training,) = load([run(tmp_path / "a", steps=20, nodes=3, evaluations=())])
    training.log.steps["time"] = np.arange(20.0)[:, None] + [0.0, np.nan, 5.0]
    axes = Figure().subplots()
    members(axes, training)
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 19), (0, 0), (5, 19)]
    unknown = np.full((20, 3), np.nan), "times are not known"
    for values, words in (unknown, (np.empty((0, 3)), "no steps yet")):
        training.log.steps["time"] = values
        axes = Figure().subplots()
        members(axes, training)
        assert [text.get_text() for text in axes.texts] == [words]


@pytest.mark.filterwarnings("error")
def test_equal_nodes_that_are_compared_at_evaluations_only(tmp_path):
    """A run without a step, or an asynchronous one, measures the distance only at evaluations."""
    (training,) = load([run(tmp_path / "a", steps=20, consensus=0.0, evaluations=(10, 20))])
    training.log.steps["consensus_distance"][:] = np.nan
    axes = Figure().subplots()
    consensus(axes, [training], Axis("step", lambda run, at: at))
    assert [text.get_text() for text in axes.texts] == ["all nodes are equal, except for rounding"]


def test_joined_logs_of_members_have_their_columns_in_a_fixed_order(tmp_path):
    """The order of a set of names differs between processes."""
    for place in range(2):
        run(tmp_path / f"logs/{place:06d}", nodes=1, evaluations=())
    first, *names = read(tmp_path / "log.h5").steps
    assert first == "step" and names == sorted(names)


def test_a_fork_of_members_has_no_times(tmp_path):
    """Its metrics are drawn over steps, and nothing is drawn or printed about its times."""
    runs = load([run(tmp_path / name, steps=20, nodes=2) for name in ("training", "fork")])
    for number, training in enumerate(runs):
        steps = training.log.steps
        steps["time"] = np.arange(20.0)[:, None] + np.zeros(2)
        if number:
            steps |= {name: np.full((20, 2), np.nan) for name in ("time", *PARTS)}
        training.log.summary["seconds"] = (5.0, np.nan)[number]
    fork = runs[1]
    assert "not known" in table(fork.log)
    axis = clock(runs)
    for draw in (partial(members, run=fork), partial(time, runs=[fork], axis=axis)):
        draw(axes := Figure().subplots())
        assert [text.get_text() for text in axes.texts] == ["times are not known"]
    times(axes := Figure().subplots(), runs)
    assert [text.get_text().strip() for text in axes.texts][1] == "times are not known"
    assert np.isfinite(axis.at(runs[0], np.arange(20))).all()
    assert np.isnan(axis.at(fork, np.arange(20))).all()
    axis.dress(axes := Figure().subplots(), runs)
    assert 0 < axes.get_xlim()[1] < np.inf
    text = page(runs, [[], []])
    assert ">nan<" not in text and '<td class="number">–</td>' in text
    page([fork], [[]])


def test_a_missing_log_and_a_missing_folder(tmp_path):
    with pytest.raises(StoreError, match=naming("doesn't exist")):
        plot([tmp_path / "none"], tmp_path / "a.png")
    with pytest.raises(StoreError, match=naming("can't be written")):
        plot([run(tmp_path / "a")], tmp_path / "no/a.png")


def test_table(tmp_path):
    lines = table(read(run(tmp_path / "a") / "log.h5")).splitlines()
    assert lines[0] == "dmsgd, ring, 3 nodes"
    assert lines[2].split()[:4] == ["step", "epoch", "loss", "accuracy"]
    cells = ["200", "4.00", "0.0500", "0.9950", "0.975", "to", "0.995", "1.00e-04", "2.0"]
    assert lines[5].split() == cells
    assert len({len(line) for line in lines[2:6]}) == 1 and "local*" in lines[2]
    assert max(map(len, lines)) <= 80
    assert "accuracy of each node" in lines[6] and "1/3" in lines[6]
    assert lines[9].startswith("a step takes ") and "compute" in lines[9] and "idle" in lines[9]
    assert lines[-1] == "digest    " + "ab" * 32


def test_a_step_of_seconds_has_a_number_without_an_exponent(tmp_path):
    log = read(run(tmp_path / "a") / "log.h5")
    long_steps = log.steps | {"compute_s": np.full_like(log.steps["loss"], 4.0)}
    assert "a step takes 4," in table(replace(log, steps=long_steps))


@pytest.mark.parametrize("difference, shown", [(0.0, "+0.0 to +0.0 %"), (0.05, "-5.0 to +0.0 %")])
def test_nodes_are_compared_with_the_average_on_their_own_part(tmp_path, difference, shown):
    """On three parts of the test set, the averaged model has accuracies of 0.90, 0.95 and 1.0."""
    log = read(run(tmp_path / "a", consensus=1e-13) / "log.h5")
    parts = np.tile([0.9, 0.95, 1.0], (3, 1))
    columns = {"share_accuracy": parts, "local_accuracy": parts - [0, difference, 0]}
    assert shown in table(replace(log, evaluations=log.evaluations | columns))


def test_the_legend_of_the_step_time_counts_what_its_area_shows(tmp_path):
    """Steps that take over five times the median, here two, count in neither."""
    folder = run(tmp_path / "a", steps=60)
    with h5py.File(folder / "log.h5", "r+") as file:
        file["steps/compute_s"][7] = 1e3
    (axes,) = (a for a in figure(load([folder])).axes if a._left_title.get_text() == "Step time")
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    (compute,) = (float(text.split()[-2]) for text in texts if text.startswith("compute"))
    assert compute < 99 and "omitted: 2)" in axes.get_ylabel()


def test_times_of_simulated_runs_are_not_called_times_of_steps(tmp_path):
    """A simulating process computes all nodes in turn, so that its times compare no methods."""
    folders = [run(tmp_path / name, simulated=True) for name in ("a", "b")]
    for folder in folders:
        with h5py.File(folder / "log.h5", "r+") as file:
            file.copy("steps/loss", "steps/bytes_sent")
            file["steps/bytes_sent"][...] = np.arange(1, 201)[:, None] * np.full(3, 1e6)
    runs = load(folders)
    drawing = figure(runs)
    titles = [axes._left_title.get_text() for axes in drawing.axes]
    labels = [axes.get_xlabel() for axes in drawing.axes]
    assert "Time to simulate a step" in titles and "Step time" not in titles
    assert labels.count("MB sent per node (mean)") == 2
    assert not any("time of training" in label for label in labels)
    assert any("of the simulating process" in label for label in labels)
    note = plot(folders, tmp_path / "both.png")
    assert "2 of 2 runs simulated" in note and "clock.network=" in note
    assert "3 simulated nodes" in table(runs[0].log)
    write(folders, tmp_path / "both.html")
    assert "2 of 2 runs simulated" in (tmp_path / "both.html").read_text()
    real = run(tmp_path / "real")
    assert plot([real, real], tmp_path / "real.png") == ""
    mixed = figure(load([folders[0], real]))
    assert any("simulated runs: of the" in axes.get_xlabel() for axes in mixed.axes)
    (bars,) = (a for a in mixed.axes if a._left_title.get_text() == "Step time")
    assert "simulated runs" in bars.get_xlabel()


def test_texts_do_not_overlap(tmp_path):
    """Test titles and legends of all panels, and the names of runs next to their bars."""
    count = 12
    drawing = figure(load([run(tmp_path / f"digits-{k}", steps=60) for k in range(count)]))
    FigureCanvasAgg(drawing).draw()
    for axes in drawing.axes:
        legend = axes.get_legend()
        title = next(t for t in (axes.title, axes._left_title) if t.get_text())
        assert not legend or not overlapping([title, legend], drawing.canvas), title.get_text()
    bars = [a for a in drawing.axes if a._left_title.get_text() == "Step time"]
    assert len(bars) == -(-count // 10)
    names = [axes.get_yticklabels() for axes in bars]
    assert sum(map(len, names)) == count
    assert not any(overlapping(labels, drawing.canvas) for labels in names)


def test_legends_of_a_training_curve_fit(tmp_path):
    drawing = figure(load([run(tmp_path / "digits")]))
    FigureCanvasAgg(drawing).draw()
    legends = [(legend, axes) for axes in drawing.axes if (legend := axes.get_legend())]
    over = [legend.get_window_extent().x1 - axes.bbox.x1 for legend, axes in legends]
    assert len(over) == 3 and max(over) <= 0.01 * drawing.bbox.x1


@pytest.mark.filterwarnings("error")
def test_names_of_runs_are_drawn_as_they_are(tmp_path):
    """Matplotlib reads text between two $ as a formula, and omits labels that begin with _."""
    names = ["_base", "a$x^$b", "c"]
    folders = [run(tmp_path / name, lr=0.1 * k, consensus=0.0) for k, name in enumerate(names, 1)]
    for chosen in (folders, folders[1:2]):
        drawn_figure = figure(load(chosen))
        drawn_figure.savefig(io.BytesIO(), format="png")
    texts = [text.get_text() for text in figure(load(folders)).legends[0].get_texts()]
    shown = [text.partition(":")[0].strip().replace(r"\$", "$") for text in texts]
    assert shown == names


def test_an_invalid_job_is_left_out(tmp_path):
    log = read(run(tmp_path / "a") / "log.h5")
    for job in ("", "not TOML", "graph = 3\nalgorithm = 1", "[graph]\n[algorithm]"):
        assert table(replace(log, job=job)).startswith("3 nodes\n")


@pytest.mark.parametrize("words", ["log export {} --csv", "log plot {} --out", "report {} --html"])
def test_a_log_is_not_replaced_by_an_output(tmp_path, capsys, words):
    log_file = run(tmp_path / "a") / "log.h5"
    before = log_file.read_bytes()
    assert cli.main([*words.format(tmp_path / "a").split(), str(log_file)]) == 2
    assert "is an HDF5 file" in capsys.readouterr().err
    assert log_file.read_bytes() == before


def test_csv_contains_every_number(tmp_path):
    log = read(run(tmp_path / "a", steps=5, evaluations=(2, 5)) / "log.h5")
    steps, evaluations = to_csv(log, tmp_path / "out.csv")
    assert steps == tmp_path / "out.csv" and evaluations.name == "out-evaluations.csv"
    with steps.open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(r["step"]), int(r["node"])) for r in rows] == [
        (step, node) for step in range(5) for node in range(3)
    ]
    for name in NAMES:
        got = np.array([float(r[name]) for r in rows]).reshape(5, 3)
        np.testing.assert_array_equal(got, log.steps[name])
    with evaluations.open() as file:
        rows = list(csv.DictReader(file))
    assert [float(r["local_accuracy"]) for r in rows] == log.evaluations[
        "local_accuracy"
    ].ravel().tolist()
    assert [float(r["accuracy"]) for r in rows] == np.repeat(
        log.evaluations["accuracy"], 3
    ).tolist()


def test_many_runs_are_divided_by_a_setting():
    graphs = ("ring", "exponential", "complete")
    jobs = [
        f'[graph]\nname = "{graph}"\n[schedule]\nlr = {lr}\n'
        for lr in (0.1, 0.2, 0.3, 0.4)
        for graph in graphs
    ]
    logs = [SimpleNamespace(job=job, nodes=2) for job in jobs]
    assert parted(logs[:10]) == {"": list(range(10))}
    assert parted(logs) == {
        f"graph.name = {graph}": list(range(k, 12, 3)) for k, graph in enumerate(graphs)
    }
    same = [SimpleNamespace(job=jobs[0], nodes=2)] * 12
    assert list(map(len, parted(same).values())) == [10, 2]


@pytest.mark.every
def test_many_runs_are_drawn_in_parts_of_at_most_ten(tmp_path):
    """Draw twelve runs by their three graphs; the title does not list all of them."""
    graphs = ("ring", "exponential", "complete")
    folders = [
        run(tmp_path / f"{graph}-{lr}", steps=20, evaluations=(10, 20), graph=graph, lr=lr)
        for lr in (0.1, 0.2, 0.3, 0.4)
        for graph in graphs
    ]
    drawing = figure(load(folders))
    assert [len(sub.legends[0].texts) for sub in drawing.subfigs] == [4, 4, 4]
    first, *_ = colours = [
        [line.get_color() for line in sub.legends[0].get_lines()] for sub in drawing.subfigs
    ]
    assert colours == [first] * 3 and len({*first}) == 4
    titles = [sub.legends[0].get_title().get_text() for sub in drawing.subfigs]
    assert titles == [f"graph.name = {graph}" for graph in graphs]
    assert len(figure(load(folders[:10])).subfigs) == 0
    write(folders, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<title>12 runs</title>" in text
    plot(folders, tmp_path / "many.png")


@pytest.mark.parametrize("width", [every(390), every(1280)])
def test_the_page_fits_a_phone_and_a_screen_and_loads_no_other_file(tmp_path, width):
    """In headless Chromium, the page is no wider than its window."""
    write([run(tmp_path / "digits")], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    sources = re.findall(r"(?:src|href)=.(\w+:)", page) + re.findall(r"url\((\w+:)", page)
    assert set(sources) == {"data:"} and "prefers-color-scheme: dark" in page
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium on PATH (Debian: apt install chromium)")
    size = "document.documentElement.scrollWidth + ' of ' + innerWidth"
    inside = html.escape(f"{page}<script>parent.document.title = {size}</script>")
    host = f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{inside}"></iframe>'
    (tmp_path / "page.html").write_text(f"<!doctype html><title></title>{host}")
    words = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
        "--window-size=1400,900",
        "--dump-dom",
        f"file://{tmp_path}/page.html",
    ]
    done = subprocess.run([browser, *words], capture_output=True, text=True, timeout=60)
    width_of_page, window = map(int, re.search(r"<title>(\d+) of (\d+)", done.stdout).groups())
    assert width_of_page <= window
    assert window in (width, width - 15)  # with a scroll bar
