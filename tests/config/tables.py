"""Tables of builders for tests, and the errors of a job."""

from typing import Literal

import pytest

from mpigossip.config import BuilderSpec, JobError, load


def one_peer(
    n, seed=0, *, order: Literal["cyclic", "permuted"] = "cyclic", hops: int | None = None
):
    pass


def dmsgd(
    layout,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    betas: tuple[float, float] = (0.9, 0.99),
):
    pass


def dsgd(local, *, style: Literal["atc", "awc"] = "atc"):
    pass


def sgd(decayed):
    pass


def heavy_ball(decayed, *, momentum: float = 0.5, damping: float = 0.0):
    pass


def loose(layout, *, width=(64, 64), **options):
    pass


TABLES = {
    "graph.name": {"one-peer-exponential": one_peer, "ring": one_peer, "complete": one_peer},
    "algorithm.name": {
        "dmsgd": dmsgd,
        "parallel": BuilderSpec(dmsgd, implies={"graph.name": "complete"}, only=True),
        "dsgd": BuilderSpec(dsgd, implies={"local.name": "sgd"}),
        "tracking": BuilderSpec(dmsgd, implies={"local.name": "momentum"}),
    },
    "local.name": {"sgd": BuilderSpec("tests.config.tables:sgd"), "momentum": heavy_ball},
    "model.name": {"mlp": loose},
    "node.wire": {"fp32": loose, "bf16": loose},
}


def problems_of(source, overrides=(), tables=None):
    """Load a job, which must be rejected; return the messages."""
    with pytest.raises(JobError) as caught:
        load(source, overrides, tables)
    return list(caught.value.messages)
