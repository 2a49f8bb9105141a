"""jobs/claims: the quick table, protocols, verdicts, stored runs, the virtual clock, node.vmap."""

import argparse
import copy
import dataclasses
import itertools
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from mpigossip import algorithms
from mpigossip.algorithms import Step
from mpigossip.cluster.world import SingleProcess
from mpigossip.graphs import graph
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training import assemble
from tests.cases import on_each

CLAIMS = Path(__file__).resolve().parents[2] / "jobs" / "claims"
sys.path.insert(0, str(CLAIMS))

import measure  # noqa: E402
import optimal  # noqa: E402
import parts  # noqa: E402
import quadratics  # noqa: E402
import run_queue  # noqa: E402
import seconds  # noqa: E402
import sharing  # noqa: E402
import verdicts  # noqa: E402
from judging import judge, of_values  # noqa: E402
from table import Row, markdown  # noqa: E402

MAY_FAIL = ("`graph show`", "64 LeNet nodes")
"""Beginnings of claims on times, which may not hold on a busy machine."""


@pytest.mark.every
@pytest.mark.timeout(1800)
def test_quick_table_holds(tmp_path):
    out = tmp_path / "table.md"
    command = [sys.executable, CLAIMS / "measure.py", "--quick", "--out", out]
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
    """Each point is a valid job, and each row names methods and labels of its study."""
    assert measure.main(["--estimate"]) == 0
    together = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert together[0] == "together" and float(together[3]) <= 6
    for protocol in measure.protocols(measure.parse_arguments([])):
        grid = protocol.study_arguments["grid"]
        axes = {"nodes": protocol.study_arguments["nodes"]}
        for row in protocol.judging["row"]:
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
    assert judge("", [of_values(apart)], **how).holds is verdict


def test_the_page_says_what_follows_from_the_stored_runs(capsys):
    assert verdicts.main([]) == 0, capsys.readouterr().out


def test_the_page_has_every_stored_interval():
    """Accuracies are in percentage points, losses and variances unscaled, and bytes in MB."""

    def points(value):
        wide = f"{100 * value:.2f}".rstrip("0").rstrip(".")
        return wide if abs(value) < 0.1 else f"{100 * value:.1f}"

    forms = {
        "accuracy": (points, " points"),
        "train_loss": ("{:.4f}".format, ""),
        "spread": ("{:.6f}".format, ""),
        "bytes_sent": (lambda v: f"{v / 1e6:.0f}", " MB"),
    }
    page = verdicts.PAGE.read_text("utf-8").partition("## Details of the training claims")[2]
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")]
    for line in verdicts.read(verdicts.INTERVALS):
        form, unit = forms[line["figure"]]
        mean, low, high = (form(line[k]) for k in ("mean", "low", "high"))
        at = {"own rates": -2, "common rate": -1}[line["table"]]
        first = line["first"].partition(",")[0]
        assert [
            row
            for row in rows
            if f"{mean} [{low}, {high}]{unit}" == row[at].removesuffix(" |")
            and first in " ".join(row[:2])
        ], line


def test_verdicts_are_those_of_the_intervals_before_holm():
    """A single difference has p ≤ 5 % exactly if its 95 % interval is on one side of the limit."""
    for line in verdicts.read(verdicts.INTERVALS):
        low, high, by, alike = (line.get(k) for k in ("low", "high", "by", "alike"))
        if alike is None:
            wanted = True if low >= (by or 0) else False if high < (by or 0) else None
        else:
            beyond = low > alike or high < -alike
            wanted = True if -alike <= low and high <= alike else False if beyond else None
        found = judge("", [verdicts.of_interval(line)], by or 0.0, alike)
        assert found.holds is wanted, line


def test_holm_keeps_the_smallest_and_loses_what_is_not_far_below():
    rows = [verdicts.Verdict("", True, p) for p in (0.04, 0.001, 0.03)]
    assert [one.adjusted for one in verdicts.holm(rows)] == pytest.approx([0.06, 0.003, 0.06])


@on_each("plant", ["another method's run", "a seed twice", "a search reported", "figures"])
def test_a_planted_falsehood_is_found(plant):
    runs = verdicts.read(verdicts.RUNS)
    assert verdicts.faults(runs) == []
    mine = [run for run in runs if run["study"] == "gap" and run["level"] == "best"]
    first = mine[0]
    other = next(run for run in mine if run["method"] != first["method"])
    same = next(run for run in mine[1:] if run["method"] == first["method"])
    wrong = {
        "another method's run": first | {k: other[k] for k in ("settings", "digest", "figures")},
        "a seed twice": same | {k: first[k] for k in ("seed", "settings", "digest", "figures")},
        "a search reported": first | {"seed": run_queue.SEARCH},
        "figures": first | {"figures": other["figures"]},
    }[plant]
    planted = [
        wrong if run is (same if plant == "a seed twice" else first) else run for run in runs
    ]
    assert verdicts.faults(planted)


@on_each("name", ["detag", "dsgt", "dsgd"])
def test_modes_of_the_ring_move_as_the_packages_nodes_do(name):
    """`optimal.py` iterates two modes in place of n nodes."""
    n = 8
    rate = 0.05
    b = optimal.minima(0.3, 0)
    wave = np.cos(2 * np.pi * np.arange(n) / n)
    each = torch.from_numpy(b[0] + np.multiply.outer(wave, b[1]))
    options = {
        "detag": {"phase": 3, "eta": 0.4},
        "dsgt": {"style": "atc"},
        "dsgd": {"style": "atc"},
    }
    method = algorithms.build(name, "sgd", options[name], 0, graph("ring", n))
    curvature = torch.from_numpy(optimal.CURVATURE)
    x = torch.zeros(n, 5, dtype=torch.float64)
    there = quadratics.steps(method, graph("ring", n), x, lambda x: curvature * (x - each), rate)
    start = np.zeros((1, 2, 5))
    w = optimal.weights(n)
    here = {
        "detag": lambda: optimal.detag(b, np.array(rate), start, w, 3, 0.4),
        "dsgt": lambda: optimal.tracking(b, np.array(rate), start, w),
        "dsgd": lambda: optimal.gossip(b, np.array(rate), start, w),
    }[name]()
    for _ in range(13):
        (modes,), nodes = next(here), next(there).numpy()
        np.testing.assert_allclose(nodes, modes[0] + np.multiply.outer(wave, modes[1]), atol=1e-12)


def test_the_formula_of_dpsgd_is_its_iteration():
    b = optimal.minima(3.0, 1)
    n = 8
    count, rate = optimal.dpsgd(b, n, 1e-1)
    start = np.zeros((2, 5))
    w = optimal.weights(n)
    models = list(itertools.islice(optimal.gossip(b, np.array(rate), start, w), count))
    sizes = [float(optimal.squares(x, b[0])) for x in models]
    assert sizes[-1] <= 1e-2 < min(sizes[:-1])


def test_diloco_begins_where_the_warm_start_ends():
    """Before, the nodes average their models; the outer step starts there, without momentum."""
    made, diloco = (
        algorithms.build(name, "sgd", more, 0, graph("complete", 2))
        for name, more in (("parts:warm_diloco", {"warm": 1}), ("diloco", {}))
    )
    ends = []
    for method, first in ((made, 0), (diloco, 1)):
        x = torch.zeros(2, 3) if method is made else torch.full((2, 3), 7.0)
        state = method.init(x)
        for t in range(first, 3):
            now = Step(t, t, ExchangeKind.GLOBAL, 0.1)
            mixed = torch.full((2, 3), float((7, 5, 4)[t]))
            state = method.receive(x, x, state, (mixed,), (mixed,), now)
        ends.append(x)
    assert torch.equal(*ends) and ends[0][0, 0] < 4
    kinds = [parts.warm_periodic(warm=2, period=3).kind(None, t) for t in range(6)]
    assert [kind is ExchangeKind.GLOBAL for kind in kinds] == [True, True, True, False, False, True]
    kinds = [parts.exact_parts(first=0.2, last=0.1, total=10).kind(None, t) for t in range(10)]
    assert [kind is ExchangeKind.GOSSIP for kind in kinds] == [False] * 2 + [True] * 7 + [False]


def test_on_a_link_that_costs_nothing_nobody_is_faster(monkeypatch):
    monkeypatch.setattr(seconds, "SLOW", 0.0)
    on = dataclasses.replace(seconds.machine(1e9, 0.0), combine_rate=1e30)
    took = {
        method: seconds.end_times(method, range(20), 20, 4, on, 1)[-1]
        for method in seconds.CELL.methods
    }
    assert took == pytest.approx(dict.fromkeys(took, 20 * on.compute_s), rel=1e-6)
    slow = seconds.end_times("parallel", range(20), 20, 4, seconds.machine(1, 0.0), 1)
    assert slow[-1] > 1.05 * took["parallel"]


def test_ranks_compute_as_long_as_the_clock_says(monkeypatch):
    """If messages take no time, a step of parallel SGD lasts as long as its slowest node sleeps."""
    slept = []
    ended = []
    rows = torch.ones(2, 4)
    monkeypatch.setattr(parts.time, "sleep", slept.append)
    monkeypatch.setattr(parts.signal, "raise_signal", ended.append)
    on = dataclasses.replace(seconds.machine(1e9, 0.0), combine_rate=1e30)
    given = {"compute_s": on.compute_s, "slow": 0.3, "times": seconds.TIMES, "draw": 1, "stop": 20}
    monkeypatch.setenv("PMI_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("PMI_RANK", str(rank))
        model = copy.deepcopy(parts.paced((4,), 3, padding=5, **given))
        for _ in range(20):
            model(rows)
        model.eval()(rows)
        assert len(ended) == rank + 1
    nodes = np.reshape(slept, (4, 20))
    assert 1 < nodes.max() / nodes.min() == pytest.approx(seconds.TIMES)
    monkeypatch.setattr(seconds, "SLOW", 0.3)
    took = seconds.end_times("parallel", range(20), 20, 4, on, 1, overlap=False)
    assert took == pytest.approx(nodes.max(0).cumsum(), rel=1e-6)


def test_readers_links_are_shared_where_nodes_are_out_of_step(monkeypatch):
    link = sharing.CELLS[0]
    slow = [
        sharing.simulated_seconds(link, 30, 2, False, *kind) for kind in ((0, 0), (1, 0), (1, 1))
    ]
    assert slow[1] > 1.1 * slow[2]
    assert slow[2] == pytest.approx(slow[0], rel=0.05)
    monkeypatch.setattr(seconds, "SLOW", 0.0)
    size = 4 * seconds.resnet().count * 2 * link.scale * sharing.FRAMES
    each = seconds.EXPONENTIAL.compute_s + size / (link.megabits * 1e6 / 8)
    assert sharing.simulated_seconds(link, 10, 2, False, True, False) == pytest.approx(10 * each)


def test_a_queue_goes_on_where_it_was(tmp_path):
    """The search comes first, with further rates if the best is at an end; then each best rate."""
    cell = run_queue.Cell(
        "gap", 4, {}, {"a": "", "b": ""}, (), (1.0, 2.0), {"best": 1.0, "/2": 0.5}
    )
    done: list[dict] = []
    while missing := [
        line
        for line in run_queue.wanted_runs(cell, done)
        if run_queue.identity(line) not in {*map(run_queue.identity, done)}
    ]:
        target = {"a": 2.1, "b": 8.0}[missing[0]["method"]]
        accuracy = 1 / (1 + abs(missing[0]["lr"] - target))
        done.append(missing[0] | {"figures": {"accuracy": accuracy}})
    tried = {m: [x["lr"] for x in done if x["method"] == m and x["seed"] == 1000] for m in "ab"}
    assert tried == {"a": [1, 2, 4], "b": [1, 2, 4, 8, 16]}
    reported = [(x["method"], x["lr"]) for x in done if x["seed"] == 1]
    assert reported == [("a", 2), ("b", 8), ("a", 1), ("b", 4)]
    (tmp_path / "runs.jsonl").write_text('{"seed": 1}\n{"seed": ')  # killed while it wrote
    assert run_queue.lines(tmp_path / "runs.jsonl") == [{"seed": 1}]


def share_a_queue(out, scratch, name):
    """Make the missing runs of six seeds; each run stores the name of its process."""

    def seeds(_runs):
        return (("a", "best", 1.0, seed) for seed in range(6))

    def train_slowly(line, _options):
        time.sleep(0.2)
        return line | {"by": name}

    cell = run_queue.Cell("gap", 4, {}, {"a": ""}, (), (), {}, seeds)
    run_queue.STUDIES = {"gap": lambda: iter([cell])}
    run_queue.train_in_child = train_slowly
    run_queue.POLL = 0.05
    options = {"study": None, "until": None, "out": out, "scratch": scratch}
    run_queue.queue(argparse.Namespace(**options))


def test_two_processes_share_a_queue_and_make_no_run_twice(tmp_path):
    out = tmp_path / "runs.jsonl"
    context = multiprocessing.get_context("spawn")
    names = "first", "second"
    processes = [
        context.Process(target=share_a_queue, args=(out, tmp_path / name, name)) for name in names
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
        assert process.exitcode == 0
    runs = run_queue.lines(out)
    assert sorted(run["seed"] for run in runs) == [*range(6)]


def test_a_claim_ends_with_its_process(tmp_path):
    """A run that a killed process had claimed can be claimed by another one."""
    run = {"study": "gap", "seed": 1}
    lock = tmp_path / "runs.lock"
    take = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(CLAIMS)!r})
import run_queue
claims = run_queue.Claims(Path({str(lock)!r}))
print(claims.take({run!r}), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", take]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with run_queue.Claims(lock) as claims:
        assert other.stdout.readline() == "True\n"
        assert not claims.take(run) and claims.take(run | {"seed": 2})
        other.kill()
        other.communicate(timeout=60)
        assert claims.take(run)


@on_each(("model", "accumulate"), [("mlp", 1), ("lenet", 2)])
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
        assembly = assemble.assemble(assemble.load(table), SingleProcess(), 5)
        losses = [assembly.trainer.step().loss for _ in range(4)]
        ends.append((losses[-1], assembly.trainer.replicas.full[0].clone()))
        assembly.close()
    # Sums in float32 have another order. If the input of a unit is within rounding of 0, the unit
    # may be active in one of the two runs only. This changes the gradient by the contribution of
    # one sample, and the model by up to lr / batch / accumulate per step.
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=4 * 0.1 / 16 / 2 * 0.1)
