"""`mpigossip plan --best`: proposals for a network, and their commands."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mpigossip.analysis.plan import ALL_REDUCE, Choice, predict, quality
from mpigossip.analysis.plan.best import WITHIN, best, proposals, text
from mpigossip.analysis.plan.quality import EVIDENCE, Accept, nearest
from mpigossip.cli import main
from mpigossip.config import JobError
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, subject
from mpigossip.training.machines import Machine
from tests.cases import naming

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
ROOT = Path(__file__).parents[2]
N = 8
ACCEPT = Accept()


def machine(bandwidth, latency=50e-6, **more):
    plain = Machine(20e-3, 0.0, 0.0, latency, bandwidth, latency, bandwidth, 1e10)
    return replace(plain, encode_rate=1e10, decode_rate=1e10, **more)


@pytest.fixture(scope="module")
def what():
    return subject(assemble.load(JOB))[0]


def offered(what, bandwidth, n=N, **more):
    return proposals(JOB, [], what, machine(bandwidth, **more), n)


def measured(offers):
    """Return the proposals as if each cost nothing, so that only time and bytes decide."""
    free = replace(EVIDENCE[0], cost=0.0, interval=None)
    return [replace(proposal, evidence=free) for proposal in offers]


def test_slower_networks_justify_more_risk(what):
    offers = [
        best(measured(offered(what, bandwidth)[0]), ACCEPT)
        for bandwidth in (1e12, 3e7, 1.25e6, 1e5)
    ]
    levels = [proposal.level for proposal in offers]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == 6
    assert offers[0].label == "all-reduce (DDP)" and "H = 128" in offers[-1].label


def test_nothing_is_proposed_whose_cost_is_unmeasured_or_too_high(what):
    offers, left_out = offered(what, 1e5)
    assert best(offers, ACCEPT).level == 0  # although all-reduce is by far the slowest
    output = text(JOB, offers, left_out, N, ACCEPT)
    assert "Stay with all-reduce" in output and "x as fast" not in output
    costly = best(offers, Accept(points=5.0))
    assert costly.level == 1 and costly.evidence.cost == 3.55
    output = text(JOB, offers, left_out, N, Accept(points=5.0))
    assert "x as fast as all-reduce" in " ".join(output.split())
    unmeasured = [p for p in offers if p.level and p.evidence is None]
    assert unmeasured and not any(p.fulfils(Accept(100.0, 100.0)) for p in unmeasured)
    assert best(unmeasured, Accept(100.0, 100.0)) is None
    assert "No proposal has a measured cost" in text(JOB, unmeasured, {}, N, ACCEPT)
    fast, left_out = offered(what, 1e12)
    assert "not faster" in text(JOB, fast, left_out, N, ACCEPT)


@pytest.mark.every
@pytest.mark.parametrize("bandwidth", [10.0**k for k in range(4, 11)])
def test_the_proposal_is_at_most_a_tenth_slower_than_the_fastest(what, bandwidth):
    offers = measured(offered(what, bandwidth, latency=1e-3)[0])
    fastest = min(proposal.row.step_s for proposal in offers)
    assert best(offers, ACCEPT).row.step_s <= WITHIN * fastest
    # all proposals of a lower level are slower than that
    level = best(offers, ACCEPT).level
    assert all(p.row.step_s > WITHIN * fastest for p in offers if p.level < level)


@pytest.mark.parametrize("n", [6, 8])
def test_the_settings_of_every_proposal_are_valid(what, n):
    offers, left_out = proposals(JOB, ["run.seed=3"], what, machine(1e7), n)
    assert len(offers) >= 10
    for proposal in offers:
        job = assemble.load(JOB, list(proposal.settings))
        assert assemble.mistakes(job, n) == []
        if proposal.level:  # level 0 is the all-reduce of DDP
            sent = exchanges(subject(job)[0], n).bytes_per_step
            assert proposal.row.bytes_per_step == pytest.approx(sent)
    offers = [p for p in measured(offers) if p.level]  # a command is printed for gossip only
    output = text(JOB, offers, left_out, n, ACCEPT)
    (command,) = [line for line in output.splitlines() if "mpigossip train" in line]
    chosen = best(offers, ACCEPT)
    assert command.split() == ["mpigossip", "train", str(JOB), "run.seed=3", *chosen.settings]
    assert output.count("\n* ") == 2  # its row, and the conclusion
    assert max(len(line) for line in output.splitlines() if line != command) <= 80
    assert all(f"left out: {label}" in output for label in left_out)


def test_options_of_the_job_s_algorithm_are_removed_for_another_one():
    settings = ["run.seed=3", "algorithm.name=dsgd", "algorithm.style=awc"]
    what = subject(assemble.load(JOB, settings))[0]
    offers, left_out = proposals(JOB, settings, what, machine(1e7), N)
    kept = {proposal.label: list(proposal.job_settings) for proposal in offers}
    assert kept["dsgd, ring"] == ["run.seed=3", "algorithm.style=awc"]  # the name is the proposal's
    assert kept["all-reduce (DDP)"] == settings[:1] == kept["diloco, H = 8"]
    assert not any("unknown key" in why for why in left_out.values())


def test_the_printed_command_has_each_key_once():
    settings = ["cadence.name=cpsgd", "cadence.fragments=4", "cadence.period=16", "run.seed=3"]
    settings += ["graph.name=ring", "run.seed=4", "graph.lazy=true"]
    what = subject(assemble.load(JOB, [*settings, "algorithm.name=diloco"]))[0]
    offers, left_out = proposals(JOB, settings, what, machine(1e7), N)
    for proposal in offers:
        keys = [s.partition("=")[0] for s in (*proposal.job_settings, *proposal.settings)]
        assert len(keys) == len(set(keys)) and "run.seed" in keys
        job = assemble.load(JOB, [*proposal.job_settings, *proposal.settings])
        fragments = job.cadence.options.get("fragments", 1)
        assert fragments == (4 if "4 fragments" in proposal.label else 1), proposal.label
        assert job.run.seed == 4
    gossip = [proposal for proposal in measured(offers) if proposal.level]
    output = text(JOB, gossip, left_out, N, ACCEPT)
    assert output.count("run.seed") == 1


def test_fragments_of_the_job_file_are_undone():
    where = {"algorithm": {"name": "diloco"}, "cadence": {"name": "cpsgd", "fragments": 8}}
    what = subject(assemble.load(where))[0]
    offers = {p.label: p for p in proposals(where, [], what, machine(1e7), N)[0]}
    for label, fragments in (("diloco, H = 32", 1), ("diloco, H = 32, 4 fragments", 4)):
        job = assemble.load(where, offers[label].settings)
        assert job.cadence.options["fragments"] == fragments


def test_averages_of_state_are_removed_from_all_reduce_only():
    settings = ["local.name=adamw", "schedule.lr=0.005", "algorithm.average_state={second=16}"]
    what = subject(assemble.load(JOB, settings))[0]
    offers, left_out = proposals(JOB, settings, what, machine(1e7), N)
    offers = {proposal.label: proposal for proposal in offers}
    assert "algorithm.average_state={}" in offers["all-reduce (DDP)"].settings
    assert settings[-1] in offers["dsgd, one-peer-exponential"].job_settings


@pytest.mark.parametrize(
    "where",
    [
        {"algorithm": {"name": "dsgd"}, "node": {"mixer": "asynchronous"}},
        {"algorithm": {"name": "dsgd"}, "faults": {"lost": 0.1, "away": 0.1, "away_rounds": 2.0}},
        {"algorithm": {"name": "diloco", "blend": 0.5}, "cadence": {"period": 4, "delay": 1}},
    ],
    ids=["asynchronous", "faults", "blend"],
)
def test_all_reduce_has_a_row_for_every_method(where):
    what = subject(assemble.load(where))[0]
    offers, left_out = proposals(where, [], what, machine(1e7), 2)
    assert "all-reduce (DDP)" in {proposal.label for proposal in offers}, left_out
    proposed = next(proposal.row for proposal in offers if not proposal.level)
    assert predict(what, machine(1e7), Choice(ALL_REDUCE), 2, 1) == proposed


def test_a_blend_for_the_delay_of_the_job_remains_with_a_delay_only():
    where = {"algorithm": {"name": "diloco", "blend": 0.3}, "cadence": {"period": 4, "delay": 1}}
    what = subject(assemble.load(where))[0]
    offers, left_out = proposals(where, [], what, machine(1e7), N)
    labels = {proposal.label for proposal in offers}
    assert {"dsgd, ring", "gasloc, one-peer-exponential, H = 8", "diloco, H = 8"} <= labels
    for proposal in offers:
        section = assemble.load(where, proposal.settings).algorithm
        assert section.blend == (0.3 if "fragments" in proposal.label else None), proposal.label
    where["cadence"]["delay"] = 0
    offers, left_out = proposals(where, [], subject(assemble.load(where))[0], machine(1e7), N)
    whole = next(proposal for proposal in offers if proposal.label == "diloco, H = 8")
    assert assemble.load(where, whole.settings).algorithm.blend == 0.3


def test_weights_of_the_job_s_graph_are_not_those_of_others():
    own = {"name": "ring", "weights": "metropolis-hastings", "lazy": True}
    where = {"algorithm": {"name": "dsgd"}, "graph": own}
    what = subject(assemble.load(where))[0]
    offers, left_out = proposals(where, [], what, machine(1e7), N)
    assert not left_out
    for proposal in offers:
        section = assemble.load(where, proposal.settings).graph
        is_own = section.name == "ring"
        assert (section.weights is not None, section.lazy) == (is_own, is_own), proposal.label


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_type_of_gradients_changes_all_reduce_only(capsys, dtype):
    words = ["plan", str(JOB), "--nodes", "8", "--compute", "5ms", "--bandwidth", "10MB/s"]
    words += ["--coding", "1GB/s"]
    assert not main([*words, "--best", "--json", "--dtype", dtype])
    result = json.loads(capsys.readouterr().out)["8"]
    sent = {row["label"]: row["bytes_per_step"] for row in result["proposals"]}
    vector = 4 * 21_386
    assert sent["all-reduce (DDP)"] == pytest.approx(
        1.75 * vector * (0.5 if dtype == "bf16" else 1), rel=0.01
    )
    assert sent["diloco, H = 8"] == pytest.approx(1.75 * vector / 8, rel=0.01)


def test_a_model_of_a_given_size_gets_proposals(capsys):
    words = ["plan", "--parameters", "1.3B", "--nodes", "8", "--compute", "250ms", "--best"]
    words += ["--bandwidth", "1GB/s"]
    assert not main([*words, "--json", "--accept", "25", "0.5"])
    rows = json.loads(capsys.readouterr().out)["8"]["proposals"]
    (chosen,) = [row for row in rows if row["proposed"]]
    assert chosen["evidence"]["model"].startswith("GPT") and chosen["evidence"]["cost"] < 25
    assert not main(words)
    output = capsys.readouterr().out
    assert "Stay with all-reduce" in output and "e+0" not in output
    assert not main([*words, "--accept", "25", "0.5"])
    output = capsys.readouterr().out
    command = " ".join(chosen["settings"])
    assert f"\n  {command}\n" in f"{output}\n"
    assert "JOB.toml" not in output


def test_all_reduce_is_recommended_without_a_command(what):
    """The algorithm `parallel` sends float32 after backward: it is not the row of the table."""
    for job in (JOB, None):
        output = text(job, *offered(what, 1e12), N, ACCEPT)
        assert "Keep DistributedDataParallel" in " ".join(output.split())
        assert "mpigossip train" not in output and "algorithm.name=parallel" not in output


@pytest.mark.parametrize("name", ["diloco", "gasloc"])
def test_a_job_with_a_period_is_compared_with_dsgd_in_each_step(name):
    """DiLoCo without a period, on a graph, is not a method that anyone proposes."""
    cadence = "cpsgd" if name == "diloco" else "every"
    where = {"algorithm": {"name": name}, "cadence": {"name": cadence, "period": 64}}
    where["local"] = {"name": "adamw"}
    offers, left_out = proposals(where, [], subject(assemble.load(where))[0], machine(1e7), N)
    labels = {proposal.label for proposal in offers}
    assert {"dsgd, one-peer-exponential", "dsgd, one-peer-exponential, bf16"} <= labels
    assert "diloco, one-peer-exponential" not in labels | left_out.keys()
    (proposal,) = [p for p in offers if p.label == "dsgd, one-peer-exponential"]
    assert "algorithm.style=awc" in proposal.settings and proposal.row.hidden_s > 0
    assert proposal.evidence is None or proposal.evidence.method.startswith("dsgd")
    assert text(JOB, offers, {}, N, ACCEPT).splitlines()[0] == (
        "8 nodes, predicted, fastest first; style of dsgd: awc"
    )


def test_a_proposal_uses_the_planned_epochs_and_slots(what):
    wide = replace(what, slots=4)
    for proposal in proposals(JOB, [], wide, machine(1e7), N, 3)[0]:
        row = proposal.row
        assert row.steps_per_epoch == wide.steps_per_epoch(N) < what.steps_per_epoch(N)
        assert row.total_s == pytest.approx(3 * row.epoch_s)


def test_the_longer_the_period_the_fewer_the_bytes(what):
    offers = {p.label: p.row for p in offered(what, 1e7)[0]}
    sent = [offers[f"diloco, H = {period}"].bytes_per_step for period in (8, 32, 128)]
    assert sent[0] == pytest.approx(4 * sent[1]) and sent[1] == pytest.approx(4 * sent[2])


def test_a_setting_of_the_job_that_excludes_a_proposal_is_named(what):
    settings = ["node.mixer=asynchronous"]
    offers, left_out = proposals(JOB, settings, what, machine(1e7), N)
    assert any("asynchronous" in why for why in left_out.values()) and offers
    with pytest.raises(JobError, match=naming("nonsense")):
        proposals(JOB, ["node.mixer=nonsense"], what, machine(1e7), N)


def test_the_measured_costs_stand_on_their_pages():
    for evidence in EVIDENCE:
        page = (ROOT / evidence.page).read_text()
        for shown in evidence.shown:
            figures = [float(figure) for figure in re.findall(r"-?\d+\.\d+", shown)]
            assert shown in page and figures[0] == evidence.cost, evidence
            if evidence.interval:
                low, high = (f"{end:.2f}" for end in evidence.interval)
                assert f"[{low}, {high}]" in shown, evidence
        model = {"points": ("LeNet", "perceptron"), "%": ("GPT",)}[evidence.unit]
        assert evidence.model.startswith(model) and f"{evidence.nodes} " in page


def test_the_costs_of_each_style_are_quotients_of_the_losses_of_their_job():
    """The job file has the losses at each method's best rate; a page has the number of seeds."""
    comments = (ROOT / "jobs/text-gpt.toml").read_text()
    loss = {
        "awc": re.search(r"this file +([\d.]+)", comments)[1],
        "atc": re.search(r"algorithm.style=atc, .* ([\d.]+)", comments)[1],
        "all-reduce": re.search(r"algorithm.name=parallel .*lr 0.012 +([\d.]+)", comments)[1],
    }
    page = (ROOT / "tools/docs/gpt-8x8.md").read_text()
    rows = [evidence for evidence in EVIDENCE if evidence.page.endswith(".toml")]
    assert {row.style for row in rows} == {"awc", "atc"}
    for row in rows:
        cost = 100 * (float(loss[row.style]) / float(loss["all-reduce"]) - 1)
        assert row.cost == pytest.approx(cost, abs=0.05)
        (line,) = [
            line
            for line in page.splitlines()
            if f"style `{row.style}`" in line and "0.2 million" in line and "seed" in line
        ]
        assert "1 seed |" in line and row.model.endswith("1 seed")
        assert f"{row.cost} % higher" in line


def test_a_measurement_with_the_style_of_the_job_is_preferred():
    settings = "algorithm.name=dsgd", "graph.name=one-peer-exponential", "local.name=adamw"
    texts = JOB.with_name("text-gpt.toml")
    expected = {("awc", 10**9): 3.4, ("atc", 10**9): 12.71, ("atc", 10**5): 2.45, ("awc", 10): 3.4}
    for (style, parameters), cost in expected.items():
        job = assemble.load(texts, [*settings, f"algorithm.style={style}"])
        evidence = nearest(job, N, parameters)
        assert (evidence.cost, evidence.style) == (cost, style)


def test_the_nearest_measurement_has_the_same_method_and_task():
    def cost(job, *settings, n=N, parameters=60_000):
        evidence = nearest(assemble.load(job, list(settings)), n, parameters)
        return evidence and (evidence.cost, evidence.nodes, evidence.period)

    peer = "graph.name=one-peer-exponential"
    dmsgd = "algorithm.name=dmsgd", peer
    texts = JOB.with_name("text-gpt.toml")
    assert cost(JOB, *dmsgd, n=16) == (1.63, 16, 1)
    assert cost(JOB, *dmsgd, n=4) == (-0.14, 4, 1)
    assert cost(JOB, *dmsgd, n=16, parameters=10**7) == (0.13, 16, 1)  # the larger model
    assert cost(JOB, "algorithm.name=dsgd", "local.name=momentum", peer) == (3.55, 16, 1)
    assert cost(JOB, "algorithm.name=dmsgd", "graph.name=base-2") is None
    assert cost(JOB, *dmsgd, "node.wire=bf16") is None
    assert cost(JOB, *dmsgd, "task.name=mine:task") is None
    outer = "algorithm.name=diloco", "graph.name=complete", "cadence.name=cpsgd"
    assert cost(JOB, *outer, "cadence.period=32") is None  # no accuracy was measured
    assert cost(texts, *outer, "cadence.period=32") == (22.95, 8, 32)
    assert cost(texts, *outer, "cadence.period=32", parameters=10**7) == (21.46, 4, 32)
    assert cost(texts, *outer, "cadence.period=20") == (22.95, 8, 32)
    assert cost(texts, *outer, "cadence.period=1000") is None
    assert cost(texts, *outer, "cadence.period=32", "cadence.fragments=4") is None
    gossip = "algorithm.name=dsgd", "algorithm.style=atc", "cadence.name=always", peer
    assert cost(texts, *gossip, "local.name=muon") == (1.09, 8, 1)
    assert cost(texts, *gossip, "local.name=adamw", n=8) == (2.45, 8, 1)
    assert cost(texts, *outer, "cadence.period=32", "local.name=muon") == (13.17, 8, 32)
    assert cost(texts, *outer, "cadence.period=1000", "local.name=muon") is None


def test_a_cost_that_was_measured_with_another_style_says_so(monkeypatch, capsys):
    """Without the measurements of the style of the job, the other style is used and named."""
    texts = str(JOB.with_name("text-gpt.toml"))
    command = ["plan", texts, "--nodes", "4", "--best", "--json", "--compute", "10ms"]
    command += ["--bandwidth", "1MB/s", "--coding", "1GB/s"]

    def cost(style):
        settings = "algorithm.name=dsgd", f"algorithm.style={style}", "graph.name=ring"
        assert main([*command, *settings]) == 0
        rows = json.loads(capsys.readouterr().out)["4"]["proposals"]
        return next(row["cost"] for row in rows if row["label"].startswith("dsgd, one-peer-e"))

    assert "0.8 % more loss" in cost("atc") and "3.4 % more loss" in cost("awc")
    assert "style" not in cost("atc") + cost("awc")
    others = tuple(evidence for evidence in EVIDENCE if evidence.style != "awc")
    monkeypatch.setattr(quality, "EVIDENCE", others)
    assert "style" not in cost("atc")
    assert cost("awc") == f"{cost('atc')}; measured with style atc, not awc"


def test_a_cost_is_judged_by_the_upper_end_of_its_interval():
    evidence = replace(EVIDENCE[0], cost=0.3, interval=(0.1, 0.6))
    assert not evidence.fulfils(Accept()) and evidence.fulfils(Accept(points=0.6))
    assert replace(evidence, interval=None).fulfils(Accept())
    loss = replace(evidence, unit="%", cost=0.9, interval=None)
    assert loss.fulfils(Accept()) and not loss.fulfils(Accept(loss=0.5, points=9.0))
    assert not replace(loss, cost=-1.0, seeds=1).fulfils(Accept())


def test_the_number_of_seeds_of_a_measurement_is_the_one_in_its_description():
    for evidence in EVIDENCE:
        assert re.search(r"(\d+) (?:paired )?seeds?$", evidence.model)[1] == str(evidence.seeds)
