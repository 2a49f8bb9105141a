"""Types of settings, each with its limits, for the sections in `config.sections`."""

import re
from typing import Annotated

from mpigossip.config.toml import Limit

Seed = Annotated[int, Limit(lambda v: v >= 0, "must be at least 0")]
Count = Annotated[int, Limit(lambda v: 0 <= v <= 10**9, "must be at least 0, at most 10^9")]
Positive = Annotated[int, Limit(lambda v: 0 < v <= 10**9, "must be at least 1, at most 10^9")]
Period = Annotated[int, Limit(lambda v: 0 < v <= 10**6, "must be at least 1, at most 10^6")]
Batch = Annotated[int, Limit(lambda v: 0 < v <= 10**7, "must be at least 1, at most 10^7")]
Threads = Annotated[int, Limit(lambda v: 1 <= v <= 1024, "must be at least 1, at most 1024")]
Workers = Annotated[int, Limit(lambda v: 0 <= v <= 1024, "must be at least 0, at most 1024")]
NotNegative = Annotated[
    float,
    Limit(lambda v: v == 0 or 1e-15 <= v <= 1e9, "must be 0, or at least 1e-15 and at most 1e9"),
]
LARGEST = 1e15
"""Largest value of a setting of type `AboveZero`."""
AboveZero = Annotated[
    float, Limit(lambda v: 1e-15 <= v <= LARGEST, "must be greater than 0, from 1e-15 up to 1e15")
]
OneOrMore = Annotated[float, Limit(lambda v: 1 <= v <= 1e6, "must be at least 1, at most 1e6")]
Chance = Annotated[float, Limit(lambda v: 0 <= v < 1, "must be at least 0 and below 1")]
Share = Annotated[float, Limit(lambda v: 0 <= v <= 1, "must be between 0 and 1")]
Percent = Annotated[float, Limit(lambda v: 0 <= v <= 100, "must be between 0 and 100")]
Text = Annotated[str, Limit(lambda v: v.strip() != "", "must not be empty")]
Name = Annotated[
    str,
    Limit(
        lambda v: re.fullmatch(r"(?!\.\.?$)[^/\0]+", v) is not None,
        "must be usable as the name of a folder, without /",
    ),
]
Devices = Annotated[
    str,
    Limit(
        lambda v: (
            re.fullmatch(r"auto|[cg]pu:[1-9]\d{0,3}|cuda:\d+(-\d+)?(,\d+(-\d+)?)*", v) is not None
            and all(int(a) <= int(b) for a, b in re.findall(r"(\d+)-(\d+)", v))
        ),
        'must be "auto", "cpu:L" with L slots (L at least 1), "gpu:K" with K GPUs per rank, or '
        'device numbers such as "cuda:0-7"',
    ),
]
Shape = Annotated[tuple[Positive, ...], Limit(bool, "must contain at least one size")]
Placement = Annotated[
    str,
    Limit(
        lambda v: re.fullmatch(r"given|hostnames|scheduler|file:.+", v) is not None,
        'must be "given", "hostnames", "scheduler" or "file:PATH"',
    ),
]
