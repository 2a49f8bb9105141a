"""Output files of commands: on a full disk, no incomplete file gets its final name."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.runs import start_and_resume
from mpigossip.store import StoreError
from mpigossip.store.hdf5 import replacing
from mpigossip.store.log import Log
from mpigossip.store.log_export import to_csv
from mpigossip.training import assemble
from tests.cases import naming
from tests.launch import environment, warmed

REPO = Path(__file__).resolve().parents[2]
COMMANDS = {
    "graph draw ring --nodes 4 --out OUT.png": "OUT.png",
    "graph search --nodes 6 --degree 2 --seconds 0.1 --out OUT.json": "OUT.json",
    "plan JOB --nodes 2 4 --out OUT.png": "OUT.png",
    "log plot run --out OUT.png": "OUT.png",
    "log export run --csv OUT.csv": "OUT.csv",
    "report run --html OUT.html": "OUT.html",
    "checkpoint export run --out OUT.safetensors": "OUT.safetensors",
    "checkpoint export run --out OUT.pt": "OUT.pt",
}
CODE = """
import json, resource, sys
from mpigossip.cli import main
sys.dont_write_bytecode = True  # it would be truncated
for words, out in json.loads(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print("END", code, out)
"""


def test_a_full_disk_leaves_existing_files_unchanged(tmp_path):
    """Run all commands in one process, in which each may write 300 bytes."""
    settings = ["model.name=mlp", "model.hidden=[4]", "run.steps=3", "data.batch=8"]
    job = assemble.load({}, [*settings, f"run.output={tmp_path / 'run'}"])
    start_and_resume.train(job, SingleProcess(), 2)
    commands = []
    for number, (text, out) in enumerate(COMMANDS.items()):
        name = out.replace("OUT", str(number))
        words = text.replace("OUT", str(number)).replace("JOB", str(REPO / "jobs/digits.toml"))
        commands.append((words.split(), name))
        (tmp_path / name).write_text("existing content")
    before = set(tmp_path.iterdir())
    done = subprocess.run(
        warmed([sys.executable, "-c", CODE, json.dumps(commands)], {}),
        cwd=tmp_path,
        env=environment(""),
        capture_output=True,
        text=True,
        timeout=200,
    )
    ends = [line.split() for line in done.stdout.splitlines() if line.startswith("END")]
    assert [end[2] for end in ends] == [out for _, out in commands], done.stderr[-2000:]
    for (_, code, name), (words, _) in zip(ends, commands, strict=True):
        assert (tmp_path / name).read_text() == "existing content", words
        assert code not in ("0", "None"), words
    assert "Traceback" not in done.stderr and done.stderr.count("File too large") >= 5
    assert set(tmp_path.iterdir()) == before


def write(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("content")


def export(path: Path) -> None:
    to_csv(Log("", 1, {"step": []}, {"step": []}, {}, {}, {}), path)


@pytest.mark.parametrize("call", [write, export])
@pytest.mark.parametrize("name", ["", ".", "..", "/", "folder"])
def test_a_folder_is_not_an_output_file(tmp_path, monkeypatch, call, name):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with pytest.raises(StoreError, match=naming(str(Path(name)), "folder")):
        call(Path(name))
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]


@pytest.mark.parametrize("call", [write, export])
def test_pipes_and_devices_are_not_replaced(tmp_path, monkeypatch, call):
    """A process of root could otherwise replace /dev/stdout or /dev/null by a regular file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("mpigossip.store.hdf5.STREAMS", (tmp_path,))
    (tmp_path / "output").touch()
    stdout = tmp_path / "stdout"  # like /dev/stdout if it is redirected to a file
    stdout.symlink_to("output")
    for path in (pipe, stdout):
        with pytest.raises(StoreError, match=naming(path.name, "pipe", "device")):
            call(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and stdout.is_symlink()


def test_a_link_to_a_file_is_replaced(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write(tmp_path / "link")
    assert [(tmp_path / name).read_text() for name in ("link", "target")] == ["content", "old"]
