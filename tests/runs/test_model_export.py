"""Exports of a run: the model for torch, TensorBoard, a page in HTML."""

import ast
import json
import os
import re
import subprocess
import sys
import tracemalloc
from html.parser import HTMLParser
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mpigossip.analysis.report import write
from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import model_export, start_and_resume
from mpigossip.runs.job import JobNode
from mpigossip.runs.model_export import averaged, export
from mpigossip.runs.snapshot_and_restore import restore
from mpigossip.store import StoreError, checkpoint, manifest
from mpigossip.store.checkpoint import NodeState
from mpigossip.store.log import read
from mpigossip.store.log_export import to_tensorboard
from mpigossip.store.tensor_files import of_array
from mpigossip.training import assemble
from mpigossip.training.evaluate import averaged_model
from tests.cases import naming, some
from tests.launch import PYTHON, warmed
from tests.runs.events import scalars

pytestmark = pytest.mark.usefixtures("warm")

REPO = Path(__file__).resolve().parents[2]
MODULE = '''
import torch
from torch import nn


class Net(nn.Module):
    """Norm statistics, a frozen parameter, a tied one, a buffer that isn't saved."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 1, bias=False)
        self.third = nn.Conv2d(8, 8, 1, bias=False)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.zeros(1), persistent=False)
        self.last = nn.Linear(8 * shape[1] * shape[2], classes)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x))) * self.scale + self.shift
        return self.last(self.third(torch.relu(self.second(x))).flatten(1))
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run of three nodes with two slots, with a custom model."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "own_net.py").write_text(MODULE)
    settings = {
        "run": {"output": str(folder / "run"), "epochs": 3},
        "data": {"batch": 8, "workers": 0},
        "model": {"name": "own_net:Net"},
        "node": {"devices": "cpu:2"},
        "graph": {"name": "ring"},
        "schedule": {"lr": 0.3},
    }
    sys.path.insert(0, str(folder))
    with SingleProcess() as alone:
        summary = start_and_resume.train(assemble.load(settings), alone, 3)
    sys.path.remove(str(folder))
    yield folder, summary
    sys.modules.pop("own_net", None)


LOAD = {
    ".safetensors": "from safetensors.torch import load_file\nmodel = Net((1, 8, 8), 10)\n"
    "model.load_state_dict(load_file({out!r}))",
    ".pt": "import torch\nmodel = Net((1, 8, 8), 10)\n"
    "model.load_state_dict(torch.load({out!r}, weights_only=True))",
}
ACCURACY = """
import sys; sys.path.insert(0, {folder!r})
from own_net import Net
{three}
assert not any(name.startswith("mpigossip") for name in sys.modules)
from mpigossip.data.sources import source
from mpigossip.config import Data
data = source(Data(), 0)
inputs, labels = data.make_batch("test", __import__("numpy").arange(data.test_size))
print(float((model.eval()(inputs).argmax(1) == labels).double().mean()))
"""


@pytest.mark.parametrize("suffix", LOAD)
def test_three_lines_of_torch_load_the_model_that_was_evaluated(trained, suffix, monkeypatch):
    folder, summary = trained
    monkeypatch.syspath_prepend(folder)
    out = folder / f"model{suffix}"
    message = export(Path(summary["checkpoint"]), out, trust_model=True)
    assert message.startswith(f"{out}: the average of 3 nodes") and "note" not in message
    assert message.splitlines()[-1] == LOAD[suffix].format(out=str(out)).splitlines()[-1].replace(
        "'", '"'
    )
    script = folder / "accuracy.py"
    script.write_text(ACCURACY.format(folder=str(folder), three=LOAD[suffix].format(out=str(out))))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(summary["accuracy"], abs=1e-9)
    assert summary["accuracy"] > 0.5
    assert out.stat().st_mode == (folder / "own_net.py").stat().st_mode


def test_evaluated_exported_and_resumed_models_are_bitwise_identical(trained, monkeypatch):
    """With three nodes and two slots, float32 averages would round differently in each case."""
    folder, summary = trained
    monkeypatch.syspath_prepend(folder)
    path = Path(summary["checkpoint"])
    exported = averaged(path, checkpoint.read_manifest(path))
    job = assemble.load(checkpoint.read_manifest(path).job)
    for n in (3, 1):  # first exactly, then with another number of nodes
        assembly = assemble.assemble(job, SingleProcess(), n)
        restore(JobNode(assembly, SingleProcess()), path, checkpoint.read_manifest(path))
        module = averaged_model(assembly.trainer.replicas, assembly.trainer.mixer)
        results = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in exported.items():
            assert (results[name].detach().numpy() == value).all(), (n, name)
        assembly.close()


def test_the_model_of_a_node_and_the_average(trained, monkeypatch):
    folder, summary = trained
    path = Path(summary["checkpoint"])
    mean = averaged(path, checkpoint.read_manifest(path))
    every = [checkpoint.read_node(path, node) for node in range(3)]
    stacked = np.stack([state.parameters for state in every]).astype(np.float64).mean(0)
    joined = np.concatenate([mean[name].ravel() for name in every[0].names])
    np.testing.assert_allclose(joined, stacked, rtol=1e-6, atol=1e-8)
    slots = [s.arrays[f"buffers/{slot}/norm.running_mean"] for s in every for slot in range(2)]
    np.testing.assert_allclose(mean["norm.running_mean"], np.mean(slots, axis=0), rtol=1e-5)
    assert mean["norm.num_batches_tracked"] == every[0].arrays["buffers/0/norm.num_batches_tracked"]
    monkeypatch.syspath_prepend(folder)
    export(path, folder / "two.pt", node=2, trust_model=True)
    own = torch.load(folder / "two.pt", weights_only=True)
    packed = np.concatenate([own[name].numpy().ravel() for name in every[2].names])
    assert (packed == every[2].parameters).all()


def test_a_model_that_cannot_be_built_is_exported_by_the_names_of_the_checkpoint(trained):
    folder, summary = trained
    sys.modules.pop("own_net", None)
    message = export(Path(summary["checkpoint"]), folder / "bare.pt", trust_model=True)
    assert "can't be built here" in message and "own_net" in message
    state = torch.load(folder / "bare.pt", weights_only=True)
    assert "second.weight" in state and "scale" not in state


@pytest.mark.parametrize("suffix", some(LOAD, [".safetensors"]))
def test_a_model_that_the_checkpoint_names_is_not_imported_by_default(trained, suffix, tmp_path):
    """Run the command in a folder with a module of that name, which would report its import."""
    folder, summary = trained
    (tmp_path / "own_net.py").write_text("open('imported', 'w')\n" + MODULE)
    out = tmp_path / f"model{suffix}"
    words = ["checkpoint", "export", summary["checkpoint"], "--out", out.name]
    command = warmed([PYTHON, "-m", "mpigossip", *words], {})
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPO}"}
    facts = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=100, **facts)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists() and out.exists()
    assert "own_net:Net" in done.stdout and "--trust-model" in done.stdout
    done = subprocess.run([*command, "--trust-model"], timeout=100, **facts)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "imported").exists() and "note" not in done.stdout


def test_a_name_of_a_wrong_type_in_a_stored_job_is_not_a_known_model():
    tensors, note = model_export._as_saved("[model]\nname = ['mlp']\n", [of_array("w", np.ones(2))])
    assert [tensor.name for tensor in tensors] == ["w"] and "['mlp']" in note


@pytest.mark.parametrize("trust", some([False, True], [False]))
def test_shards_with_an_index_have_the_same_tensors(trained, tmp_path, trust, monkeypatch):
    folder, summary = trained
    monkeypatch.syspath_prepend(folder)
    path = Path(summary["checkpoint"])
    export(path, tmp_path / "whole.safetensors", trust_model=trust)
    out = tmp_path / "shards/model.safetensors"
    out.parent.mkdir()
    message = export(path, out, trust_model=trust, most=1000)
    whole = load_file(tmp_path / "whole.safetensors")
    weight_map = json.loads(out.with_name(f"{out.name}.index.json").read_text())["weight_map"]
    assert weight_map.keys() == whole.keys() and not out.exists()
    assert f"in {len(set(weight_map.values()))} files" in message
    lines = [line for line in message.splitlines() if line.startswith(("from ", "state = "))]
    scope: dict = {}
    exec("\n".join(lines), scope)
    assert scope["state"].keys() == whole.keys()
    assert all(torch.equal(scope["state"][name], whole[name]) for name in whole)


def test_an_export_needs_less_memory_than_the_model(tmp_path, monkeypatch):
    """Count the bytes that are allocated while two nodes of 8 MB are averaged."""
    shapes = ((1000, 1000), (1000, 1000))
    rng = np.random.default_rng(0)
    states = [
        NodeState(rng.standard_normal(2_000_000, "f4"), ("a", "b"), shapes, {}, {"index": 0})
        for _ in range(2)
    ]
    temporary = checkpoint.begin(tmp_path, 0)
    entries = [checkpoint.write_node(temporary, k, state) for k, state in enumerate(states)]
    path = checkpoint.commit(temporary, tmp_path, 0, entries, "", {})
    monkeypatch.setattr(model_export, "PIECE", 1 << 15)
    monkeypatch.setattr(manifest, "LARGEST", 1 << 20)  # size of the buffer for reading a manifest
    tracemalloc.start()
    export(path, tmp_path / "model.safetensors", most=4_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000  # a buffer for checksums has 0.5 MB
    with safe_open(tmp_path / "model-00002-of-00002.safetensors", "np") as file:
        mean = np.mean([s.parameters[1_000_000:] for s in states], 0, np.float64)
        assert (file.get_tensor("b").ravel() == mean.astype(np.float32)).all()


def test_nodes_with_different_buffers_are_exported_one_by_one(tmp_path):
    states = [
        NodeState(
            np.ones(2, "f4"), ("a",), ((2,),), {"buffers/0/queue": np.ones(3 + k)}, {"index": 0}
        )
        for k in range(2)
    ]
    temporary = checkpoint.begin(tmp_path, 0)
    entries = [checkpoint.write_node(temporary, k, state) for k, state in enumerate(states)]
    path = checkpoint.commit(temporary, tmp_path, 0, entries, "", {})
    with pytest.raises(StoreError, match=naming("queue", "--node")):
        export(path, tmp_path / "model.safetensors")
    export(path, tmp_path / "model.safetensors", node=1)


def test_impossible_exports_are_rejected(trained, tmp_path, monkeypatch):
    folder, summary = trained
    path = Path(summary["checkpoint"])
    with pytest.raises(StoreError, match=naming(".safetensors, .pt", ".pth")):
        export(path, folder / "model.onnx")
    with pytest.raises(StoreError, match=naming("0 to 2")):
        export(path, folder / "model.pt", node=3)
    for name, most in (("bare.pt", None), ("one.safetensors", None), ("two.safetensors", 1000)):
        with pytest.raises(StoreError, match=naming("folder first")):
            export(path, folder / "no" / name, most=most)
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for was, now in (("self.first", "self.begin"), ("8, 3, padding=1", "8, 5, padding=2")):
        (tmp_path / "own_net.py").write_text(MODULE.replace(was, now))
        monkeypatch.delitem(sys.modules, "own_net", raising=False)
        with pytest.raises(StoreError, match=naming('"first.weight"', "(8, 1, 3, 3)")):
            export(path, folder / "model.pt", trust_model=True)


def test_xarray_opens_the_log_without_a_group(trained):
    xarray = pytest.importorskip("xarray", reason="xarray isn't installed")
    folder, _ = trained
    with xarray.open_dataset(folder / "run" / "log.h5", engine="h5netcdf") as steps:
        np.testing.assert_array_equal(steps.loss, read(folder / "run" / "log.h5").steps["loss"])
        assert steps.loss.attrs["units"] == "nat" and steps.loss.attrs["long_name"]
        steps.to_netcdf(folder / "log.nc")  # in place of `log export --netcdf`
    with xarray.open_dataset(folder / "log.nc") as steps:
        assert steps.loss.dims == ("step", "node") and "own_net" in steps.attrs["job"]
    with h5py.File(folder / "run" / "log.h5") as file:
        assert file["loss"] == file["steps/loss"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_the_values_of_the_log(trained):
    pytest.importorskip("tensorboard", reason="tensorboard isn't installed")
    folder, _ = trained
    log = read(folder / "run" / "log.h5")
    to_tensorboard(log, folder / "events")
    shown = scalars(folder / "events")
    assert [step for step, _ in shown["loss/training"]] == log.steps["step"].tolist()
    np.testing.assert_allclose(
        [value for _, value in shown["loss/training"]], log.steps["loss"].mean(1), rtol=1e-6
    )
    assert (
        len(shown["nodes/consensus_distance"])
        == np.isfinite(log.steps["consensus_distance"][:, 0]).sum()
    )
    assert shown["accuracy/test"][-1][1] == pytest.approx(log.evaluations["accuracy"][-1])


class Page(HTMLParser):
    """Opened and closed tags, and addresses that would be loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.outside = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_one_page_has_everything_and_loads_nothing(trained):
    folder, summary = trained
    finding = {"name": "cores", "text": "1 of <64>", "level": "wrong", "remedy": "--cpu-bind=none"}
    (folder / "run" / "doctor.json").write_text(json.dumps({"findings": [finding], "wrong": []}))
    write([folder / "run", folder / "run" / "log.h5"], folder / "page.html")
    text = (folder / "page.html").read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.outside == []
    for part in (
        f"{summary['accuracy']:.4f}",
        summary["digest"][:16],
        "1 of &lt;64&gt;",
        "--cpu-bind=none",
        "own_net:Net",
        torch.__version__,
        "the same job",
        "data:image/png;base64,",
    ):
        assert part in text
    assert len(re.findall("<h2>", text)) == 6
    with pytest.raises(StoreError, match=naming("doesn't exist")):
        write([folder / "none"], folder / "no.html")
    (folder / "run" / "doctor.json").write_text("{")
    with pytest.raises(StoreError, match=naming("doctor.json")):
        write([folder / "run"], folder / "no.html")


@pytest.mark.parametrize("name", ['a"b', "a\\n", "it's é", "a b"])
def test_the_lines_that_load_a_model_quote_its_path(name):
    def texts(line: str) -> list[str]:
        """Return the constants in a line of Python that are texts."""
        return [
            node.value
            for node in ast.walk(ast.parse(line))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]

    for suffix in (".safetensors", ".pt"):
        path = Path(f"{name}{suffix}")
        assert texts(model_export._three_lines([path], True)[-1]) == [str(path)]
    shards = [Path(f"{name}-{part:05d}-of-00002.safetensors") for part in (1, 2)]
    *_, state, _ = model_export._three_lines([*shards, Path("index.json")], True)
    assert texts(state) == [f"{name}-*-of-*.safetensors"]
