"""`mpigossip plan --best`: what is proposed for a network, and that it can be pasted."""

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
    made = Machine(20e-3, 0.0, 0.0, latency, bandwidth, latency, bandwidth, 1e10)
    return replace(made, encode_rate=1e10, decode_rate=1e10, **more)


@pytest.fixture(scope="module")
def what():
    return subject(assemble.load(JOB))[0]


def offered(what, bandwidth, n=N, **more):
    return proposals(JOB, [], what, machine(bandwidth, **more), n)


def test_a_fast_network_is_worth_no_risk_and_a_slow_one_is(what):
    found = [best(offered(what, bandwidth)[0]) for bandwidth in (1e12, 3e7, 1.25e6, 1e5)]
    levels = [one.level for one in found]
    assert levels == sorted(levels) and levels[0] == 0 and levels[-1] == 6
    assert found[0].label == "all-reduce (DDP)" and "H = 128" in found[-1].label


@pytest.mark.every
@pytest.mark.parametrize("bandwidth", [10.0**k for k in range(4, 11)])
def test_what_is_proposed_is_at_most_a_tenth_slower_than_the_fastest(what, bandwidth):
    found, _ = offered(what, bandwidth, latency=1e-3)
    fastest = min(one.row.step_s for one in found)
    assert best(found).row.step_s <= WITHIN * fastest
    # what risks less is slower than that
    level = best(found).level
    assert all(one.row.step_s > WITHIN * fastest for one in found if one.level < level)


@pytest.mark.parametrize("n", [6, 8])
def test_every_proposal_can_be_pasted(what, n):
    found, left_out = offered(what, 1e7, n)
    assert len(found) >= 10
    for one in found:
        job = assemble.load(JOB, list(one.settings))
        assert assemble.mistakes(job, n) == []
        if one.level:  # all-reduce is DDP's
            sent = exchanges(subject(job)[0], n).bytes_per_step
            assert one.row.bytes_per_step == pytest.approx(sent)
    said = text(JOB, ["run.seed=3"], found, left_out, n)
    (pasted,) = [line for line in said.splitlines() if "mpigossip train" in line]
    chosen = best(found)
    assert pasted.split() == ["mpigossip", "train", str(JOB), "run.seed=3", *chosen.settings]
    assert said.count("\n* ") == 1
    assert max(len(line) for line in said.splitlines() if line != pasted) <= 80
    assert all(f"left out: {label}" in said for label in left_out)


def test_a_proposal_is_for_the_epochs_and_the_slots_that_are_planned(what):
    wide = replace(what, slots=4)
    for one in proposals(JOB, [], wide, machine(1e7), N, 3)[0]:
        assert one.row.steps_per_epoch == wide.steps_per_epoch(N) < what.steps_per_epoch(N)
        assert one.row.total_s == pytest.approx(3 * one.row.epoch_s)


def test_the_longer_the_period_the_fewer_the_bytes(what):
    found = {one.label: one.row for one in offered(what, 1e7)[0]}
    sent = [found[f"diloco, H = {period}"].bytes_per_step for period in (8, 32, 128)]
    assert sent[0] == pytest.approx(4 * sent[1]) and sent[1] == pytest.approx(4 * sent[2])


def test_a_job_s_own_option_is_named_where_it_keeps_a_way_out(what):
    settings = ["algorithm.style=atc"]
    found, left_out = proposals(JOB, settings, what, machine(1e7), N)
    assert any("style" in why for why in left_out.values()) and found
    with pytest.raises(JobError, match="nonsense"):
        proposals(JOB, ["node.mixer=nonsense"], what, machine(1e7), N)


def test_accuracy_is_told_of_the_model_it_was_measured_with_alone():
    unknown = "not measured for this model and task"
    digits = JOB
    texts = JOB.with_name("text-gpt.toml")
    for job, model, right in (
        (digits, "mlp", []),
        (digits, "lenet", ["bf16", "diloco"]),
        (texts, "gpt", ["gasloc"]),
    ):
        settings = [f"model.name={model}"]
        what = subject(assemble.load(job, settings))[0]
        told = {one.known for one in proposals(job, settings, what, machine(1e7), 8)[0]}
        expected = {KNOWN[name][1] for name in ("none", "static", *right)} | {unknown}
        assert told == expected, model
    own = assemble.load(JOB, ["model.name=lenet", "task.name=mine:task"])
    assert known("diloco", own) == unknown
