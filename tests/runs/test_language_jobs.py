"""Jobs of language models: parsing, plans, numbers of parameters, learning."""

from pathlib import Path

import pytest
import torch

from mpigossip import models
from mpigossip.analysis import dryrun
from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.vector import flatten
from mpigossip.runs import start_and_resume
from mpigossip.store.packing import pack
from mpigossip.training import assemble
from tests.cases import on_each

JOBS = Path(__file__).parents[2] / "jobs"
COUNTS = {"gpt-10m": 9_966_848, "gpt-124m": 123_551_232}


@on_each("name", COUNTS)
def test_models_have_the_number_of_parameters_in_their_names(name):
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


@on_each(
    ("name", "n", "parameters", "text"),
    [("gpt-10m", 8, "9,966,848", "corpus-8k.h5"), ("text-gpt", 4, "174,656", "text.h5")],
)
def test_a_job_is_planned_without_its_text(name, n, parameters, text):
    planned = dryrun.describe(assemble.load(JOBS / f"{name}.toml"), n)
    assert f"{parameters} parameters" in planned and f'"{text}" is not on' in planned
    assert max(map(len, planned.splitlines())) <= 80


SMALL = ["data.context=32", "model.layers=1", "model.width=32", "schedule.lr=0.01"]
LATER = "model.heads=2 algorithm.accumulate=1 node.compile=false cadence.period=8 data.batch=8 "


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("gpt-10m", f"{LATER} local.name=adamw run.steps=40", 2.4),
        ("gpt-124m", f"{LATER} local.name=muon run.steps=40", 2.4),
        ("text-gpt", "run.steps=60", 2.2),
        (
            "text-gpt",
            "algorithm.name=diloco cadence.name=cpsgd cadence.period=20 run.steps=60",
            2.2,
        ),
    ],
)
def test_small_models_of_the_jobs_learn(name, settings, most, tmp_path):
    (tmp_path / "text").write_text("one peer a round, and all have the mean; " * 1500)
    text = pack(tmp_path / "text", tmp_path / "text.h5", text=True)
    small = [f"data.source={text}", f"run.output={tmp_path / 'run'}", *SMALL, *settings.split()]
    with SingleProcess() as world:
        summary = start_and_resume.train(assemble.load(JOBS / f"{name}.toml", small), world, 2)
    assert (
        summary["nats_per_byte"] == summary["loss"] < most
    )  # 2.6 is the entropy of single letters
