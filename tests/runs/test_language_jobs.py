"""jobs/gpt-10m.toml and gpt-124m.toml: they parse, are planned, have the parameters said."""

from pathlib import Path

import pytest
import torch

from mpigossip import models
from mpigossip.analysis import dryrun
from mpigossip.cluster.ranks import Alone
from mpigossip.engine.vector import flatten
from mpigossip.runs import launch
from mpigossip.store.packing import pack
from mpigossip.training import assemble
from tests.cases import on_each

JOBS = Path(__file__).parents[2] / "jobs"
COUNTS = {"gpt-10m": 9_966_848, "gpt-124m": 123_551_232}


@on_each("name", COUNTS)
def test_the_jobs_have_the_parameters_that_they_are_named_for(name):
    job = assemble.load(JOBS / f"{name}.toml")
    with torch.device("meta"):
        made = models.BUILDERS["gpt"](job.data.shape, job.data.classes, **job.model.options)
    assert sum(p.numel() for p in made.parameters()) == COUNTS[name]
    assert f"{COUNTS[name] / 1e6:.1f} million" in (JOBS / f"{name}.toml").read_text()
    assert list(job.data.shape) == [job.data.context]
    flat = flatten(made, 1, models.decayed(made))
    assert flat.count == COUNTS[name] and flat.embeddings == {"tokens.weight"}
    for n in (2, 8):
        assert assemble.mistakes(job, n) == []


def test_a_job_of_ten_million_is_planned_without_its_text():
    planned = dryrun.describe(assemble.load(JOBS / "gpt-10m.toml"), 8)
    assert "9,966,848 parameters" in planned and '"corpus-8k.h5" is not here' in planned


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("local", ["adamw", "muon"])
def test_small_models_of_the_jobs_learn(name, local, tmp_path):
    (tmp_path / "text").write_text("one peer a round, and all have the mean; " * 1500)
    text = pack(tmp_path / "text", tmp_path / "text.h5", text=True)
    small = [f"data.source={text}", "data.context=32", "model.layers=1", "model.width=32",
             "model.heads=2", "algorithm.accumulate=1", "node.compile=false", "cadence.period=8",
             "data.batch=8", "schedule.lr=0.01", f"local.name={local}", "run.steps=40",
             f"run.output={tmp_path / 'run'}"]  # fmt: skip
    with Alone() as world:
        summary = launch.train(assemble.load(JOBS / f"{name}.toml", small), world, 2)
    assert summary["nats_per_byte"] == summary["loss"] < 2.4  # a letter at a time: 2.6
