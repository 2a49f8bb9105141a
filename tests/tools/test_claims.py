"""tools/claims/measure.py: the quick table, the protocols of training claims, and node.vmap."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.training import assemble

TOOLS = Path(__file__).resolve().parents[2] / "tools"
PROTOCOLS = TOOLS.parent / "jobs" / "claims"
sys.path.insert(0, str(TOOLS / "claims"))

import learning  # noqa: E402
import measure  # noqa: E402
import training  # noqa: E402
from table import Row, markdown, write  # noqa: E402

MAY_FAIL = ("`graph show`", "64 LeNet nodes")
"""Times, on a busy machine."""


@pytest.mark.timeout(600)
def test_quick_table_holds(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, TOOLS / "claims" / "measure.py", "--quick", "--out", out]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ran.returncode in (0, 1), ran.stderr
    text = out.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 29
    failed = [row for row in rows if "does not hold" in row]
    assert not [row for row in failed if not row.startswith(tuple(f"| {m}" for m in MAY_FAIL))]
    assert "not run" not in text


def test_only_one_claim_and_a_wrong_name(capsys, tmp_path):
    out = tmp_path / "one.md"
    assert measure.main(["--quick", "--only", "exponential_gap", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").count("| holds |") == 1
    with pytest.raises(SystemExit):
        measure.main(["--only", "exponential_gup"])
    assert "exponential_gap" in capsys.readouterr().err


def test_table_names_verdicts_and_keeps_what_was_there(tmp_path):
    rows = [
        Row("a", "x|y", "s", "1", "2", False),
        Row("b", "c", "s", "1", "not run: no time", None),
        Row("c", "c", "s", "1", "2", None),
    ]
    text = markdown(rows)
    assert "x¦y" in text and "**does not hold**" in text
    assert "| not run |" in text and "| as measured |" in text
    write(rows[:1], tmp_path / "t.md", "head\n")
    assert (tmp_path / "t.md").read_text(encoding="utf-8").startswith("head\n| claim |")
    assert [path.name for path in tmp_path.iterdir()] == ["t.md"]


@pytest.mark.parametrize("path", sorted(PROTOCOLS.glob("*.toml")), ids=lambda path: path.stem)
def test_protocols_are_jobs_that_fit(path):
    protocol = training.Protocol.read(path)
    for case, method in protocol.each():
        job = assemble.load(protocol.job(case, method))
        assert assemble.mistakes(job, protocol.table["nodes"]) == []


class Invented:
    """Runs whose accuracy is best at one rate."""

    def __init__(self, best):
        self.best, self.asked, self.done = best, [], []

    def known(self, run):
        if run in self.done:
            return {"accuracy": 1 - abs(run["lr"] - self.best)}
        return None

    def fill(self, tasks):
        for run, _, _ in tasks:
            self.done.append(run)
            if (run["claim"], run["method"]) == ("momentum", "local"):
                self.asked.append(run["lr"])


@pytest.mark.parametrize(
    ("best", "further", "chosen"),
    [
        (0.03, [0.017, 0.055], 0.03),
        (0.019, [0.003, 0.0055, 0.017], 0.017),
        (0.31, [0.3, 0.17], 0.3),
        (0.0, [0.003, 0.0055], 0.003),
    ],
)
def test_a_search_goes_beyond_its_grid_and_between_its_rates(best, further, chosen):
    """One rate beyond where the best is at an end, then the geometric means around the best."""
    protocol = training.Protocol.read(PROTOCOLS / "momentum.toml")
    runs = Invented(best)
    with pytest.raises(training.OutOfTime, match="--search"):
        protocol.rate(runs, "Dirichlet 0.1", "local")
    training.search(runs, [protocol])
    assert protocol.rate(runs, "Dirichlet 0.1", "local") == chosen
    assert runs.asked == [0.01, 0.03, 0.1, *further]


def test_training_claims_without_data_say_so(tmp_path):
    options = measure.arguments([])
    for kept, reason in ((PROTOCOLS, "it needs --data"), (tmp_path, "its learning rate wasn't")):
        runs = training.Runs(kept, None, tmp_path)
        runs.entries = [e for e in runs.entries if e["run"]["kind"] == "search"]
        learning.do(options, runs)
        rows = [row for claim in learning.CLAIMS for row in claim(options, runs)]
        assert len(rows) == 10
        assert all(r.measured.startswith(f"not run: {reason}") and r.holds is None for r in rows)


SMALL = {
    "run": {"epochs": 1},
    "data": {"batch": 16, "workers": 0},
    "schedule": {"name": "constant", "scale": "none", "lr": 0.1},
    "log": {"consensus_every": 1},
}


def test_a_run_reports_what_it_did_and_where_it_diverged():
    found = training.train(SMALL, nodes=3, points=2)
    steps = found["steps"]
    assert [point[0] for point in found["curve"]] == [steps // 2, steps // 2 * 2]
    assert found["exchanges"] == steps and found["bytes"] > 0 and found["consensus"] > 0
    assert 0 < found["accuracy"] <= 1
    wild = training.merged(SMALL, {"schedule": {"lr": 1e30}})
    assert training.train(wild, nodes=3)["diverged"] < 20


@pytest.mark.parametrize("model", ["mlp", "lenet"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_vmap_takes_the_steps_of_the_loop(model, accumulate):
    ends = []
    for vmap in (False, True):
        table = {"model": {"name": model}, "algorithm": {"accumulate": accumulate}}
        whole = training.merged(SMALL, table, {"node": {"vmap": vmap, "devices": "cpu:2"}})
        assembly = assemble.assemble(assemble.load(whole), Alone(), 5)
        losses = [assembly.trainer.step().loss for _ in range(4)]
        ends.append((losses[-1], assembly.trainer.replicas.full[0].clone()))
        assembly.close()
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_vmap_refuses_norm_statistics():
    table = {"data": {"source": "synthetic"}, "model": {"name": "resnet20"}, "node": {"vmap": True}}
    with pytest.raises(JobError, match="norm statistics"):
        assemble.assemble(assemble.load(table), Alone(), 2)
