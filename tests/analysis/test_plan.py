"""`mpigossip plan`: its formulas, its command line."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpigossip import config
from mpigossip.analysis.plan import ALL_REDUCE, Choice, predict, table
from mpigossip.analysis.plan.best import proposals
from mpigossip.cli import main
from mpigossip.commands.arguments import BYTES_A_SECOND, SECONDS, numbers_of_nodes, quantity
from mpigossip.config import JobError
from mpigossip.graphs import graph
from mpigossip.graphs.theory import averaging_gap, transient_iterations, transient_of
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, subject
from mpigossip.training.machines import Machine, fit_all_reduce
from mpigossip.training.time_model import Timing
from tests.cases import every, naming, on_each

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
SLOW = Machine(10e-3, 1e-3, 2e-3, 50e-6, 2.5e6, 50e-6, 2.5e6, 1e9)
"""A step of 13 ms, and a network of 20 Mbit/s."""
EIGHT = ("node.devices=cuda:0-7",)
FAST = replace(SLOW, latency_s=1e-6, bandwidth=1e11, global_latency_s=1e-6, global_bandwidth=1e11)


def planned(**algorithm):
    return subject(assemble.load({"algorithm": {"name": "dsgd", **algorithm}}))[0]


def test_a_step_is_compute_and_messages():
    what = planned()
    n = 8
    vector = 4 * what.flat.size
    base = 13e-3
    summed = vector / 1e9
    message = 50e-6 + vector / 2.5e6
    expected = {
        Choice("one-peer-exponential"): base + message + summed,
        Choice("exponential"): base + 50e-6 + 3 * (vector / 2.5e6 + summed),
        Choice("one-peer-exponential", "every"): base + (message + summed) / 4,
        Choice(ALL_REDUCE): base + 6 * 50e-6 + 1.75 * vector / 2.5e6 + summed,
        Choice("one-peer-exponential", "gossip-pga"): base
        + (5 * (message + summed) + 6 * 50e-6 + 1.75 * vector / 2.5e6 + summed) / 6,
    }
    for choice, seconds in expected.items():
        assert predict(what, SLOW, choice, n, 10).step_s == pytest.approx(seconds, rel=1e-9)
    row = predict(what, SLOW, Choice("exponential"), n, 10)
    assert row.bytes_per_step == 3 * vector
    assert row.epoch_s == pytest.approx(what.steps_per_epoch(n) * row.step_s)
    assert row.total_s == pytest.approx(10 * row.epoch_s)


def test_a_directed_round_is_as_long_as_its_busiest_node():
    for name, n, messages in (("star", 6, 5), ("one-peer-hypercube", 8, 1), ("exponential", 8, 3)):
        job = assemble.load({"algorithm": {"name": "dsgd"}, "graph": {"name": name}})
        result = exchanges(subject(job)[0], n)
        vector = messages * result.parts.layout.nbytes
        expected = 50e-6 + vector / 2.5e6 + vector / 1e9
        assert Timing(result, SLOW).mean_s() == (pytest.approx(expected), 0.0)


def test_exchanges_of_algorithms_that_are_ahead_overlap_with_compute():
    after = predict(planned(), SLOW, Choice("one-peer-exponential"), 4, 1)
    ahead = predict(planned(style="awc"), SLOW, Choice("one-peer-exponential"), 4, 1)
    assert after.hidden_s == 0 and ahead.hidden_s == pytest.approx(10e-3)  # all of compute
    assert ahead.step_s == pytest.approx(after.step_s - 10e-3)
    quick = predict(planned(style="awc"), FAST, Choice("one-peer-exponential"), 4, 1)
    summed = 4 * planned().flat.size / 1e9  # the sum comes after the message
    assert quick.step_s == pytest.approx(13e-3 + summed)


def test_incompatible_combinations_are_left_out():
    what = subject(assemble.load({"algorithm": {"name": "decentlam"}, "graph": {"name": "ring"}}))[
        0
    ]
    rows = table(what, SLOW, [6], 1)
    assert {row.graph for row in rows} == {ALL_REDUCE, "ring"}  # symmetric and static
    assert {row.cadence for row in rows} <= {"always", "every"}
    assert not any(row.nodes == 6 and row.graph == "one-peer-hypercube" for row in rows)


def test_a_job_of_parallel_sgd_is_compared_with_gossip():
    what = subject(assemble.load({"algorithm": {"name": "parallel"}}))[0]
    rows = table(what, SLOW, [8], 1)
    assert {"one-peer-exponential", "ring", ALL_REDUCE} <= {row.graph for row in rows}


def test_transient_iterations_have_gossip_and_local_sgd_as_limits():
    ring = graph("ring", 12)
    gap = averaging_gap(ring)
    assert transient_of(12, gap) == pytest.approx(transient_iterations(ring))
    assert transient_of(12, 0.0, 0.0, 8) == (12**3 * 8**2, 12**3 * 8**4)
    assert transient_of(12, gap, 1.0, 1) == (0.0, 0.0)
    often, seldom = (transient_of(12, gap, 1.0, period)[0] for period in (4, 16))
    assert often < seldom < transient_of(12, gap)[0]
    assert transient_of(12, 0.0)[0] == float("inf")


def test_an_adaptive_cadence_is_counted_with_its_period():
    what = subject(assemble.load({"algorithm": {"name": "adpsgd"}, "cadence": {"period": 5}}))[0]
    result = exchanges(what, 8)
    assert result.bytes_per_step == pytest.approx(2 * 7 / 8 * 4 * what.flat.size / 5, rel=1e-6)


def test_ceca_averages_although_single_rounds_do_not():
    what = subject(assemble.load({"algorithm": {"name": "ceca"}}))[0]
    row = predict(what, SLOW, Choice("ceca"), 6, 1)
    assert row.transient == transient_of(6, 2 / (1 + 3))[0]  # exact in 3 rounds


def test_units_and_ellipses_are_read():
    assert quantity(SECONDS)("80ms") == pytest.approx(0.08)
    assert quantity(BYTES_A_SECOND)("200Gbit") == pytest.approx(25e9)
    assert quantity(BYTES_A_SECOND)("25GB/s") == pytest.approx(25e9)
    assert numbers_of_nodes("4,8,…,64") == [4, 8, 16, 32, 64] == numbers_of_nodes("4,...,64")
    assert numbers_of_nodes("6,24") == [6, 24]


def test_the_command_plans_in_one_process(alone, tmp_path):
    options = ["--compute", "20ms", "--bandwidth", "1Gbit", "--latency", "30us"]
    done = alone(
        "plan", JOB, "--nodes", "4,8,…,32", *options, "--json", "--out", tmp_path / "p.png"
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["machine"]["sources"] == {
        "compute": "given",
        "node-local": "not given",
        "update": "not given",
        "latency": "given",
        "bandwidth": "given",
        "jitter": "not given",
        "sum": "measured",
        "coding": "measured",
    }
    assert {row["nodes"] for row in result["rows"]} == {4, 8, 16, 32}
    assert (tmp_path / "p.png").stat().st_size > 20_000
    saved = tmp_path / "net.json"
    words = [*options, "--save", saved, "graph.name=hypercube"]  # which does not exist for 6
    assert alone("plan", JOB, "--nodes", "6,8", *words).returncode == 0
    rates = json.loads(saved.read_text())
    assert rates["encode_rate"] > 0 and rates["decode_rate"] > 0


@pytest.mark.parametrize("sized", [True, False])
def test_a_plot_without_a_known_training_time_shows_the_step(tmp_path, capsys, sized):
    """If only the size of a model is known, or with 0 epochs, there is no time of a training."""
    subject = ["--parameters", "1M"] if sized else [JOB, "--epochs", "0"]
    out = tmp_path / "p.png"
    words = [*subject, "--nodes", "2,4", "--compute", "80ms", "--out", out]
    assert main(["plan", *map(str, words)]) == 0
    assert out.stat().st_size > 20_000 and str(out) in capsys.readouterr().out


def test_a_rounded_number_of_a_thousand_is_a_whole_number(capsys):
    """The format .3g would write 1e+03."""
    words = (
        "plan --parameters 1M --nodes 2 --compute 999.7ms --update 999.8us --bandwidth 999.7MB/s"
    )
    assert main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "e+0" not in printed
    assert "1,000 ms" in printed and "1,000 µs" in printed and "1,000 MB/s" in printed


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("path", ["lr=0.1.toml", "sweep/lr=0.1/job.toml"])
def test_the_path_of_a_job_may_contain_an_equals_sign(tmp_path, monkeypatch, capsys, path, before):
    monkeypatch.chdir(tmp_path)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text('[run]\nname = "named"\n')
    options = ["--nodes", "2", "--compute", "80ms"]
    words = [path, *options] if before else [*options, path]
    assert main(["plan", *words]) == 0
    assert capsys.readouterr().out.startswith("named: ")


def test_a_dry_run_states_the_rates_of_the_steps_that_the_run_makes(capsys):
    """With 20 of 88 steps of the warm-up, the rate never reaches its full value."""
    words = ["train", str(JOB), "--dry-run", "--nodes", "4"]
    rates = []
    for more in ([], ["run.steps=20"]):
        assert main([*words, *more]) == 0
        line = re.search(r"first (\S+), largest (\S+), last (\S+)", capsys.readouterr().out)
        rates.append([float(rate.rstrip(",")) for rate in line.groups()])
    (first, largest, _), (same_first, largest_of_20, last_of_20) = rates
    assert first == same_first
    assert largest_of_20 == last_of_20 == pytest.approx(largest * 20 / 88, rel=1e-3)


def test_a_setting_in_place_of_the_job_may_contain_a_slash(capsys):
    words = "plan run.output=a/b run.name=named --parameters 1M --nodes 2 --compute 80ms"
    assert main(words.split()) == 0
    assert capsys.readouterr().out.startswith("named: ")


@on_each(
    ("words", "says"),
    [
        ([JOB, "--nodes", "4,x"], '"x": must be'),
        ([JOB, "--nodes", "4", "--bandwidth", "25"], "GB/s"),
        ([JOB, "--nodes", "4", "node.devices=cuda:0"], "--compute"),
        ([JOB.with_name("text-gpt.toml"), "--nodes", "4"], "no synthetic tokens"),
        ([JOB, "--nodes", "4", "--best", "--out", "p.png"], "--best excludes --out"),
        (["--nodes", "4"], "--parameters"),
        (["--nodes", "4", "--parameters", "1.3B"], "--parameters needs --compute"),
        ([JOB, "--nodes", "4", "--parameters", "1M"], "--parameters replaces the job"),
        (["--nodes", "4", "--parameters", "many"], '"many": must be'),
        ([JOB, "--nodes", "4", "--buffers", "1MB"], "--buffers is the size"),
        ([JOB, "--nodes", "4", "--queue", "50ms"], "--queue needs"),
        ([JOB, "--nodes", "4", "--transport", "nccl"], '--transport "nccl"'),
        ([JOB, "--nodes", "4", "--allreduce", "1MB:2ms", "2MB:1ms"], "--allreduce"),
        ([JOB, "--nodes", "4", "--allreduce", "1MB", "2MB:1ms"], '"1MB": must be'),
        ([JOB, "--nodes", "1,4", "--allreduce", "1MB:1ms", "2MB:2ms"], "--allreduce"),
        (
            [JOB, "--nodes", "4", "--members", "--bandwidth", "1GB/s", "--json"],
            "--members excludes",
        ),
    ],
)
def test_invalid_arguments_are_explained(alone, words, says):
    done = alone("plan", *words)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_missing_images_are_replaced_by_synthetic_ones(alone):
    settings = ["data.source=none.h5", "data.augment=crop-flip", "data.batch=1", "model.name=mlp"]
    done = alone("plan", JOB, "--nodes", "2", "--seconds", "0", "--json", *settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machine"]["sources"]["compute"] == "measured"


SIZED_PLAN = ("--parameters", "1M", "--compute", "50ms", "--bandwidth", "1GB/s", "--nodes", "2")
NO_MPI = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so", "MPI4PY_MPIABI": ""}


@pytest.mark.parametrize(
    ("words", "says"),
    [(SIZED_PLAN, "given"), (("digits", "--nodes", "2", "--seconds", "0.1"), "measured")],
)
def test_no_mpi_is_needed_unless_a_launcher_starts_ranks(mpirun, tmp_path, words, says):
    """A login node may have no MPI that can be loaded, for example before its module is loaded."""
    done = mpirun(0, ["mpigossip", "plan", *words], env=NO_MPI, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout and "at 2 nodes" in done.stdout


def test_ranks_of_a_launcher_without_mpi_get_a_message(mpirun, tmp_path):
    started = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    words = ["mpigossip", "plan", *SIZED_PLAN]
    done = mpirun(0, words, env=NO_MPI | started, cwd=tmp_path, timeout=120)
    if done.returncode == 0:
        pytest.skip("this mpi4py was linked to its MPI at build time")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "MPI can't be loaded" in done.stderr and "load the module" in done.stderr


def test_under_a_launcher_the_network_is_measured(pooled):
    done = pooled(2, "plan", JOB, "--nodes", "4", "--json", "--seconds", "0.1", timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["machine"]
    assert set(result["sources"].values()) == {"measured"}
    assert result["where"] == "2 ranks on 1 host"
    assert result["compute_s"] > 0 and result["bandwidth"] > 1e6 and result["latency_s"] > 0


@pytest.mark.parametrize(
    ("n", "per", "where", "network"),
    [
        every(4, "2", "2 nodes of 2 ranks on 1 host", "measured"),
        (2, "host", "one node of 2 ranks", "assumed"),
    ],
)
def test_ranks_of_a_node_are_planned_together(pooled, n, per, where, network):
    words = ["--nodes", "4", "--json", f"node.ranks_per_node={per}", "data.batch=4"]
    done = pooled(n, "plan", JOB, *words, "--seconds", "0.1", timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["samples_per_step"] == 4 * 2  # per node: one batch per rank
    assert result["machine"]["where"] == where
    assert result["machine"]["sources"]["latency"] == network
    assert result["machine"]["compute_s"] > 0 and result["machine"]["node_s"] > 0


@pytest.mark.parametrize(
    ("per", "says"), [every("2", "2 nodes x 2 slots"), every("host", "1 node x 4 slots")]
)
def test_a_dry_run_counts_the_nodes_of_a_launcher(pooled, per, says):
    done = pooled(4, "train", JOB, "--dry-run", f"node.ranks_per_node={per}")
    assert done.returncode == 0, done.stderr
    assert f"# planned for {says}" in done.stdout


def test_one_process_assumes_one_rank_per_host(alone):
    options = ["--compute", "20ms", "--bandwidth", "1Gbit", "--latency", "30us"]
    done = alone("plan", JOB, "--nodes", "4", *options, "node.ranks_per_node=host")
    assert done.returncode == 0, done.stderr
    assert "one rank per host" in " ".join(done.stdout.split())


def test_two_all_reduces_fix_latency_and_bandwidth_of_global_averages(capsys):
    words = ["plan", "--parameters", "25M", "--nodes", "8,32", "--compute", "1s", "--json"]
    words += ["--bandwidth", "25GB/s", "--allreduce", "25MB:3.1ms", "100MB:11ms"]
    assert not main(words)
    result = json.loads(capsys.readouterr().out)
    machine = Machine(**result["machine"])
    assert machine.bandwidth == 25e9  # of pairs
    for size, seconds in ((25e6, 3.1e-3), (100e6, 11e-3)):
        predicted = 6 * machine.global_latency_s + 1.75 * size / machine.global_bandwidth
        assert predicted == pytest.approx(seconds)
    assert machine.sources["all-reduce bandwidth"] == "given"
    with pytest.raises(JobError, match=naming("--allreduce")):
        fit_all_reduce((1e6, 1e-3), (1e6, 2e-3), 6, 1.75)


def test_a_model_of_a_given_size_is_planned_without_a_job(capsys):
    words = ["plan", "--parameters", "1.3B", "--nodes", "8", "--compute", "250ms"]
    words += ["--bandwidth", "200Gbit", "--update", "9ms", "--json"]

    exact = "always", "fp32"

    def step_s(*more):
        assert not main([*words, *more])
        rows = json.loads(capsys.readouterr().out)["rows"]
        return {
            row["graph"]: row["step_s"] for row in rows if (row["cadence"], row["wire"]) == exact
        }

    plain = step_s()
    message_s = 4 * 1.3e9 / 25e9
    assert plain["one-peer-exponential"] == pytest.approx(
        259e-3 + max(0, message_s + 10e-6 - 250e-3) + 4 * 1.3e9 / 300e9, rel=1e-3
    )
    half = step_s("--dtype", "bf16")
    assert half["one-peer-exponential"] == plain["one-peer-exponential"]  # float32 master weights
    assert plain[ALL_REDUCE] - half[ALL_REDUCE] == pytest.approx(1.75 * 2 * 1.3e9 / 25e9, rel=0.02)
    buffered = step_s("--buffers", "50MB")
    assert buffered[ALL_REDUCE] - plain[ALL_REDUCE] == pytest.approx(50e6 / 25e9, rel=0.05)


def test_the_text_names_the_origin_of_each_assumption(capsys):
    words = ["plan", "--parameters", "1M", "--nodes", "4", "--compute", "20ms"]
    words += ["--transport", "nccl-sockets", "--bandwidth", "100Mbit", "--queue", "20ms"]
    assert not main(words)
    lines = capsys.readouterr().out.splitlines()
    origins = {line[:23].strip(): line for line in lines}
    assert origins["computing of a step"].endswith("20 ms  given")
    assert origins["latency of a message"].endswith("assumed for nccl-sockets")
    assert origins["update"].endswith("assumed")
    assert origins["devices of a node"].endswith("cuda:0  node.devices")
    assert any(line.startswith("warning: the queue") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_rate_of_encoding_that_is_measured_for_each_wire_is_not_printed_as_0(capsys):
    assert not main(["plan", str(JOB), "--nodes", "4", "--compute", "5ms", "run.epochs=1"])
    printed = capsys.readouterr().out
    (row,) = re.findall("^encoding of a wire .*$", printed, re.MULTILINE)
    assert row.endswith("per wire  measured here") and re.search(
        "  1 epoch$", printed, re.MULTILINE
    )
    assert not main(["plan", str(JOB), "--nodes", "4", "--compute", "5ms", "--coding", "3GB/s"])
    assert re.search("^encoding of a wire .*3 GB/s  given$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([], "dsgd, style awc"),
        (["algorithm.style=atc"], "dsgd, style atc"),
        (["algorithm.name=momentum-tracking"], "momentum-tracking, style awc"),
        (["algorithm.name=parallel"], "parallel; gossip as dmsgd-vanilla, style atc"),
    ],
)
def test_the_text_names_the_style_of_the_algorithm(settings, says, capsys):
    words = ["plan", "--parameters", "1M", "--nodes", "4", "--compute", "20ms"]
    words += ["--bandwidth", "1Gbit", "--latency", "20us"]
    assert not main([*words, *settings])
    assert capsys.readouterr().out.splitlines()[0] == f"model: 1,000,000 parameters, {says}"


def test_averages_of_state_take_time_and_bytes():
    """Adam's second moment is averaged every 32nd step, after the exchange of the model."""
    settings = ["local.name=adamw", "schedule.lr=0.005", "algorithm.style=atc"]
    plain = subject(assemble.load(JOB, settings))[0]
    averaged = subject(assemble.load(JOB, [*settings, "algorithm.average_state={second=32}"]))[0]
    vector = 4 * plain.flat.size
    message_s = {"one-peer-exponential": 50e-6 + vector / 2.5e6 + vector / 1e9}
    message_s["ring"] = 50e-6 + 2 * (vector / 2.5e6 + vector / 1e9)
    for name, seconds in message_s.items():
        choice = Choice(name, "every")
        before, after = (predict(what, SLOW, choice, 8, 1) for what in (plain, averaged))
        assert after.step_s - before.step_s == pytest.approx(seconds / 32)
        assert after.exchange_s - before.exchange_s == pytest.approx(seconds / 32)
        assert after.hidden_s == before.hidden_s
        sent = after.bytes_per_step - before.bytes_per_step
        assert sent == pytest.approx((2 if name == "ring" else 1) * vector / 32)
    # A cadence with global averages only averages the moments globally, too.
    before, after = (
        predict(what, SLOW, Choice("complete", "cpsgd"), 8, 1) for what in (plain, averaged)
    )
    seconds = 6 * 50e-6 + 1.75 * vector / 2.5e6 + vector / 1e9
    assert after.step_s - before.step_s == pytest.approx(seconds / 32)
    assert predict(averaged, SLOW, Choice(ALL_REDUCE), 8, 1).step_s == pytest.approx(
        predict(plain, SLOW, Choice(ALL_REDUCE), 8, 1).step_s
    )


def test_rates_of_adding_and_encoding_count_each_slot(capsys):
    words = ["plan", "--parameters", "1M", "--nodes", "4", "--compute", "20ms", "--json"]

    def rates(*more):
        assert not main([*words, *more])
        machine = json.loads(capsys.readouterr().out)["machine"]
        return machine["combine_rate"], machine["encode_rate"], machine["decode_rate"]

    assert rates() == (300e9, 50e9, 50e9)
    assert rates("node.devices=cuda:0-7") == (2400e9, 400e9, 400e9)
    given = "--sum", "100GB/s", "--coding", "10GB/s"
    assert rates(*given) == (100e9, 10e9, 10e9)
    assert rates(*given, "node.devices=cuda:0-3") == (400e9, 40e9, 40e9)
    assert rates(*given, "node.devices=cpu:2")[0] == 200e9
    assert rates(*given, "node.devices=cuda:0", "node.ranks_per_node=4")[0] == 400e9


def test_a_hint_says_if_eight_gpus_would_make_a_row_faster(capsys):
    words = ["plan", "--parameters", "1.3B", "--nodes", "8", "--compute", "250ms"]
    words += ["--latency", "20us", "--bandwidth"]

    def printed(*more):
        assert not main([*words, *more])
        return capsys.readouterr().out

    def milliseconds(*more):
        """Return the time of one-peer gossip with the wire bf16."""
        row = printed("100Gbit", *more).partition("at 8 nodes")[2].partition("wire bf16")[2]
        return row.split()[0]

    one = milliseconds()
    eight = milliseconds(*EIGHT)
    (hint,) = re.findall(r"^hint: .*?\n\n", printed("100Gbit"), re.DOTALL | re.MULTILINE)
    hint = " ".join(hint.split())
    assert "node.devices=cuda:0-7" in hint and f"takes {eight} instead of {one} ms" in hint
    assert "one-peer-exponential + bf16" in hint and float(eight) < float(one)
    gpu = printed("100Gbit", "--gpu", "h100")
    assert "hint: " in gpu and "hint: " not in printed("100Gbit", "--gpu", "h100", *EIGHT)
    assert "hint: " not in printed("100Gbit", *EIGHT)
    assert "hint: " not in printed("100Mbit")  # encoding takes much less time than messages
    assert "hint: " not in printed("100Gbit", "node.devices=cpu:1", "--sum", "300GB/s")


def test_rows_name_the_period_of_their_cadence(capsys):
    words = ["plan", str(JOB), "--nodes", "4", "--compute", "20ms", "--bandwidth", "1Gbit"]
    words += ["--coding", "1GB/s", "algorithm.style=atc"]
    assert not main(words)
    output = capsys.readouterr().out
    for label in ("every 4 steps", "gossip-pga, every 6 steps", "cpsgd, every 8 steps"):
        assert f"\n  {label} " in output
    assert not main([*words, "cadence.name=every", "cadence.period=16"])
    output = capsys.readouterr().out
    assert "dsgd, style atc, every 16" in output.splitlines()[0] and "\n  cadence always " in output


def tokens(shape, classes):
    """Return a model of the user that accepts tokens only."""
    return torch.nn.Embedding(classes, classes)


def test_a_language_model_of_the_user_is_planned_without_its_data():
    """Missing data of a language model are replaced by a stand-in with tokens."""
    job = {
        "model": {"name": f"{__name__}:tokens"},
        "task": {"name": "language-model"},
        "data": {"source": "missing.h5", "shape": [16], "classes": 50},
    }
    what, note = subject(assemble.load(job))
    assert what.flat.count == 50 * 50 and "missing.h5" in note


EXAMPLE = ["--parameters", "1B", "--nodes", "4", "--compute", "250ms", "--bandwidth", "400GB/s"]
"""4 hosts with 8 GPUs and a billion parameters, of the issue on GPUs."""


def steps_on_gpus(capsys, *words):
    main(["plan", *EXAMPLE, "--gpu", "h100", "node.devices=cuda:0-7", "--json", *words])
    result = json.loads(capsys.readouterr().out)
    return {
        (row["graph"], row["cadence"], row["wire"]): row["step_s"] for row in result["rows"]
    }, result["machine"]


def test_a_gpu_gives_the_time_of_update_and_node_averages(capsys):
    one_peer = "one-peer-exponential", "always", "fp32"
    all_reduce = ALL_REDUCE, "always", "fp32"
    ahead, machine = steps_on_gpus(capsys, "algorithm.style=awc", "local.name=adamw")
    transfer = 4e9 * 7 / 8 / (0.85 * 450e9)
    update = 112 * 1e9 / 8 / (0.85 * 3.35e12) + 19 * 5e-6
    assert machine["node_s"] == pytest.approx(2 * transfer, rel=1e-3)
    assert machine["update_s"] == pytest.approx(update, rel=1e-3)
    assert machine["sources"]["update"] == "data sheet of h100"
    summed = 12 * 1e9 / 8 / (0.85 * 3.35e12)
    assert ahead[one_peer] == pytest.approx(0.25 + 2 * transfer + update + summed, rel=1e-3)
    # all-reduce is hidden; each GPU updates the whole model by a fused optimizer
    assert ahead[all_reduce] == pytest.approx(0.25 + 28 * 1e9 / (0.85 * 3.35e12), rel=5e-3)
    after, _ = steps_on_gpus(capsys, "algorithm.style=atc", "local.name=adamw")
    assert after[one_peer] == pytest.approx(ahead[one_peer] + 4e9 / 4e11, rel=2e-3)
    times = ["--node", "1ms", "--update", "2ms"]
    for algorithm in ("dsgd", "dsgt"):  # the update of dsgt was not counted
        _, machine = steps_on_gpus(capsys, f"algorithm.name={algorithm}", *times)
        assert (machine["node_s"], machine["update_s"]) == (1e-3, 2e-3)
    by_all_reduce, _ = steps_on_gpus(capsys, "algorithm.name=parallel", "local.name=momentum")
    assert by_all_reduce[all_reduce] < by_all_reduce[one_peer]  # all-reduce is hidden


def test_gpus_that_are_unknown_or_not_counted_are_rejected(capsys):
    for words, said in (
        (["--gpu", "h101"], '--gpu "h101"'),
        (
            ["--gpu", "h100", "algorithm.name=dsgt"],
            "dsgt atc sgd",
        ),
    ):
        assert main(["plan", *EXAMPLE, *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["plan", str(JOB), "--nodes", "4", "--gpu", "h100"]) == 2
    assert "--gpu needs --compute" in capsys.readouterr().err
    assert main(["plan", *EXAMPLE, "--gpu", "h100", "--best"]) == 2
    assert "--gpu excludes --best and --members" in capsys.readouterr().err


def test_indented_rows_follow_the_row_whose_graph_they_share(capsys):
    """The time in an indented row belongs to the graph above it."""
    words = ["plan", "--parameters", "1.3B", "--nodes", "8", "--compute", "600ms"]
    words += ["--bandwidth", "25Gbit", "--latency", "20us", "node.devices=cuda:0-7"]
    for more in ([], ["--dtype", "bf16"], ["graph.name=ring"], ["algorithm.name=parallel"]):
        assert not main([*words, *more])
        output = capsys.readouterr().out.partition("at 8 nodes")[2].splitlines()[1:]
        assert not main([*words, *more, "--json"])
        rows = json.loads(capsys.readouterr().out)["rows"]
        known = {(row["graph"], row["cadence"], row["wire"]): row for row in rows}
        graph_name, indented = "", []
        for line in itertools.takewhile(bool, output):
            *words_of_label, milliseconds, _, _ = line.split()
            label = " ".join(words_of_label)
            step = float(milliseconds.replace(",", ""))
            cadence = label.partition(",")[0] if "," in label else "every"
            if not line.startswith(" "):
                graph_name, key = label, ("always", "fp32")
            else:
                key = ("always", label[5:]) if label.startswith("wire ") else (cadence, "fp32")
                indented.append((graph_name, *key))
            assert step == pytest.approx(1e3 * known[graph_name, *key]["step_s"], rel=5e-3), line
        own = "ring" if "ring" in "".join(more) else "one-peer-exponential"
        assert {(own, "every", "fp32"), (own, "always", "bf16")} <= set(indented)
        if "--dtype" in more:  # all-reduce sends bf16: so does a row of each graph
            graphs = {row["graph"] for row in rows} - {ALL_REDUCE}
            assert {(name, "always", "bf16") for name in graphs} <= set(indented)


def test_all_reduce_overlaps_with_the_last_part_of_a_batch_only(capsys):
    """DistributedDataParallel sends gradients of several backward passes in the last one."""
    words = ["plan", "--parameters", "1.3B", "--nodes", "8", "--compute", "600ms"]
    words += ["--bandwidth", "25Gbit", "--json"]

    def rows(accumulate):
        assert not main([*words, f"algorithm.accumulate={accumulate}"])
        every_row = json.loads(capsys.readouterr().out)["rows"]
        known = {(row["graph"], row["cadence"], row["wire"]): row for row in every_row}
        return [known[graph, "always", "fp32"] for graph in (ALL_REDUCE, "one-peer-exponential")]

    whole, parts = rows(1), rows(4)
    assert whole[0]["hidden_s"] == pytest.approx(0.4) == 4 * parts[0]["hidden_s"]
    assert parts[0]["step_s"] - whole[0]["step_s"] == pytest.approx(0.3)
    assert parts[1]["step_s"] == whole[1]["step_s"]  # style awc sends during all parts
    assert not main([*words[:-1], "algorithm.accumulate=4"])
    output = capsys.readouterr().out
    assert re.search(r"^backward passes of a step +4  algorithm.accumulate$", output, re.M)


BY_NODE = {
    "run": {"name": "by-node"},
    "data": {"source": "digits", "batch": 4},
    "algorithm": {"name": "diloco", "node_weights": "steps"},
    "cadence": {"period": [4, 1, 3]},
}


def test_a_job_with_steps_and_weights_by_node_is_planned(capsys, tmp_path):
    path = tmp_path / "by-node.toml"
    path.write_text(config.dump(assemble.load(BY_NODE)))
    assert not main(["plan", str(path), "--nodes", "3", "--json", "--seconds", "0.2"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["cadence"] for row in rows} >= {"cpsgd", "always"}
    assert all(row["nodes"] == 3 for row in rows)


@pytest.mark.parametrize("weights", ["steps", [1, 2, 3]])
def test_a_job_with_lists_is_planned_for_other_numbers_of_nodes(weights):
    """The choice of the job itself is in the table, as if all nodes made the most steps."""
    what = subject(assemble.load(BY_NODE, [f"algorithm.node_weights={json.dumps(weights)}"]))[0]
    one_for_all = subject(
        assemble.load(BY_NODE, ["algorithm.node_weights=equal", "cadence.period=4"])
    )
    choice = Choice("one-peer-exponential", "cpsgd")
    for n in (1, 2, 4):
        row = predict(what, SLOW, choice, n, 1.0)
        assert row is not None and row == predict(one_for_all[0], SLOW, choice, n, 1.0)
    assert predict(what, SLOW, choice, 3, 1.0) is not None


def test_proposals_for_such_a_job_have_no_weights():
    what = subject(assemble.load(BY_NODE))[0]
    offers, left_out = proposals(BY_NODE, [], what, SLOW, 3)
    assert len(offers) > 8
    assert all("algorithm.node_weights=equal" in offer.settings for offer in offers)
    assert all("power of two" in left_out[label] for label in left_out)
