"""tools/claims/theory.py: what is measured is what the formulas say."""

import sys
from pathlib import Path

import pytest

from mpigossip.graphs import graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "claims"))

import theory as tool  # noqa: E402

from tests.cases import on_each


@on_each(("name", "data", "rel"), [
    ("ring", "random", 1e-6), ("one-peer-exponential", "smooth", 1e-6),
    ("one-peer-exponential", "noise", 0.05), ("grid", "noise", 0.05),
])  # fmt: skip
def test_what_nodes_are_off_by_is_as_expected(name, data, rel):
    made = graph(name, 8)
    assert tool.measured(made, data, 0.05) == pytest.approx(
        tool.expected(made, data, 0.05), rel=rel
    )


def test_a_meeting_is_where_both_errors_are_equal():
    made = graph("ring", 16)
    rate = tool.meets(tool.expected, made, "random", 0.01)
    assert tool.expected(made, "random", rate) == pytest.approx(tool.parallels(16, rate), rel=0.01)
    never = tool.meets(lambda *_: 0.001, made, "random", 0.01)
    assert never != never
