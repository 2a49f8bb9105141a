"""Scripts of jobs/ that draw figures of papers and compare methods, run at a small size."""

import runpy
from pathlib import Path

import pytest

import mpigossip
from tests.cases import every
from tests.launch import REPO

TINY = [
    "data.source=synthetic",
    "data.samples=64",
    "data.test_samples=32",
    "data.batch=4",
    "model.name=mlp",
    "run.epochs=2",
    "node.devices=cpu:1",
]


@pytest.fixture
def little(tmp_path, monkeypatch):
    """Replace `mpigossip.study` by a small one: two labels per axis, few nodes, one seed."""
    (tmp_path / "jobs").symlink_to(REPO / "jobs")
    monkeypatch.chdir(tmp_path)
    whole = mpigossip.study

    def study(job, grid, **given):
        labels = iter((2, 1))  # of the first axis, of the second
        grid = {
            axis: dict([*values.items()][:most]) if isinstance(values, dict) else values[:most]
            for (axis, values), most in zip(grid.items(), labels, strict=False)
        }
        nodes = 4 if isinstance(given["nodes"], list) else min(given["nodes"], 16)
        fewer = {"nodes": nodes, "seeds": 1, "rates": None}
        return whole(job, grid, **given | fewer | {"settings": [*given.get("settings", ()), *TINY]})

    monkeypatch.setattr(mpigossip, "study", study)


SCRIPTS = {
    "claims/topology.py": ("claims-figures/topology", ["topology.png"]),
    "claims/residue.py": (
        "claims-figures/residue", ["accuracy.png", "consensus.png", "residue.png"],
    ),
    "claims/variance.py": ("claims-figures/variance", ["loss.png", "variance.png"]),
    "claims/shuffling.py": ("claims-figures/shuffling", ["accuracy.png", "loss.png"]),
    "compare.py": ("compare", ["curves.pdf"]),
}  # fmt: skip


@pytest.mark.parametrize("script", [every(name) for name in SCRIPTS])
def test_a_script_draws_its_figures(little, script, capsys):
    folder, pictures = SCRIPTS[script]
    runpy.run_path(f"jobs/{script}")
    there = Path("runs") / folder
    found = [path.name for path in there.iterdir() if path.suffix in (".png", ".pdf")]
    assert sorted(found) == pictures
    assert all((there / name).stat().st_size > 5000 for name in pictures)
    assert capsys.readouterr().out.count("seed-0") >= 2


def test_a_comparison_for_a_paper_takes_twenty_lines():
    text = (REPO / "jobs" / "compare.py").read_text()
    code = text.split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
