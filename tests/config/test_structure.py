"""Conversion of plain values to annotated types."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from mpigossip.config import JobError
from mpigossip.config.structure import Limit, structure
from mpigossip.config.toml import closest
from mpigossip.training import assemble
from tests.cases import naming, on_each

Count = Annotated[int, Limit(lambda value: value >= 0, "must be at least 0")]


@dataclass(frozen=True, kw_only=True)
class Part:
    size: Count
    title: str = "part"


@dataclass(frozen=True, kw_only=True)
class Whole:
    first: Part = field(default_factory=lambda: Part(size=0))
    parts: tuple[Part, ...] = ()
    every: "Literal['auto'] | Count" = "auto"
    rate: float | None = 0.5
    pair: tuple[int, float] = (1, 2.0)
    extra: dict[str, Any] = field(default_factory=dict)


def problems_of(value, kind, *where):
    with pytest.raises(JobError) as caught:
        structure(value, kind, *where)
    return list(caught.value.messages)


def test_tables_and_lists_become_dataclasses_and_tuples():
    raw = {
        "first": {"size": 3},
        "parts": [{"size": 1, "title": "a"}],
        "every": 7,
        "rate": "none",
        "pair": [2, 3],
        "extra": {"x": [1]},
    }
    whole = structure(raw, Whole)
    assert whole == Whole(
        first=Part(size=3),
        parts=(Part(size=1, title="a"),),
        every=7,
        rate=None,
        pair=(2, 3.0),
        extra={"x": [1]},
    )
    assert isinstance(whole.pair[1], float)
    assert structure({}, Whole) == Whole()


def test_all_problems_are_reported_with_their_paths():
    raw = {
        "first": {"size": -1, "tite": "x"},
        "parts": [{"title": 3}],
        "every": "sometimes",
        "rate": "high",
        "pair": [1],
        "extra": 3,
        "sice": 1,
    }
    assert problems_of(raw, Whole) == [
        "first.size = -1: must be at least 0",
        'first.tite: unknown key; did you mean "title"?',
        "parts.size is missing: add this key",
        'parts.title = 3: needs text; the default is "part"',
        'every = "sometimes": must be "auto" or needs a whole number; the default is "auto"',
        'rate = "high": needs a number; the default is 0.5',
        "pair = [1]: needs a list of 2 values, got 1; the default is [1, 2.0]",
        "extra = 3: needs a table of keys and values",
        "sice: unknown key; known here: every, extra, first, pair, parts, rate",
    ]


@pytest.mark.parametrize(
    ("value", "kind", "need"),
    [
        (True, int, "needs a whole number"),
        (1.0, int, "needs a whole number"),
        (True, float, "needs a number"),
        ("1", float, "needs a number"),
        (1, bool, "needs true or false"),
        (1, str, "needs text"),
        (None, int, "needs a whole number"),
        (1, Literal[True, "x"], 'must be true or "x"'),
        ("ab", tuple[str, ...], "needs a list"),
        ([[1], [2, "x"]], tuple[tuple[int, ...], ...], "needs a whole number"),
        ([1], Part, "needs a table"),
    ],
)
def test_no_type_is_changed_silently(value, kind, need):
    (message,) = problems_of(value, kind, "run.key")
    assert message.startswith("run.key = ") and f": {need}" in message


def test_a_type_that_is_not_known_is_an_error_of_the_program():
    with pytest.raises(TypeError, match=naming("run.key", "set[int]")):
        structure([1], set[int], "run.key")


@on_each(
    ("word", "names", "meant"),
    [
        ("act", ["atc", "awc"], ["atc"]),  # two letters are exchanged
        ("abc", ["atc", "awc"], []),
        ("rign", ["ring", "star"], ["ring"]),
        ("digit", ["digits", "digitz"], ["digitz"]),
        ("qqq", ["ring"], []),
    ],
)
def test_the_most_similar_name_is_suggested_unless_two_short_ones_are_equally_similar(
    word, names, meant
):
    assert closest(word, names)[:1] == meant


def test_messages_on_all_reduce_name_a_remedy_that_works_for_a_packaged_job():
    with pytest.raises(JobError, match=naming("set graph.name=complete")):
        assemble.load("digits", ["algorithm.name=parallel"])
    words = ["algorithm.name=parallel", "graph.name=complete", "algorithm.style=awc"]
    with pytest.raises(JobError, match=naming("algorithm.style", '"parallel"', "option of dsgd")):
        assemble.load("digits", words)
