"""Jobs of jobs/own at a small size: a PINN, a segmentation, a stream, a model of transformers."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mpigossip.analysis import plot, report
from mpigossip.cluster.mpi_world import MPIWorld
from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.analysis.figures import overlapping
from tests.cases import naming

OWN = Path(__file__).parents[2] / "jobs" / "own"
SMALL = {
    "oscillator": "data.samples=192 run.epochs=4",
    "shapes": "data.samples=48 data.test_samples=10 run.epochs=2 data.workers=0 data.size=16",
    "stream": "data.samples=384 data.test_samples=32 run.epochs=2",
    "letters": "data.samples=96 data.test_samples=8 run.epochs=2 data.context=8",
}
"""Settings with which each job takes about a second on 3 nodes."""
METRICS = {
    "oscillator": ["residual", "squared_error"],
    "shapes": ["overlap", "pixels"],
    "stream": ["distance"],
    "letters": ["accuracy"],
}


def job(name, folder, *more):
    if name == "letters":
        pytest.importorskip("transformers", reason="transformers isn't installed")
    return assemble.load(
        OWN / f"{name}.toml", [f"run.output={folder}", *SMALL[name].split(), *more]
    )


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(OWN)
    yield
    for name in SMALL:
        sys.modules.pop(name, None)


def train(made, nodes=3):
    with SingleProcess() as alone:
        return start_and_resume.train(made, alone, nodes)


def on_ranks(comm, name, folder):
    sys.path.insert(0, str(OWN))
    try:
        with MPIWorld(comm) as world:
            return start_and_resume.train(job(name, folder), world, world.size).get("digest")
    finally:
        sys.path.remove(str(OWN))


@pytest.mark.parametrize("name", SMALL)
def test_a_custom_job_trains_evaluates_resumes_and_shows_its_metrics(ranks, name, tmp_path):
    summary = train(job(name, tmp_path / "whole"))
    half = summary["steps"] // 2 + 1
    cut = train(job(name, tmp_path / "cut", f"run.steps={half}"))
    torch.rand(5)
    with SingleProcess() as alone:
        again = start_and_resume.resume(tmp_path / "cut", ["run.steps=none"], alone, None)
    assert cut["steps"] == half and again["digest"] == summary["digest"]
    if name in ("shapes", "stream"):
        assert ranks(3)(on_ranks, name, tmp_path / "ranks")[0] == summary["digest"]
    log = read(tmp_path / "whole" / "log.h5")
    assert log.evaluations["loss"][-1] < log.steps["loss"][0].mean(), "it learns"
    drawn = plot.figure(plot.load([tmp_path / "whole"]))
    titles = {axes._left_title.get_text() for axes in drawn.axes}
    FigureCanvasAgg(drawn).draw()
    for axes in drawn.axes:
        if legend := axes.get_legend():
            assert not overlapping([axes._left_title, legend], drawn.canvas)
    for metric in METRICS[name]:
        assert np.isfinite(log.steps[metric]).all() and f"Test {metric}" in titles
        assert metric in report.table(log) and metric in summary


def test_a_resumed_stream_reports_that_it_is_read_again(tmp_path, capsys):
    train(job("stream", tmp_path / "run", "run.steps=3"))
    with SingleProcess() as alone:
        start_and_resume.resume(tmp_path / "run", ["run.steps=4"], alone, None)
    assert re.search(naming("stream", "48 samples per node"), capsys.readouterr().out)
