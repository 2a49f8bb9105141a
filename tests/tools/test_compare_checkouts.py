"""Test that compare_checkouts.py finds a changed constant, and how it judges two results."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "labs" / "compare_checkouts.py"


@pytest.fixture
def labs(monkeypatch):
    """Return the two modules of the program."""
    monkeypatch.syspath_prepend(str(TOOL.parent))
    import checkouts
    import compare_checkouts

    return compare_checkouts, checkouts


def compare(*words):
    return subprocess.run(
        [sys.executable, TOOL, *words], capture_output=True, text=True, timeout=250
    )


@pytest.mark.every
def test_a_changed_constant_of_one_algorithm_is_found(tmp_path):
    for folder in ("mpigossip", "jobs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    changed = 0
    for path in (tmp_path / "mpigossip" / "algorithms").rglob("*.py"):
        # m <- beta m + g becomes m <- beta m + g/2
        before = re.compile(r"(\ndef dmsgd\(.*?\.add_\(g)\)", re.DOTALL)
        text, count = before.subn(r"\1, alpha=0.5)", path.read_text())
        path.write_text(text)
        changed += count
    assert changed == 1, "the formula of dmsgd isn't where this test changes it"
    words = ["--only", "dmsgd-base-2", "dsgd-asynchronous", "--at-once", "2", "--json"]
    ran = compare(ROOT, tmp_path, *words)
    assert ran.returncode == 1, ran.stderr
    rows = {row["job"]: row for row in json.loads(ran.stdout)}
    same = rows["dsgd-asynchronous"]
    other = rows["dmsgd-base-2"]
    assert same["verdict"] == "equal" and not same["reasons"] and len(same["new"]["digest"]) == 64
    assert other["old"]["onward"] == other["old"]["digest"]
    assert other["verdict"] == "differs"
    for reason in ("parameters; log: ", "steps/", "resumed"):
        assert reason in other["reasons"]


@pytest.mark.parametrize(
    "old, new, word, reason",
    [
        ({}, {}, "equal", ""),
        ({}, {"digest": "b"}, "differs", "parameters"),
        ({}, {"onward": "b"}, "differs", "resumed: b, in OLD a"),
        ({}, {"onward": ""}, "differs", "resumed"),
        ({}, {"figures": {"loss": "2", "lr": "1"}}, "differs", "log: loss"),
        ({}, {"figures": {"lr": "1", "new": "1"}}, "equal", ""),
        ({"figures": {"more": "1"}}, {"figures": {"more": "2"}}, "equal", ""),
        ({"onward": "c"}, {"onward": "c"}, "equal", "OLD resumes inexactly"),
        ({"onward": "c"}, {"onward": "a"}, "equal", "OLD resumes inexactly"),
        ({"onward": "c"}, {"onward": "d"}, "differs", "resumed: d, in OLD c"),
        ({"code": 2}, {}, "new", "OLD rejects"),
        ({"code": 1, "message": "why"}, {}, "failed", "OLD: why"),
        ({"code": 2}, {"code": 2}, "failed", "NEW: "),
        ({}, {"code": 2}, "failed", "NEW: "),
    ],
)
def test_what_counts_as_different(labs, old, new, word, reason):
    program, engine = labs
    both = engine.Result("", digest="a", onward="a", figures={"loss": "1", "lr": "1"})
    result = program.verdict(replace(both, **old), replace(both, **new), ["more"])
    assert result[0] == word and reason in result[1] and bool(reason) == bool(result[1])


def test_the_table_has_every_algorithm_wire_and_local_step(labs):
    from mpigossip import algorithms

    named = {word for job in labs[0].table().values() for word in job.settings}
    for name in algorithms.BUILDERS:
        assert name == "dmsgd" or f"algorithm.name={name}" in named
    for wire in ("bf16", "qsgd", "fp4", "sign", "top-k", "random-k"):
        assert f"node.wire={wire}" in named
    for local in ("momentum", "nesterov", "adamw", "accumadam"):
        assert f"local.name={local}" in named
