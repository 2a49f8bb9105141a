"""tools/claims/measure.py: the quick table, the protocols of training claims, and node.vmap."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.training import assemble
from tests.cases import on_each

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS / "claims"))

import learning  # noqa: E402
import measure  # noqa: E402
from table import Row, markdown  # noqa: E402

MAY_FAIL = ("`graph show`", "64 LeNet nodes")
"""Times, on a busy machine."""


@pytest.mark.every
@pytest.mark.timeout(600)
def test_quick_table_holds(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, TOOLS / "claims" / "measure.py", "--quick", "--out", out]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode in (0, 1), ran.stderr
    text = out.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 33
    failed = [row for row in rows if "does not hold" in row]
    assert not [row for row in failed if not row.startswith(tuple(f"| {m}" for m in MAY_FAIL))]
    assert "not run" not in text


def test_table_names_verdicts():
    rows = [
        Row("x|y", "s", "1", "2", False),
        Row("c", "s", "1", "not run: no time", None, judged=False),
        Row("c", "s", "1", "2", None, judged=False, table="Second"),
        Row("c", "s", "1", "2", None),
    ]
    text = markdown(rows, {})
    assert "x¦y" in text and "**does not hold**" in text and "| cannot tell |" in text
    assert "| not run |" in text and text.index("## Second") < text.index("| as measured |")


def test_protocols_are_studies_that_fit_in_six_hours(capsys):
    """All their points are jobs whose parts go together; rows name methods and labels there are."""
    assert measure.main(["--estimate"]) == 0
    together = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert together[0] == "together" and float(together[3]) <= 6
    for protocol in measure.protocols(measure.arguments([])):
        grid, axes = protocol.given["grid"], {"nodes": protocol.given["nodes"]}
        for row in protocol.own["row"]:
            assert {*row.get("order", [])} <= {*grid["method"]}
            for axis, label in row.get("at", {}).items():
                assert label in (axes | grid)[axis]


@on_each(
    ("apart", "how", "verdict"),
    [
        ([0.05, 0.06, 0.05, 0.06, 0.05], {"by": 0.03}, True),
        ([0.01, 0.02, 0.01, 0.02, 0.01], {"by": 0.03}, False),
        ([0.01, 0.06, 0.01, 0.06, 0.03], {"by": 0.03}, None),
        ([0.05, 0.06, 0.05, 0.06], {"by": 0.03}, None),  # too few seeds
        ([0.001, -0.001, 0.0, 0.001, 0.0], {"alike": 0.01}, True),
        ([0.04, 0.03, 0.04, 0.03, 0.04], {"alike": 0.01}, False),
        ([0.015, 0.005, 0.01, 0.01, 0.02], {"alike": 0.01}, None),
    ],
)
def test_a_verdict_needs_an_interval_on_one_side(apart, how, verdict):
    assert learning.judged(apart, **how) is verdict


@on_each("model", ["mlp", "lenet"])
@on_each("accumulate", [1, 2])
def test_vmap_takes_the_steps_of_the_loop(model, accumulate):
    ends = []
    for vmap in (False, True):
        table = {
            "run": {"epochs": 1},
            "data": {"batch": 16, "workers": 0},
            "model": {"name": model},
            "algorithm": {"accumulate": accumulate},
            "schedule": {"name": "constant", "scale": "none", "lr": 0.1},
            "node": {"vmap": vmap, "devices": "cpu:2"},
        }
        assembly = assemble.assemble(assemble.load(table), Alone(), 5)
        losses = [assembly.trainer.step().loss for _ in range(4)]
        ends.append((losses[-1], assembly.trainer.replicas.full[0].clone()))
        assembly.close()
    # float32 in another order; a unit whose input is within rounding of 0 may be on in one alone,
    # which moves a gradient by a sample's share: lr / batch / accumulate a step
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=4 * 0.1 / 16 / 2 * 0.1)


def test_vmap_refuses_norm_statistics():
    table = {"data": {"source": "synthetic"}, "model": {"name": "resnet20"}, "node": {"vmap": True}}
    with pytest.raises(JobError, match="changes its buffers in training"):
        assemble.assemble(assemble.load(table), Alone(), 2)
