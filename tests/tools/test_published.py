"""Step times that others published, and what `mpigossip plan` predicts for them."""

import csv
import json
import statistics
from functools import cache
from pathlib import Path

import pytest

from mpigossip.analysis.plan import ALL_REDUCE, Choice, predict
from mpigossip.cli import main
from mpigossip.training import assemble
from mpigossip.training.costs import Subject, subject
from mpigossip.training.machines import SUM_RATE, Machine, queue_warning

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tools" / "bench" / "published"
JOB = FOLDER / "job.toml"
COMPUTE_S = 20.7e-3
UPDATE_S = 4.55e-3
LATENCY_S = 161e-6
QUEUE_S = 50e-3
NODES = 4
ALGORITHMS = {"diloco": "diloco", "localsgd": "dsgd"}


@pytest.fixture(autouse=True)
def _import_from_the_root(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


def settings(method: str, period: int) -> list[str]:
    if method == "ddp":
        return []
    return [f"algorithm.name={ALGORITHMS[method]}", f"cadence.period={period}"]


@cache
def planned(method: str, period: int) -> Subject:
    return subject(assemble.load(JOB, settings(method, period)))[0]


def predicted_s(method: str, period: int, bandwidth: float) -> float:
    wire = LATENCY_S, bandwidth
    machine = Machine(COMPUTE_S, 0.0, UPDATE_S, *wire, *wire, SUM_RATE)
    choice = Choice(ALL_REDUCE) if method == "ddp" else Choice("complete", "cpsgd")
    row = predict(planned(method, period), machine, choice, NODES, 1, per_tensor=True)
    return row.step_s


def cells() -> list[dict]:
    with (FOLDER / "diloco-measured.csv").open() as file:
        return [
            {
                "method": row["method"],
                "period": int(row["period"]),
                "bandwidth": float(row["verified_mbit_per_s"]) * 1e6 / 8,
                "steady_s": float(row["steady_ms_per_step"]) / 1e3,
            }
            for row in csv.DictReader(file)
        ]


def errors(ddp: bool, fast: bool) -> list[float]:
    """Return relative errors of cells by method, of at least 1 Gbit/s (nominal) or below."""
    return [
        predicted_s(cell["method"], cell["period"], cell["bandwidth"]) / cell["steady_s"] - 1
        for cell in cells()
        if (cell["method"] == "ddp") == ddp and (cell["bandwidth"] > 0.9e9 / 8) == fast
    ]


def test_the_model_has_the_published_size():
    what = planned("diloco", 8)
    assert what.flat.count == 30_846_720
    assert what.module.buffers == 6 * 8_388_608


def test_the_published_steps_are_predicted():
    diloco = [abs(error) for error in errors(ddp=False, fast=True)]
    assert len(diloco) == 20
    assert statistics.median(diloco) <= 0.02 and max(diloco) <= 0.08
    ddp = [abs(error) for error in errors(ddp=True, fast=True)]
    assert len(ddp) == 3 and statistics.median(ddp) <= 0.08


def test_steps_on_slow_links_take_longer_than_predicted_and_are_warned_about():
    slow = errors(ddp=False, fast=False) + errors(ddp=True, fast=False)
    assert len(slow) == 18 and all(-0.3 < error < -0.06 for error in slow)
    for cell in cells():
        warning = queue_warning("nccl-sockets", cell["bandwidth"], QUEUE_S)
        assert bool(warning) == (cell["bandwidth"] < 0.9e9 / 8)


def grid() -> list[str]:
    """Return a Markdown table of all cells: measured and predicted milliseconds, and the error."""
    links = sorted({cell["bandwidth"] for cell in cells()}, reverse=True)
    rates = [f"{rate * 8 / 1e6:,.0f} Mbit/s" for rate in links]
    names = {"ddp": "DDP", "diloco": "DiLoCo, H = {}", "localsgd": "LocalSGD, H = {}"}
    rows: dict[str, dict] = {}
    for cell in cells():
        row = rows.setdefault(names[cell["method"]].format(cell["period"]), {})
        measured, predicted = (
            cell["steady_s"],
            predicted_s(cell["method"], cell["period"], cell["bandwidth"]),
        )
        error = round(100 * (predicted / measured - 1))
        row[cell["bandwidth"]] = (
            f"{1e3 * measured:,.0f}, {1e3 * predicted:,.0f} ({error:+d} %)".replace("+0 %", "0 %")
        )
    lines = [["", *rates], ["---"] * (1 + len(rates))]
    lines += [[name, *(row.get(rate, "") for rate in links)] for name, row in rows.items()]
    return ["| " + " | ".join(line) + " |" for line in lines]


def test_the_page_will_it_help_shows_all_cells():
    table = grid()
    assert "\n".join(table) in (ROOT / "tools/docs/will-it-help.md").read_text()
    assert sum(line.count("%)") for line in table) == len(cells()) == 41


def test_the_page_shows_the_errors():
    page = (FOLDER / "README.md").read_text()
    groups = {"DiLoCo, LocalSGD": False, "DDP": True}
    for fast, links in ((True, "about 1 Gbit/s and above"), (False, "below about 1 Gbit/s")):
        for name, ddp in groups.items():
            values = [abs(error) for error in errors(ddp, fast)]
            median, worst = statistics.median(values), max(values)
            row = f"| {name}, {links} | {len(values)} | {median:.1%} | {worst:.1%} |"
            assert row.replace("%", " %") in page, row


def test_the_command_line_predicts_the_same(capsys):
    cell = next(c for c in cells() if c["method"] == "diloco" and c["period"] == 32)
    rate = f"{cell['bandwidth'] * 8 / 1e6:.2f}Mbit"
    words = ["plan", str(JOB), "--nodes", "4", "--compute", "20.7ms", "--update", "4.55ms"]
    words += ["--latency", "161us", "--bandwidth", rate, "--sum", "300GB/s", "--json"]
    words += ["--collectives", "tensors", *settings("diloco", 32)]
    assert not main(words)
    result = json.loads(capsys.readouterr().out)
    rows = {(r["graph"], r["cadence"], r["wire"]): r["step_s"] for r in result["rows"]}
    expected = predicted_s("diloco", 32, cell["bandwidth"])
    assert rows["complete", "cpsgd", "fp32"] == pytest.approx(expected, rel=1e-6)
    expected = predicted_s("ddp", 1, cell["bandwidth"])
    assert rows[ALL_REDUCE, "always", "fp32"] == pytest.approx(expected, rel=1e-6)
