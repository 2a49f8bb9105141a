"""Sections of a job file: values, limits, overrides on the command line, and errors."""

import dataclasses
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest

from mpigossip import config
from mpigossip.config import JobError, as_dict, dump, load, sections
from mpigossip.training import assemble
from tests.cases import naming, on_each
from tests.config.tables import TABLES, problems_of

JOB = """\
# A trial.
[run]
name = "trial"
seed = 3
epochs = 20

[data]
source = "digits"
batch = 16
shape = [1, 8, 8]

[algorithm]
name = "dmsgd"
momentum = 0.9

[graph]
name = "one-peer-exponential"
order = "permuted"

[schedule]
milestones = [10, 15.5]
"""


def test_reads_file_text_and_dict_alike(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    job = load(path)
    assert job == load(str(path)) == load(JOB) == load(as_dict(job))
    assert job.run.name == "trial" and job.run.steps is None
    assert job.schedule.milestones == (10.0, 15.5)
    assert job.graph.options == {"order": "permuted"}
    assert job.data.shape == (1, 8, 8)
    assert str(job.run.folder) == "runs/trial"
    assert dataclasses.replace(job.run, output="~/{name}").folder == Path.home() / "trial"
    assert dataclasses.replace(job.run, output="~no-one/x").folder == Path("~no-one/x")


def test_defaults_and_every_field_is_documented():
    job = load({})
    assert job == config.Job()
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(sections))
    known = {c.__name__ for c in config.SECTIONS.values()}
    seen = 0
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in known:
            for field, doc in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(doc, ast.Expr), f"{node.name}.{field.target.id}"
                    seen += 1
    assert seen == sum(len(dataclasses.fields(c)) for c in config.SECTIONS.values())


def test_dump_is_complete_and_loads_back():
    for tables in (None, TABLES):
        job = load(JOB, ['run.name=a"b\\c\x7f\U0001f600\n', "run.steps=7"], tables)
        assert load(dump(job)) == job
        assert load(dump(job), tables=tables) == job
        assert load(as_dict(job)) == job
    text = dump(load({}))
    for name, cls in config.SECTIONS.items():
        assert f"[{name}]" in text
        for field in dataclasses.fields(cls):
            assert field.name == "options" or field.name in text


def test_options_of_any_plain_kind_round_trip():
    options = {"a": [1, 2.5, ["x"]], "b": {"c d": True, "e": []}, "f": 1e-12, "g.h": "none"}
    job = load({"model": options | {"h": np.float64(0.9)}})
    assert job.model.options["a"] == (1, 2.5, ("x",))
    assert load(dump(job)) == job


def test_tables_fill_in_defaults_and_check_options():
    job = load(JOB, tables=TABLES)
    assert job.algorithm.options == {"momentum": 0.9, "nesterov": False, "betas": (0.9, 0.99)}
    assert job.graph.options == {"order": "permuted"}  # None can't be written in TOML
    assert job.model.options == {"width": (64, 64)}
    assert load(JOB, ["graph.hops=2"], TABLES).graph.options["hops"] == 2
    assert load(JOB, ["algorithm.momentum=1"], TABLES).algorithm.options["momentum"] == 1.0
    assert load(JOB, ["model.depth=3"], TABLES).model.options["depth"] == 3
    got = problems_of(
        JOB,
        ["graph.order=permutted", "graph.hop=1", "algorithm.momentum=high", "algorithm.betas=[1]"],
        TABLES,
    )
    assert len(got) == 4
    assert any("graph.order" in m and 'did you mean "permuted"' in m for m in got)
    assert any("graph.hop:" in m and 'did you mean "hops"' in m for m in got)
    assert any('algorithm.momentum = "high": needs a number' in m for m in got)
    assert any("algorithm.betas = [1]: needs a list of 2" in m for m in got)


def test_names_are_checked_if_there_are_tables():
    assert load({"graph": {"name": "rign"}}).graph.name == "rign"
    (message,) = problems_of({"graph": {"name": "rign"}}, tables=TABLES)
    assert 'graph.name = "rign"' in message and 'did you mean "ring"?' in message
    own = {"model": {"name": "my.models:net", "any": 1}, "graph": {"name": "file:found.h5"}}
    job = load(own, tables=TABLES)
    assert job.model.options == {"any": 1}
    (message,) = problems_of({"algorithm": {"name": "a/b"}}, tables=TABLES)
    assert "dmsgd, dsgd, parallel" in message
    assert load({"algorithm": {"name": "a:b"}}, tables=TABLES).algorithm.name == "a:b"


def test_a_missing_required_option_is_reported():
    def needs(n, *, degree: int):
        pass

    (message,) = problems_of({"graph": {"name": "k"}}, tables={"graph.name": {"k": needs}})
    assert "graph.degree is not set" in message
    job = load({"graph": {"name": "k", "degree": 3}}, tables={"graph.name": {"k": needs}})
    assert job.graph.options == {"degree": 3}
    (message,) = problems_of(
        {"graph": {"name": "k", "degree": "x"}}, tables={"graph.name": {"k": needs}}
    )
    assert message == 'graph.degree = "x": needs a whole number'


def test_parallel_implies_the_complete_graph():
    assert load({"algorithm": {"name": "parallel"}}, tables=TABLES).graph.name == "complete"
    job = load({"algorithm": {"name": "parallel"}, "graph": {"name": "complete"}})
    assert load(dump(job)) == job
    (message,) = problems_of(JOB, ["algorithm.name=parallel"], TABLES)
    assert message.startswith('graph.name = "one-peer-exponential"') and '"complete"' in message


def test_a_file_of_a_study_is_named_as_such():
    (message,) = problems_of({"job": "digits", "nodes": 8, "grid": {}})
    assert message.startswith("this file describes a study") and "`mpigossip study " in message


def test_all_problems_are_reported_at_once():
    got = problems_of(
        {
            "run": {"sed": 1, "seed": True, "epochs": -1, "name": "a/b"},
            "data": {"batch": "32", "partition": "shufled", "shape": [3, 0]},
            "nodes": {},
            "node": 4,
            "checkpoint": {"keep": 0},
            "schedule": {"lr": 0, "milestones": 5},
            "model": {"x": float("nan")},
        },
        ["log.flush_steps=2.5"],
    )
    for part in (
        ("run.sed", "unknown", '"seed"'),
        ("run.seed = true", "whole number", "0"),
        ("run.epochs = -1", "at least 0"),
        ('run.name = "a/b"', "folder"),
        ('data.batch = "32"', "whole number", "32"),
        ('data.partition = "shufled"', '"shuffled", "sorted", "mixed" or "dirichlet"'),
        ("data.shape = 0", "at least 1"),
        ("nodes", "unknown section", '"node"'),
        ("node = 4", "[node]"),
        ("checkpoint.keep = 0", "at least 1", "10^9", "2"),
        ("schedule.lr = 0.0", "greater than 0", "1e-15", "1e15", "0.1"),
        ("schedule.milestones = 5", "list"),
        ("model.x = nan", "finite"),
        ("log.flush_steps = 2.5", "whole number", "50"),
    ):
        assert sum(bool(re.search(naming(part), message)) for message in got) == 1, (part, got)
    assert len(got) == 14


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("run.seed=-1", "at least 0"),
        ("run.seed=9223372036854775808", "64 bits"),
        ("run.output=", "must not be empty"),
        ("run.name=..", "name of a folder"),
        ("data.batch=0", "at least 1"),
        ("data.shape=[]", "at least one size"),
        ("data.workers=-1", "at least 0"),
        ("algorithm.clip_norm=0", "greater than 0"),
        ("algorithm.accumulate=0", "at least 1"),
        ("schedule.lr=nan", "finite"),
        ("schedule.lr=1_0e400", "finite"),
        ("schedule.milestones=[30, 20]", "ascending"),
        ("node.timeout_s=0", "greater than 0"),
        ("node.threads=0", "at least 1"),
        ("node.ranks_per_node=1000000000", "at most 1024"),
        ("node.devices=cpu:0", "cpu:L"),
        ("node.devices=gpu", "cpu:L"),
        ("node.devices=cuda:3-1", "cpu:L"),
        ("data.shuffled_percent=101", "between 0 and 100"),
        ("data.dirichlet_alpha=0", "greater than 0"),
        ("node.shard=1", "true or false"),
        ("node.same_host=shared", '"read" or "put"'),
        ("run.epochs", "section.key=value"),
        ("epochs=3", "section.key=value"),
        ("=3", "section.key=value"),
        ("run.=3", "section.key=value"),
        ("run.a.b=3", "section.key=value"),
        ("", "section.key=value"),
        ("rnu.epochs=3", 'did you mean "run"?'),
        ("run.name=\udc80", "UTF-8"),
    ],
)
def test_limits_and_malformed_overrides(override, part):
    (message,) = problems_of({}, [override])
    assert part in message


@on_each(
    ("override", "meant"),
    [
        ("data.alpha=0.1", '"dirichlet_alpha"'),
        ("graph.name=onepeer", '"one-peer-hypercube" or "one-peer-exponential"'),
        ("algorithm.name=DMSG", '"dmsgd" or "qg-dmsgd" or "dmsgd-vanilla"'),
    ],
)
def test_a_part_of_a_name_suggests_the_full_name(override, meant):
    with pytest.raises(JobError) as caught:
        assemble.load({}, [override])
    assert caught.value.messages[0].endswith(f"; did you mean {meant}?")


def test_overrides():
    job = load(
        JOB,
        [
            "run.epochs=5",
            "run.epochs = 6",
            "run.name=2024-01-01",
            "run.output=runs/x = y",
            "data.image_size=none",
            "algorithm.clip_norm=1",
            "schedule.scale=none",
            "schedule.milestones=[1,2]",
            "node.devices=cuda:0-7",
            'graph.order="cyclic"',
            "node.shard=false",
        ],
    )
    assert job.run.epochs == 6 and job.run.name == "2024-01-01" and job.run.output == "runs/x = y"
    assert job.data.image_size is None and job.algorithm.clip_norm == 1.0
    assert job.schedule.scale == "none" and job.schedule.milestones == (1.0, 2.0)
    assert job.graph.options == {"order": "cyclic"} and job.node.shard is False
    assert load(dump(job), ["algorithm.clip_norm=none"]).algorithm.clip_norm is None
    # A value must not add keys to the job, although TOML could contain a line break.
    assert load({}, ["run.name=1\nepochs = 3"]).run.name == "1\nepochs = 3"


def test_files_that_are_not_jobs(tmp_path):
    (tmp_path / "digits.toml").write_text(JOB)
    (message,) = problems_of(tmp_path / "digit.toml")
    assert "no such file" in message and 'did you mean "digits.toml"?' in message
    (message,) = problems_of("no/such/folder/job.toml")
    assert "no such file" in message
    assert "can't be read" in problems_of(tmp_path)[0]
    assert "can't be read" in problems_of("nul\0byte")[0]
    (tmp_path / "binary.toml").write_bytes(b"\x89HDF\r\n\xff")
    assert "can't be read" in problems_of(tmp_path / "binary.toml")[0]
    (message,) = problems_of("[run]\nname = trial\n")
    assert "is not TOML" in message and "line 2" in message and "quotes" in message


def test_job_error_prints_and_travels():
    error = JobError(["first", "second"])
    assert str(error) == "- first\n- second" and str(JobError(["one"])) == "one"
    assert JobError("text").messages == ("text",)
    assert pickle.loads(pickle.dumps(error)).messages == error.messages
    assert isinstance(error, ValueError)


def test_mutated_jobs_are_jobs_or_job_errors():
    draw = random.Random(1)
    parts = ["[", "]", "=", '"', "\n", "{", ".", "'''", "1e999", "-", "0x" + "F" * 5000, "nan"]
    parts += ["true", "none", "1979-05-27", "[[run]]", "[run.name]\n", "\0", "\ud800", "é", "a.b="]
    parts += ["[" * 3000, "9" * 5000, "options", "{a=1}", "[graph]\n", "\r", "#"]
    good = 0
    for _ in range(3000):
        text = dump(load(JOB)) if draw.random() < 0.2 else JOB
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            at = draw.randrange(len(text))
            cut = at + draw.choice([0, 0, 1, 5, 40])
            text = text[:at] + draw.choice([*parts, text[at : at + 30]]) + text[cut:]
        at = draw.randrange(len(text))
        try:
            job = load(text + "\n", [text[at : at + 25]] if draw.random() < 0.3 else [], TABLES)
        except JobError as error:
            assert error.messages and all(isinstance(m, str) for m in error.messages)
            str(error).encode()
        else:
            assert load(dump(job)) == job == load(dump(job), tables=TABLES)
            good += 1
    assert good > 50


def test_invalid_dicts_are_job_errors():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (None, object(), b"x", {"a": object()}, [float("inf")], 1 << 80, deep):
        for section in ("run", "graph", 3):
            problems_of({section: value})
            problems_of({section: {"name": value}})


def test_another_name_drops_the_options_of_the_old_one():
    text = '[algorithm]\nname = "dmsgd"\nbeta = 0.8\nweight_decay = 0.1\n'
    section = load(text, ["algorithm.name=dsgd", "algorithm.style=awc"]).algorithm
    assert section.options == {"style": "awc"} and section.weight_decay == 0.1
    assert load(text, ["algorithm.name=dmsgd"]).algorithm.options == {"beta": 0.8}


def test_the_first_name_of_a_section_drops_the_options_that_it_lacks():
    """The file has options of a name that another name implies, as diloco implies cpsgd."""
    implied = {"algorithm": {"name": "diloco"}, "cadence": {"period": 32, "delay": 1}}
    assert assemble.load(implied, ["cadence.name=always"]).cadence.options == {}
    kept = assemble.load(implied, ["cadence.name=every"]).cadence.options
    assert kept["period"] == 32 and kept["delay"] == 1
    given = assemble.load(implied, ["cadence.name=gossip-pga", "cadence.period=3"])
    assert given.cadence.options == {"period": 3}
    with pytest.raises(JobError, match=naming("cadence.longest", "always")):
        assemble.load(implied, ["cadence.name=always", "cadence.longest=3"])
    misspelt = {"algorithm": {"name": "diloco"}, "cadence": {"perod": 32}}
    for name in ("cpsgd", "always"):
        with pytest.raises(JobError, match=naming("cadence.perod")):
            assemble.load(misspelt, [f"cadence.name={name}"])


def test_another_algorithm_drops_options_of_a_cadence_that_it_does_not_imply():
    """A comparison of algorithms then works for a job that names the period of diloco only."""
    implied = {"algorithm": {"name": "diloco"}, "cadence": {"period": 32, "delay": 1}}
    always = assemble.load(implied, ["algorithm.name=dsgd"]).cadence
    assert always.name == "always" and always.options == {}
    every = assemble.load(implied, ["algorithm.name=gasloc"]).cadence
    assert every.name == "every" and every.options["period"] == 32 and every.options["delay"] == 1
    with pytest.raises(JobError, match=naming("cadence.period", "always")):
        assemble.load(implied, ["algorithm.name=dsgd", "cadence.period=32"])
    with pytest.raises(JobError, match=naming("cadence.period", "always")):
        assemble.load({"algorithm": {"name": "dsgd"}, "cadence": {"period": 32}}, ["run.epochs=1"])
