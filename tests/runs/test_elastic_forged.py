"""A run resumes only from counters, facts and arrays that a run can save; others are rejected."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store import StoreError, checkpoint
from mpigossip.store import manifest as manifests
from mpigossip.training import assemble
from tests.cases import naming
from tests.store.examples import change_node_file, set_dataset, set_numbers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train two nodes for four steps with momentum."""
    folder = tmp_path_factory.mktemp("forged") / "run"
    settings = ["model.name=mlp", "model.hidden=[4]", "run.steps=4", "data.batch=8"]
    start_and_resume.train(
        assemble.load({}, [*settings, f"run.output={folder}"]), SingleProcess(), 2
    )
    return folder


def without(name):
    def change(file):
        result = json.loads(file["numbers"][()])
        del result[name]
        del file["numbers"]
        file["numbers"] = np.bytes_(json.dumps(result))

    return lambda path: change_node_file(path, change, node=1)


def facts(**changed):
    def change(path):
        manifest = checkpoint.read_manifest(path)
        forged = replace(manifest, meta=manifest.meta | changed)
        manifests.write(path / "checkpoint.h5", forged)

    return change


def spent(path):
    for node in range(2):
        change_node_file(path, set_numbers(**{"spent/compute_s": "all of it"}), node)


def nan_momentum(file):
    file["arrays/state/momentum"][7] = np.nan


FORGED = {
    "nan": (
        lambda path: change_node_file(path, nan_momentum, node=1),
        ("node-0001.h5", "1 NaN", "arrays/state/momentum", "mv", "step-00000004.damaged"),
    ),
    "asked": (facts(asked="many"), ("2 nodes", "many")),
    "spent": (spent, "spent/compute_s = all of it"),
    "bytes_sent": (without("bytes_sent"), "bytes_sent"),
    "momentum": (
        lambda path: change_node_file(
            path, set_dataset("arrays/state/momentum", np.zeros(3, np.float32)), 1
        ),
        ("can't be used", "state"),
    ),
    "steps": (facts(steps_per_epoch=0), ("steps_per_epoch = 0", "integer")),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("nodes", [2, 3])
def test_states_that_no_run_saves_are_rejected(run, tmp_path, forged, nodes):
    change, message = FORGED[forged]
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    change(checkpoint.latest(folder))
    with pytest.raises(StoreError, match=naming(message)):
        start_and_resume.resume(
            folder, ["run.steps=6", f"run.output={folder}"], SingleProcess(), nodes
        )
