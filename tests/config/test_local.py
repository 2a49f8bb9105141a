"""Section [local], together with the algorithm that uses it."""

import re

from mpigossip.config import dump, load
from mpigossip.training import assemble
from tests.cases import naming, on_each
from tests.config.tables import TABLES, problems_of

NEW = """\
[algorithm]
name = "tracking"
momentum = 0.8

[local]
name = "momentum"
damping = 0.1
"""


def test_a_job_with_a_local_step_is_written_and_read_back():
    job = load(NEW, tables=TABLES)
    assert job.local.name == "momentum"
    assert job.local.options == {"momentum": 0.5, "damping": 0.1}
    assert job.algorithm.options["momentum"] == 0.8, (
        "an option that both have belongs to the algorithm"
    )
    assert '[local]\nname = "momentum"' in dump(job)
    assert load(dump(job), tables=TABLES) == job == load(dump(job))


def test_a_complete_job_of_an_earlier_version_may_have_a_removed_default():
    assert load("[node]\noverlap = true\n") == load({})
    for name, options in (("detag", {"beta": 0.5}), ("dmsgd", {"momentum": "new", "beta": 0.5})):
        old = f'[algorithm]\nname = "{name}"\nmomentum = "new"\nbeta = 0.5\n'
        assert load(old).algorithm.options == options
    for name in ("dsgd", "detag"):  # a default that was removed from all algorithms
        old = f'[algorithm]\nname = "{name}"\nblend_shape = '
        assert load(f'{old}"linear"\n') == load({"algorithm": {"name": name}})
        assert load(f'{old}"cosine"\n').algorithm.options == {"blend_shape": "cosine"}
    for source, overrides in (({"node": {"overlap": True}}, ()), ({}, ["node.overlap=true"])):
        (message,) = problems_of(source, overrides)
        assert message.startswith("node.overlap: unknown key; ")
    (message,) = problems_of("[node]\noverlap = false\n")
    assert message.startswith("node.overlap: unknown key; ")


def test_a_complete_job_of_an_earlier_version_may_have_an_old_name():
    assert load("[node]\nkept = 0.25\n").node.density == 0.25
    for source, overrides in (({"node": {"kept": 0.25}}, ()), ({}, ["node.kept=0.25"])):
        (message,) = problems_of(source, overrides)
        assert message.startswith("node.kept: unknown key; ")


def test_an_option_of_the_local_step_in_section_algorithm_is_rejected():
    (message,) = problems_of(NEW, ["algorithm.damping=0.2"], TABLES)
    assert message == 'algorithm.damping: unknown key; did you mean "local.damping"?'
    (message,) = problems_of(NEW, ["algorithm.qqq=0.2"], TABLES)
    assert "known here: accumulate, " in message and "local." not in message


def test_two_options_of_the_same_name_can_be_set():
    job = load(NEW, ["algorithm.momentum=0.6", "local.momentum=0.7"], TABLES)
    assert job.algorithm.options["momentum"] == 0.6 and job.local.options["momentum"] == 0.7


def test_another_local_step_drops_the_options_of_the_old_one():
    changed = ["algorithm.name=dsgd"]
    assert load(NEW, changed, TABLES).local.options["damping"] == 0.1, "the name is the same"
    usual = {"algorithm": {"name": "tracking"}, "local": {"damping": 0.1}}
    assert load(usual, tables=TABLES).local.options == {"momentum": 0.5, "damping": 0.1}
    assert load(usual, changed, TABLES).local.options == {}, "dsgd has another default local step"
    assert load(usual, ["local.name=momentum", *changed], TABLES).local.options["damping"] == 0.1
    assert load(dump(load(usual, tables=TABLES)), changed, TABLES).local.name is None


def test_algorithms_with_their_own_step_reject_another():
    named = ["algorithm.name=dmsgd", "local.name=momentum"]
    (message,) = problems_of(NEW, named, TABLES)
    assert message.startswith('local.name = "momentum": "dmsgd"')
    assert message.endswith(": dsgd, tracking")
    (message,) = problems_of({"local": {"beta": 1}}, tables=TABLES)
    assert message.startswith('local.beta: algorithm "dmsgd" has no')
    for settings in (["algorithm.name=dmsgd"], ["algorithm.name=dmsgd", "local.name=none"]):
        job = load(NEW, settings, TABLES)  # an override drops the section of the file
        assert job.local.name is None and job.local.options == {}


def test_all_problems_of_the_section_are_reported_at_once():
    (message,) = problems_of(NEW, ["local.name=momentun"], TABLES)
    assert re.search(naming('local.name = "momentun"', '"momentum"'), message)
    got = problems_of(NEW, ["local.dampng=1", "local.momentum=high", "algorithm.momentm=1"], TABLES)
    for part in (
        ("local.dampng", '"damping"'),
        ('local.momentum = "high"', "number", "0.5"),
        ("algorithm.momentm", '"momentum"'),
    ):
        assert sum(bool(re.match(naming(part), message)) for message in got) == 1, (part, got)


@on_each("local", ["", "[1]", "{ a = 1 }", "true"])
def test_malformed_sections_are_rejected(local):
    problems_of(f'local = {local or 3}\n[run]\nname = "dsgd"\n', tables=TABLES)


def test_names_in_other_settings_are_checked_too():
    assert load({}, ["node.wire=bf16"], TABLES).node.wire == "bf16"
    (message,) = problems_of({}, ["node.wire=bf15"], TABLES)
    assert message == 'node.wire = "bf15": unknown wire; did you mean "bf16"?'
    (message,) = problems_of({}, ["node.wire=3"], TABLES)
    assert message.startswith("node.wire = 3: needs text")


def test_momentum_tracking_over_momentum_takes_both_betas():
    words = ["algorithm.name=momentum-tracking", "local.name=momentum"]
    job = assemble.load({}, [*words, "algorithm.beta=0.8", "local.beta=0.7"])
    assert job.algorithm.options["beta"] == 0.8 and job.local.options == {"beta": 0.7}
    usual = assemble.load({}, words)
    assert usual.algorithm.options["beta"] == usual.local.options["beta"] == 0.9


def test_rates_of_adaptive_local_steps_are_not_scaled_by_default():
    for settings, scale in (
        ([], "linear"),
        (["algorithm.name=dsgd", "local.name=momentum"], "linear"),
        (["algorithm.name=dsgd", "local.name=adamw"], "none"),
        (["algorithm.name=dsgd", "local.name=muon"], "none"),
        (["algorithm.name=dsgd", "local.name=accumadam"], "none"),
        (["algorithm.name=diloco"], "none"),  # its default local step
        (["algorithm.name=diloco", "local.name=sgd"], "linear"),
        (["algorithm.name=diloco", "schedule.scale=linear"], "linear"),
    ):
        job = assemble.load({}, settings)
        assert job.schedule.scale == scale, settings
        assert assemble.load(dump(job)) == job
