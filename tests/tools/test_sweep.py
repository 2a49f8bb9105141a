"""tools/postprocess.py and tools/sweep.py, as a batch job calls them."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(tmp_path, monkeypatch, capsys):
    """`tool(name, *words)`: a program of tools/ run in `tmp_path`: code, output, errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        code = runpy.run_path(str(ROOT / "tools" / name))["main"]()
        return code, *capsys.readouterr()

    return run


def test_a_sweep_from_its_grid_to_its_report(tool, tmp_path):
    job = "jobs/digits.toml"
    _, made, _ = tool("sweep.py", "grid", job, "graph.name=ring,base-2", "run.steps=2")
    assert made.splitlines() == [
        "graph.name=ring run.steps=2", "graph.name=base-2 run.steps=2",
    ]  # fmt: skip
    (tmp_path / "sweep.txt").write_text(made)
    code, _, said = tool("sweep.py", "report", job, "sweep.txt", "--out", "all")
    assert code == 2 and "train them first" in said
    assert tool("sweep.py", "run", job, "sweep.txt", "--nodes", 2)[0] == 0
    code, _, said = tool("sweep.py", "run", job, "sweep.txt", "--nodes", 3)
    assert code == 2 and said.count("holds a run of 2 nodes, here are 3") == 2
    code, table, _ = tool("sweep.py", "report", job, "sweep.txt", "--out", "all")
    assert code == 0 and "graph.name=base-2" in table
    assert (tmp_path / "all" / "report.html").stat().st_size > 50_000
    code, _, said = tool("postprocess.py", "runs/digits-1", "runs/digits-2", "none")
    assert code == 1 and "none doesn't exist" in said
    written = {path.name for path in (tmp_path / "runs").iterdir() if path.is_file()}
    assert written == {
        "log.png", "report.html",
        *(f"digits-{k}{end}" for k in (1, 2) for end in (".csv", "-evaluations.csv", ".txt")),
    }  # fmt: skip
