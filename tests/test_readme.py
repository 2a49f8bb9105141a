"""Every command of the README runs, in the order given, with fewer epochs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEWER = {"train": ["run.epochs=1"], "simulate": ["run.epochs=1"], "resume": ["run.epochs=2"]}


def blocks():
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands():
    lines = [line.partition("  #")[0].strip() for block in blocks() for line in block.splitlines()]
    return [line for line in lines if line.startswith(("mpigossip ", "mpirun "))]


def test_the_commands_run_as_pasted(mpirun, tmp_path):
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    done = []
    for line in commands():
        words = shlex.split(line)
        n = 0
        if words[0] == "mpirun":
            n, words = int(words[2]), words[3:]
        assert words[0] == "mpigossip"
        words = [sys.executable, "-m", *words, *FEWER.get(words[1], [])]
        ran = mpirun(n, words, timeout=120, cwd=tmp_path)
        assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
        done.append(line)
    assert len(done) >= 8 and (tmp_path / "compare.png").exists()


def test_the_scripts_of_the_readme_are_there():
    for script in re.findall(r"bash (tools/\S+\.sh)", (ROOT / "README.md").read_text()):
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def test_the_job_file_of_the_readme_is_a_job(tmp_path):
    from mpigossip.training.setup import load

    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    job = load(text)
    assert job.model.name == "lenet" and job.graph.options["order"] == "cyclic"


@pytest.mark.parametrize("kind", ["graph", "algorithm"])
def test_the_tables_name_what_there_is(kind):
    from mpigossip import algorithms, graphs

    text = (ROOT / "README.md").read_text()
    text = re.sub(r"`base-2` … `base-5`", "`base-2` `base-3` `base-4` `base-5`", text)
    own = {"spanning-tree", "ceca"} if kind == "graph" else set()
    names = (graphs if kind == "graph" else algorithms).BUILDERS.keys() - own
    missing = [name for name in names if f"`{name}`" not in text]
    assert not missing
