"""A run goes on only from counters, facts and arrays that a run can leave; others are refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mpigossip.cluster.ranks import Alone
from mpigossip.runs import launch
from mpigossip.store import StoreError, checkpoint
from mpigossip.store import manifest as manifests
from mpigossip.training import assemble
from tests.runs.test_run import quietly
from tests.store.test_guard import resigned


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two nodes, four steps, with momentum."""
    folder = tmp_path_factory.mktemp("forged") / "run"
    settings = ["model.name=mlp", "model.hidden=[4]", "run.steps=4", "data.batch=8"]
    quietly(launch.train, assemble.load({}, [*settings, f"run.output={folder}"]), Alone(), 2)
    return folder


def without(name):
    def change(file):
        found = json.loads(file["numbers"][()])
        del found[name]
        del file["numbers"]
        file["numbers"] = np.bytes_(json.dumps(found))

    return lambda path: resigned(path, change, node=1)


def other_momentum(file):
    del file["arrays/state/momentum"]
    file["arrays/state/momentum"] = np.zeros(3, np.float32)


def no_steps(path):
    manifest = checkpoint.read_manifest(path)
    forged = replace(manifest, meta=manifest.meta | {"steps_per_epoch": 0})
    manifests.write(path / "checkpoint.h5", forged)


def asked(path):
    manifest = checkpoint.read_manifest(path)
    forged = replace(manifest, meta=manifest.meta | {"asked": "many"})
    manifests.write(path / "checkpoint.h5", forged)


def spent(path):
    def change(file):
        found = json.loads(file["numbers"][()]) | {"spent/compute_s": "all of it"}
        del file["numbers"]
        file["numbers"] = np.bytes_(json.dumps(found))

    for node in range(2):
        resigned(path, change, node=node)


def nan_momentum(file):
    file["arrays/state/momentum"][7] = np.nan


FORGED = {
    "nan": (
        lambda path: resigned(path, nan_momentum, node=1),
        r"node-0001\.h5 has 1 NaN or infinite values in arrays/state/momentum, the first in "
        r".*\.weight.*: mv .*step-00000004 .*step-00000004\.damaged",
    ),
    "asked": (asked, "2 nodes says that the run was started with many"),
    "spent": (spent, "spent/compute_s = all of it: must be 0 or more"),
    "bytes_sent": (without("bytes_sent"), "bytes_sent"),
    "momentum": (lambda path: resigned(path, other_momentum, node=1), "another copy|checkpoint"),
    "steps": (no_steps, "steps_per_epoch = 0, must be 1 or more"),
}


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("nodes", [2, 3])
def test_what_no_run_leaves_is_refused(run, tmp_path, forged, nodes):
    change, message = FORGED[forged]
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    change(checkpoint.latest(folder))
    with pytest.raises(StoreError, match=message):
        quietly(launch.resume, folder, ["run.steps=6", f"run.output={folder}"], Alone(), nodes)
