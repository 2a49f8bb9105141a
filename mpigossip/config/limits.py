"""Types of settings, each with its limits, for the sections in `config.sections`.

A type is the annotation of the value, together with a `Limit` that states the valid values.
"""

import re
from typing import Annotated

from mpigossip.config.structure import Limit


def between(low: float, high: float, words: str) -> Limit:
    """Return the limit ``low <= value <= high``.

    :param low: smallest valid value
    :param high: largest valid value
    :param words: statement of the condition for error messages
    """
    return Limit(lambda v: low <= v <= high, words, {"minimum": low, "maximum": high})


def matching(pattern: str, words: str) -> Limit:
    """Return the limit that the whole text matches a regular expression.

    :param pattern: regular expression
    :param words: statement of the condition for error messages
    """
    regex = re.compile(pattern)
    return Limit(lambda v: regex.fullmatch(v) is not None, words, {"pattern": f"^({pattern})$"})


Seed = Annotated[int, Limit(lambda v: v >= 0, "must be at least 0", {"minimum": 0})]
Count = Annotated[int, between(0, 10**9, "must be at least 0, at most 10^9")]
Positive = Annotated[int, between(1, 10**9, "must be at least 1, at most 10^9")]
Period = Annotated[int, between(1, 10**6, "must be at least 1, at most 10^6")]
Batch = Annotated[int, between(1, 10**7, "must be at least 1, at most 10^7")]
Threads = Annotated[int, between(1, 1024, "must be at least 1, at most 1024")]
RanksPerNode = Annotated[int, between(1, 1024, "must be at least 1, at most 1024")]
Workers = Annotated[int, between(0, 1024, "must be at least 0, at most 1024")]
NotNegative = Annotated[
    float,
    Limit(
        lambda v: v == 0 or 1e-15 <= v <= 1e9,
        "must be 0, or at least 1e-15 and at most 1e9",
        {"minimum": 0, "maximum": 1e9},
    ),
]
SMALLEST = 1e-15
LARGEST = 1e15
"""Smallest and largest value of a setting of type `AboveZero`."""
AboveZero = Annotated[
    float, between(SMALLEST, LARGEST, "must be greater than 0, from 1e-15 up to 1e15")
]
_NODE_WEIGHTS = "a list with a number for each node, greater than 0, from 1e-15 up to 1e15"
NodeWeights = Annotated[
    tuple[Annotated[float, between(SMALLEST, LARGEST, _NODE_WEIGHTS)], ...],
    Limit(bool, _NODE_WEIGHTS, {"minItems": 1}),
]
OneOrMore = Annotated[float, between(1, 1e6, "must be at least 1, at most 1e6")]
Chance = Annotated[
    float,
    Limit(
        lambda v: 0 <= v < 1,
        "must be at least 0 and below 1",
        {"minimum": 0, "exclusiveMaximum": 1},
    ),
]
Share = Annotated[float, between(0, 1, "must be between 0 and 1")]
Percent = Annotated[float, between(0, 100, "must be between 0 and 100")]
Text = Annotated[str, Limit(lambda v: v.strip() != "", "must not be empty", {"minLength": 1})]
Name = Annotated[
    str,
    matching(r"(?!\.\.?$)[^/\0]+", "must be usable as the name of a folder, without /"),
]
DEVICES = r"auto|[cg]pu:[1-9]\d{0,3}|cuda:\d+(-\d+)?(,\d+(-\d+)?)*"
Devices = Annotated[
    str,
    Limit(
        lambda v: (
            re.fullmatch(DEVICES, v) is not None
            and all(int(a) <= int(b) for a, b in re.findall(r"(\d+)-(\d+)", v))
        ),
        'must be "auto", "cpu:L" with L slots (L at least 1), "gpu:K" with K GPUs per rank, or '
        'device numbers such as "cuda:0-7"',
        {"pattern": f"^({DEVICES})$"},
    ),
]
Shape = Annotated[
    tuple[Positive, ...], Limit(bool, "must contain at least one size", {"minItems": 1})
]
Placement = Annotated[
    str,
    matching(
        r"given|hostnames|scheduler|file:.+",
        'must be "given", "hostnames", "scheduler" or "file:PATH"',
    ),
]
