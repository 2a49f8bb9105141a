"""`mpigossip plan --best`: proposals for a network, and their commands."""

from dataclasses import replace
from pathlib import Path

import pytest

from mpigossip.analysis.plan.best import KNOWN, WITHIN, best, known, proposals, text
from mpigossip.config import JobError
from mpigossip.training import assemble
from mpigossip.training.costs import exchanges, subject
from mpigossip.training.machines import Machine

JOB = Path(__file__).parents[2] / "jobs" / "digits.toml"
N = 8


def machine(bandwidth, latency=50e-6, **more):
    plain = Machine(20e-3, 0.0, 0.0, latency, bandwidth, latency, bandwidth, 1e10)
    return replace(plain, encode_rate=1e10, decode_rate=1e10, **more)


@pytest.fixture(scope="module")
def what():
    return subject(assemble.load(JOB))[0]


def offered(what, bandwidth, n=N, **more):
    return proposals(JOB, [], what, machine(bandwidth, **more), n)


def test_slower_networks_justify_more_risk(what):
    offers = [best(offered(what, bandwidth)[0]) for bandwidth in (1e12, 3e7, 1.25e6, 1e5)]
    levels = [proposal.level for proposal in offers]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == 6
    assert offers[0].label == "all-reduce (DDP)" and "H = 128" in offers[-1].label


@pytest.mark.every
@pytest.mark.parametrize("bandwidth", [10.0**k for k in range(4, 11)])
def test_the_proposal_is_at_most_a_tenth_slower_than_the_fastest(what, bandwidth):
    offers, _ = offered(what, bandwidth, latency=1e-3)
    fastest = min(proposal.row.step_s for proposal in offers)
    assert best(offers).row.step_s <= WITHIN * fastest
    # all proposals of a lower level are slower than that
    level = best(offers).level
    assert all(p.row.step_s > WITHIN * fastest for p in offers if p.level < level)


@pytest.mark.parametrize("n", [6, 8])
def test_the_settings_of_every_proposal_are_valid(what, n):
    offers, left_out = offered(what, 1e7, n)
    assert len(offers) >= 10
    for proposal in offers:
        job = assemble.load(JOB, list(proposal.settings))
        assert assemble.mistakes(job, n) == []
        if proposal.level:  # level 0 is the all-reduce of DDP
            sent = exchanges(subject(job)[0], n).bytes_per_step
            assert proposal.row.bytes_per_step == pytest.approx(sent)
    output = text(JOB, ["run.seed=3"], offers, left_out, n)
    (command,) = [line for line in output.splitlines() if "mpigossip train" in line]
    chosen = best(offers)
    assert command.split() == ["mpigossip", "train", str(JOB), "run.seed=3", *chosen.settings]
    assert output.count("\n* ") == 1
    assert max(len(line) for line in output.splitlines() if line != command) <= 80
    assert all(f"left out: {label}" in output for label in left_out)


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


def test_an_option_of_the_job_that_excludes_a_proposal_is_named(what):
    settings = ["algorithm.style=atc"]
    offers, left_out = proposals(JOB, settings, what, machine(1e7), N)
    assert any("style" in why for why in left_out.values()) and offers
    with pytest.raises(JobError, match="nonsense"):
        proposals(JOB, ["node.mixer=nonsense"], what, machine(1e7), N)


def test_the_cost_in_accuracy_is_shown_only_for_the_measured_model():
    unknown = "not measured for this model and task"
    digits = JOB
    texts = JOB.with_name("text-gpt.toml")
    for job, model, measured in (
        (digits, "mlp", []),
        (digits, "lenet", ["bf16", "diloco"]),
        (texts, "gpt", ["gasloc"]),
    ):
        settings = [f"model.name={model}"]
        what = subject(assemble.load(job, settings))[0]
        costs = {p.known for p in proposals(job, settings, what, machine(1e7), 8)[0]}
        expected = {KNOWN[name][1] for name in ("none", "static", *measured)} | {unknown}
        assert costs == expected, model
    custom = assemble.load(JOB, ["model.name=lenet", "task.name=mine:task"])
    assert known("diloco", custom) == unknown
