"""jobs/text-gpt.toml: a language model on the bytes of text files, by gossip and by outer steps."""

from pathlib import Path

import pytest

from mpigossip.analysis import dryrun
from mpigossip.cluster.ranks import Alone
from mpigossip.runs import launch
from mpigossip.store.packing import pack
from mpigossip.training import assemble

ROOT = Path(__file__).parents[2]
JOB = ROOT / "jobs" / "text-gpt.toml"
SMALL = ("data.context=32", "model.layers=1", "model.width=32", "schedule.lr=0.01", "run.steps=60")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "in").mkdir()
    (folder / "in" / "text").write_text("one peer a round, and all have the mean; " * 1500)
    return pack(folder / "in", folder / "text.h5", text=True)


@pytest.mark.parametrize(
    "method",
    [
        "",
        "algorithm.name=diloco cadence.name=cpsgd cadence.period=20",
        "algorithm.name=parallel graph.name=complete",
    ],
)
def test_the_text_job_learns(method, text, tmp_path):
    more = [f"data.source={text}", f"run.output={tmp_path / 'run'}", *SMALL, *method.split()]
    with Alone() as world:
        summary = launch.train(assemble.load(JOB, more), world, 2)
    assert summary["loss"] < 2.2 and summary["steps"] == 60  # a letter at a time: 2.6


def test_the_text_job_is_planned_without_its_text():
    planned = dryrun.describe(assemble.load(JOB), 4)
    assert "174,656 parameters" in planned and '"text.h5" is not here' in planned
