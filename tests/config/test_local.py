"""Section [local], beside the algorithm that uses it, and its form in jobs of version 0.1."""

import pytest

from mpigossip.config import as_dict, dump, load
from mpigossip.training import assemble
from tests.config.test_sections import TABLES, mistakes

NEW = """\
[algorithm]
name = "tracking"
momentum = 0.8

[local]
name = "momentum"
damping = 0.1
"""
OLD = """\
[algorithm]
name = "tracking"
local = "momentum"
momentum = 0.8
damping = 0.1
"""


def test_the_old_form_is_the_same_job_and_the_new_one_is_written():
    job = load(NEW, tables=TABLES)
    assert job.local.name == "momentum"
    assert job.local.options == {"momentum": 0.5, "damping": 0.1}
    assert job.algorithm.options["momentum"] == 0.8, "an option of both stays the algorithm's"
    assert load(OLD, tables=TABLES) == job
    assert '[local]\nname = "momentum"' in dump(job)
    assert load(dump(job), tables=TABLES) == job == load(dump(job))
    assert as_dict(load(OLD))["local"] == {"name": "momentum"}


def test_both_of_one_name_can_be_set():
    job = load(NEW, ["algorithm.momentum=0.6", "local.momentum=0.7"], TABLES)
    assert job.algorithm.options["momentum"] == 0.6 and job.local.options["momentum"] == 0.7


def test_overrides_of_the_old_form_replace_what_the_new_one_says():
    job = load(NEW, ["algorithm.damping=0.2", "algorithm.momentum=0.6"], TABLES)
    assert job.local.options == {"momentum": 0.5, "damping": 0.2}
    assert job.algorithm.options["momentum"] == 0.6
    job = load(NEW, ["algorithm.local=sgd"], TABLES)
    assert (job.local.name, job.local.options) == ("sgd", {})
    job = load(
        {}, ["algorithm.name=dsgd", "algorithm.local=momentum", "algorithm.damping=1"], TABLES
    )
    assert job.local.options == {"momentum": 0.5, "damping": 1.0}


def test_another_local_step_drops_the_options_of_the_old_one():
    changed = ["algorithm.name=dsgd"]
    assert load(NEW, changed, TABLES).local.options["damping"] == 0.1, "the name is the same"
    usual = {"algorithm": {"name": "tracking"}, "local": {"damping": 0.1}}
    assert load(usual, tables=TABLES).local.options == {"momentum": 0.5, "damping": 0.1}
    assert load(usual, changed, TABLES).local.options == {}, "the usual one of dsgd is another"
    assert load(usual, ["local.name=momentum", *changed], TABLES).local.options["damping"] == 0.1
    assert load(dump(load(usual, tables=TABLES)), changed, TABLES).local.name is None


@pytest.mark.parametrize("source", [NEW, OLD])
def test_methods_with_a_step_of_their_own_refuse_another(source):
    (message,) = mistakes(source, ["algorithm.name=dmsgd"], TABLES)
    assert message.startswith('local.name = "momentum": "dmsgd" has its own local step; leave it')
    assert message.endswith("choose one of dsgd, tracking")
    (message,) = mistakes({"local": {"beta": 1}}, tables=TABLES)
    assert message.startswith('local.beta: algorithm "dmsgd" has no local step')
    job = load(source, ["algorithm.name=dmsgd", "local.name=none"], TABLES)
    assert job.local.name is None and job.local.options == {}


def test_all_mistakes_of_the_section_at_once():
    (message,) = mistakes(NEW, ["local.name=momentun"], TABLES)
    assert 'local.name = "momentun": unknown local; did you mean "momentum"?' in message
    got = mistakes(NEW, ["local.dampng=1", "local.momentum=high", "algorithm.momentm=1"], TABLES)
    for part in (
        'local.dampng: unknown key; did you mean "damping"?',
        'local.momentum = "high": needs a number; the default is 0.5',
        'algorithm.momentm: unknown key; did you mean "momentum"?',
    ):
        assert sum(message.startswith(part) for message in got) == 1, (part, got)
    twice = '[algorithm]\ndamping = 0.3\nlocal = "sgd"\n' + NEW.removeprefix("[algorithm]\n")
    got = mistakes(twice, tables=TABLES)
    assert 'algorithm.local = "sgd": stands in [local] as name; leave this one out' in got
    assert "algorithm.damping = 0.3: stands in [local] as damping; leave this one out" in got


@pytest.mark.parametrize("local", ["", "[1]", "{ a = 1 }", "true"])
def test_odd_sections_are_mistakes(local):
    for text in (f"local = {local or 3}\n[run]\n", f"[algorithm]\nlocal = {local or 3}\n"):
        mistakes(text + 'name = "dsgd"\n', tables=TABLES)


def test_other_names_than_that_of_a_section_are_checked_too():
    assert load({}, ["node.wire=bf16"], TABLES).node.wire == "bf16"
    (message,) = mistakes({}, ["node.wire=bf15"], TABLES)
    assert message == 'node.wire = "bf15": unknown wire; did you mean "bf16"?'
    (message,) = mistakes({}, ["node.wire=3"], TABLES)
    assert message.startswith("node.wire = 3: needs text")


def test_momentum_tracking_over_momentum_takes_both_betas():
    words = ["algorithm.name=momentum-tracking", "local.name=momentum"]
    job = assemble.load({}, [*words, "algorithm.beta=0.8", "local.beta=0.7"])
    assert job.algorithm.options["beta"] == 0.8 and job.local.options == {"beta": 0.7}
    usual = assemble.load({}, words)
    assert usual.algorithm.options["beta"] == usual.local.options["beta"] == 0.9
