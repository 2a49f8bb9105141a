"""tools/bench/language.py: every method's job is right, the table's figures, calls in pieces."""

import importlib.util
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from mpigossip.training import assemble

TOOL = Path(__file__).parents[2] / "tools" / "bench" / "language.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("language", TOOL)
    made = sys.modules["language"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["language"]


@pytest.mark.parametrize("size", ["tiny", "cpu"])
def test_every_methods_job_is_right(tool, size, tmp_path):
    for every in (1, 10):
        made = tool.cells(tool.SIZES[size], tmp_path / "text.h5", list(tool.METHODS), every)
        assert len({cell.name for cell in made}) == len(tool.METHODS)
        for cell in made:
            job = assemble.load(tool.JOB, cell.settings)
            assert assemble.mistakes(job, cell.nodes) == [] and job.data.every == every


def test_the_table_compares_losses_and_bytes(tool, tmp_path):
    falling = np.linspace(2.0, 1.0, 101)
    curves = {
        "parallel": [tool.Curve(falling, np.arange(101) * 1e7, 1.0)] * 2,
        "diloco-8": [tool.Curve(falling + 0.01, np.arange(101) * 1e5, last) for last in (1.0, 1.1)],
        "dsgd": [tool.Curve(falling + 0.5, np.arange(101) * 5e6, 1.5)] * 2,
    }
    text = tool.table(dict.fromkeys(curves, 0.004), curves)
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "±" in line}
    # 2 % above 1.0: the 99th of 101, 0.98 GB; a hundredth higher, the 100th at 1e5 each
    assert "| +0.00 % | 1000.0 MB | 1.0 x | 980.0 MB | 1.0 x |" in lines["parallel"]
    assert "1.0500 ± 0.0500 | +5.00 % | 10.0 MB | 100.0 x | 9.9 MB | 99.0 x |" in lines["diloco-8"]
    assert lines["dsgd"].endswith("| 500.0 MB | 2.0 x | never |  |")
    assert "1.0200 nats/byte" in text
    tool.draw(curves, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_call_ends_when_its_hours_are_over(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tool, "run", lambda *_: signal.pause())
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert tool.main([str(tmp_path / "x.h5"), str(tmp_path), "--hours", "1e-5"]) == tool.AGAIN
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "not all is done yet: call again" in capsys.readouterr().err


def test_mistakes_are_said_before_any_work(tool, tmp_path):
    cut = ["--methods", "muloco-32", "--settings", "node.devices=cpu:2"]
    with pytest.raises(SystemExit, match="takes whole matrices, and each of the 2 slots"):
        tool.main([str(tmp_path / "x.h5"), str(tmp_path), *cut])
