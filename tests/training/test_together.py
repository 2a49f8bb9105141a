"""Seeds in step: each is what it is alone, to rounding, and one that diverges ends alone."""

import math

import pytest
import torch

import mpigossip
from mpigossip.analysis.study import vectorized
from mpigossip.analysis.study.vectorized import DIVERGED
from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.store.log import read
from mpigossip.training import assemble
from mpigossip.training.loop import NotFinite
from mpigossip.training.together import Together

JOB = {
    "data": {"source": "synthetic", "samples": 96, "test_samples": 32, "batch": 4},
    "model": {"name": "mlp", "hidden": [16]},
    "algorithm": {"name": "dmsgd"},
    "graph": {"name": "one-peer-exponential", "order": "uniform"},
    "run": {"epochs": 2},
    "schedule": {"lr": 5.0},
}
N = 3


def made(seed, *settings):
    with Alone() as alone:
        job = assemble.load(JOB, [f"run.seed={seed}", *settings])
        return assemble.assemble(job, alone, N).trainer


@pytest.mark.parametrize("settings", [[], ["algorithm.accumulate=2", "node.devices=cpu:2"]])
def test_each_seed_is_what_it_is_alone(settings):
    alone = [made(seed, *settings) for seed in range(3)]
    joined = Together([made(seed, "node.vmap=true", *settings) for seed in range(3)])
    for _ in range(5):
        records = joined.step()
        for one, other, record in zip(alone, joined.trainers, records, strict=True):
            before = one.step()
            assert torch.allclose(record.loss, before.loss, rtol=1e-5)
            assert record.index == before.index and record.bytes_sent == before.bytes_sent
            for x, y in zip(one.replicas.x, other.replicas.x, strict=True):
                assert torch.allclose(x, y, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(alone[0].replicas.x[0], alone[1].replicas.x[0])


def test_one_seed_that_diverges_leaves_the_others(monkeypatch):
    joined = Together([made(seed, "node.vmap=true") for seed in range(3)])
    joined.trainers[1].replicas.full[0].fill_(math.nan)
    for _ in range(2):
        first, second, third = joined.step()
        assert isinstance(second, NotFinite) and joined.ended == [None, second, None]
        assert first.loss.isfinite().all() and third.loss.isfinite().all()
    assert [trainer.index for trainer in joined.trainers] == [2, 0, 2]


def test_a_study_of_seeds_together_is_that_of_seeds_alone_to_rounding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text("[run]\nepochs = 2\n[schedule]\nlr = 1.0\n")
    given = {
        "nodes": N, "seeds": 2, "processes": 1,
        "settings": ["data.source=synthetic", "data.samples=96", "data.test_samples=32",
                     "data.batch=4", "model.hidden=[8]"],
    }  # fmt: skip
    alone = mpigossip.study("job.toml", **given)
    joined = mpigossip.study("job.toml", **given, together=True)
    assert joined.rows[0]["loss"] == pytest.approx(alone.rows[0]["loss"], rel=1e-4)
    assert joined.rows[0]["MB"] == alone.rows[0]["MB"] and joined.folder != alone.folder
    logs = sorted(joined.folder.rglob("log.h5"))
    assert len(logs) == 2 and read(logs[0]).summary["finished"]
    when = [log.stat().st_mtime_ns for log in logs]
    mpigossip.study("job.toml", **given, together=True)
    assert [log.stat().st_mtime_ns for log in logs] == when
    logs[1].unlink()  # a batch is done anew as a whole
    again = mpigossip.study("job.toml", **given, together=True)
    assert again.table() == joined.table() and logs[0].stat().st_mtime_ns > when[0]


def test_a_seed_that_diverged_is_marked_and_the_exact_path_is_refused(tmp_path):
    settings = [f"run.output={tmp_path}", "node.vmap=true", "schedule.lr=1e30"]
    job = assemble.load(JOB, settings)
    with Alone() as alone:
        assert vectorized.simulate(job, [4], alone, N) == [{}]
        assert "the loss of node" in (tmp_path / "seed-4" / DIVERGED).read_text()
        with pytest.raises(JobError, match="node.vmap = false"):
            vectorized.simulate(assemble.load(JOB), [4], alone, N)
