"""The command line: digests of simulated and real ranks, rejections, exit codes."""

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from unittest.mock import patch

import h5py
import pytest

from mpigossip import cli
from mpigossip.cluster.world import SingleProcess
from mpigossip.config.errors import Failure
from mpigossip.config.readable import print_safe
from mpigossip.graphs.search import search
from tests.cases import every, naming, on_each
from tests.store.examples import folder_of_images

JOB = str(Path(__file__).parents[1] / "jobs" / "digits.toml")
SHORT = ["run.steps=6", "data.batch=4"]
MAIN = [sys.executable, "-m", "mpigossip"]


def test_train_leaves_the_number_of_nodes_to_the_launcher(pooled):
    done = pooled(2, "train", JOB, "--nodes", "4")
    assert done.returncode == 2 and done.stderr.count("mpigossip: --nodes 4 needs --dry-run") == 1
    assert "mpirun -n 4" in done.stderr and "simulate" in done.stderr
    assert pooled(2, "train", JOB, "--dry-run").stdout.count("# planned for 2 nodes") == 1


def digest(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search(r"^digest +([0-9a-f]{64})$", done.stdout, re.MULTILINE)[1]


@pytest.mark.both
@pytest.mark.parametrize(
    "n, settings",
    [
        every(1, []),
        (2, ["node.devices=cpu:2", "node.same_host=put"]),
        every(3, ["graph.name=ring", "algorithm.name=dsgd"]),
        every(4, ["graph.name=exponential", "node.same_host=put"]),
        every(6, ["algorithm.name=parallel", "graph.name=complete"]),
        (3, ["algorithm.name=parallel", "graph.name=complete"]),
    ],
)
def test_simulate_and_ranks_print_the_same_digest(pooled, alone, tmp_path, n, settings):
    settings = [*SHORT, *settings]
    simulated = alone("simulate", JOB, "--nodes", n, *settings)
    real = pooled(n, "train", JOB, *settings, timeout=120)
    assert digest(simulated) == digest(real)
    anyone = hashlib.sha256()  # the same as without this package
    for path in sorted(tmp_path.glob("runs/digits/checkpoints/*/node-*.h5")):
        with h5py.File(path) as file:
            anyone.update(file["parameters"][()].tobytes())
    assert anyone.hexdigest() == digest(real)


@pytest.mark.both
def test_a_run_that_stopped_resumes_under_mpirun(mpirun, pooled, alone, tmp_path):
    whole = alone("simulate", JOB, "--nodes", 2, *SHORT, "run.output=whole")
    cut = [*SHORT, "run.output=cut", "run.steps=4"]
    assert pooled(2, "train", JOB, *cut).returncode == 0
    again = mpirun(2, [*MAIN, "resume", "cut", "run.steps=6"], timeout=120, cwd=tmp_path)
    assert digest(again) == digest(whole)
    assert "resuming at step 4" in again.stdout


MISTAKES = [
    (["run.epoch=3", "graph.nme=ring", "data.batch=big"], ["epochs", "graph.n", "data.batch"]),
    (["graph.name=rign"], ['did you mean "ring"']),
    (["algorithm.name=parallel"], ['graph.name = "one-peer-exponential"', "complete"]),
    (["data.source=missing.h5"], ["missing.h5", "data pack"]),
    (["data.source=JOB"], ["digits.toml"]),
    (["graph.name=one-peer-hypercube"], ["power of two", "3", "base-2"]),
    (["data.batch=999"], ["999", "fewer nodes"]),
    (["graph.name=file:none.json"], ["none.json"]),
]


@on_each(("words", "says"), MISTAKES)
def test_a_user_error_is_one_paragraph_and_exit_code_2(alone, words, says):
    words = [word.replace("JOB", JOB) for word in words]
    done = alone("simulate", JOB, "--nodes", 3, *SHORT, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    for text in says:
        assert text in done.stderr


@pytest.mark.every
@pytest.mark.both
@pytest.mark.parametrize("words, says", [MISTAKES[0], MISTAKES[5], MISTAKES[3]])
def test_all_ranks_end_with_a_user_error_and_one_prints_it(mpirun, tmp_path, words, says):
    done = mpirun(3, [*MAIN, "train", JOB, *SHORT, *words], timeout=60, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("mpigossip:") == 1
    for text in says:
        assert text in done.stderr


DRY = ["simulate", JOB, "--nodes", "4", "--dry-run"]
PLAN = ["plan", JOB, "--nodes", "4", "--compute", "1ms", "--latency", "1us"]
PLAN += ["--bandwidth", "1GB/s", "--seconds", "0"]
SEARCH = ["graph", "search", "--nodes", "8", "--out", "g.json"]


@on_each(
    ("words", "says"),
    [
        (["train", "nowhere.toml"], "nowhere.toml"),
        (["resume", "nowhere"], "nowhere"),
        (["resume", "."], "no complete checkpoint"),
        (["resume", ".", "--nodes", "3"], "--nodes 3 needs --simulate"),
        (["simulate", JOB, "--nodes", "0"], "at least 1"),
        (["simulate", JOB, "--nodes", "2000"], "2000"),
        (["log", "show", "nowhere"], 'no run "nowhere"; `mpigossip train'),
        (["study", ".."], ".. is a folder"),
        (["examples", "copy", "gpt", "--to", JOB], "this name exists"),
        (["doctor", "--devices", "gpu"], 'argument --devices: "gpu": must be "auto"'),
        (["plot", "runs/digits"], "did you mean `mpigossip log plot`?"),
        (["members"], "did you mean `mpigossip join`?"),
        (["simulat", JOB], 'did you mean "simulate"?'),
        (["log", "plot", JOB], "digits.toml"),
        (["data", "show", JOB], "digits.toml"),
        (["data", "pack", "nowhere", "out.h5"], "nowhere"),
        (["checkpoint", "show", "nowhere"], "nowhere"),
        (["checkpoint", "verify", "."], "neither a checkpoint"),
        (["graph", "show", "rnig", "--nodes", "4"], "ring"),
        (["graph", "show", "ring", "--nodes", "0"], "at least 1"),
        (["train", JOB, "--frobnicate"], "frobnicate"),
        (["graph", "show", "ring"], "--nodes"),
        (["graph", "show", "ring", "--nodes", "8", "--option", "n=4"], "unknown key"),
        (
            ["graph", "show", "spanning-tree", "--nodes", "8", "--option", "children=0"],
            "at least 1",
        ),
        (["graph", "show", "ring", "--nodes", "8", "--parameters", "0"], "at least 1"),
        (["graph", "compare", "--nodes", "0"], "at least 1"),
        (["graph", "compare", "--nodes", "8", "--weights", "foo"], '"foo" are unknown'),
        (["graph", "draw", "ring", "--nodes", "8", "--out", "no/x.png"], "can't be written"),
        (
            ["graph", "search", "--nodes", "8", "--degree", "4", "--out", "a.txt"],
            "use the suffix .json",
        ),
        (["graph", "search", "--nodes", "8", "--degree", "4", "--out", "no/a.json"], "no folder"),
        (["train", JOB, "--dry-run", "--nodes", "0"], "at least 1"),
        ([*DRY, "task.name=quadratics"], 'means model.name = "point"'),
        ([*DRY, "task.name=factorization"], 'means data.source = "factorization"'),
        ([*DRY, "algorithm.name=os:system"], "algorithm.name"),
        ([*DRY, "algorithm.name=json:dumps", "local.name=none"], "must return"),
        ([*DRY, "local.options=3"], "local.options"),
        (["simulate", JOB, "--nodes", "10000000000", "--dry-run"], "at most 65536"),
        ([*PLAN, "--save", "nowhere/x.json"], "make its folder first"),
        ([*PLAN[:-1], "nan"], "at most"),
        ([*PLAN, "--period", "0"], "at least 1"),
        ([*DRY, "schedule.lr=1e-320"], "1e-15"),
        ([*DRY, "algorithm.weight_decay=1e308"], "at most 1e9"),
        ([*DRY, "data.batch=2147483648"], "at most 10^7"),
        ([*DRY, "data.workers=2147483648"], "at most 1024"),
        ([*DRY, "node.threads=10000000"], "at most 1024"),
        (
            [*DRY, "data.source=synthetic", "model.name=mlp", "data.shape=[1000000,1000000,1]"],
            "shape of the samples",
        ),
        (
            [
                *DRY,
                "model.name=mlp",
                "model.hidden=[1000000000]",
                "data.source=synthetic",
                "data.shape=[10000]",
            ],
            "model.hidden",
        ),
        ([*DRY, "data.samples=1000000000000"], "at most 10^9"),
        ([*DRY, "data.context=100000000000000000"], "at most 10^9"),
        ([*DRY, "run.epochs=9000000000000000000"], "at most 10^9"),
        ([*DRY, "algorithm.name=cpsgd", "cadence.period=9000000000000000000"], "at most 10^6"),
        ([*DRY, "graph.slack=1e-264"], "1e-9"),
        ([*DRY, "model.hidden=[-3]"], "model.hidden"),
        ([*DRY, "model.name=gpt", "model.layers=-1"], "model.layers"),
        ([*DRY, "data.source=quadratics", "data.dimension=-3"], "data.dimension = -3"),
        (["bench", "exchange", "--seconds", "nan"], "at most"),
        (["bench", "exchange", "--sizes", "infMB"], "--sizes"),
        ([*SEARCH, "--degree", "10000000000"], "at most 7"),
        ([*SEARCH, "--edges", "29"], "at most 28"),
        ([*SEARCH, "--degree", "3", "--seconds", "nan"], "at most"),
        (["graph", "show", "ring", "--nodes", "8", "--seed", "-1"], "at least 0"),
        (["graph", "show", "ring", "--nodes", "8", "\x1b[31m"], r"arguments: \x1b[31m"),
    ],
)
def test_wrong_words_and_values_are_explained(alone, words, says):
    done = alone(*words)
    assert done.returncode == 2, done
    assert says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("why", ["", "Unable to allocate 3.64 TiB"])
def test_a_lack_of_memory_is_reported_in_a_sentence(why, monkeypatch, capsys):
    def fail(*_, **__):
        raise MemoryError(*filter(None, [why]))

    monkeypatch.setattr("mpigossip.training.assemble.load", fail)
    assert cli.main(DRY) == 2
    said = capsys.readouterr().err
    assert said.startswith("mpigossip: not enough memory") and why in said
    assert ": ;" not in said and "memory: use fewer" in said.replace(f" ({why})", "")


@pytest.mark.parametrize(
    "words, code, unbuffered",
    [
        (["graph", "show", "ring", "--nodes", "8"], 1, ""),
        (["simulate", JOB, "--nodes", "2", *SHORT], 0, "1"),
    ],
)
def test_a_full_standard_output_is_reported_and_does_not_end_training(
    tmp_path, words, code, unbuffered
):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*MAIN, *words], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=env
        )
    assert done.returncode == code
    says = "mpigossip: standard output can't be written: No space left on device"
    assert done.stderr.startswith(says) and done.stderr.count("\n") == 1
    assert bool(list(tmp_path.glob("runs/*/checkpoints/step-00000006"))) == (code == 0)


def test_a_text_larger_than_the_buffer_of_a_full_standard_output_is_reported(monkeypatch, capfd):
    """The buffer drops it, so that the error does not occur again."""
    monkeypatch.setattr("mpigossip.commands.train._join", lambda options: print_safe("x" * 100_000))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(["join", "runs/big"]) == 1
    assert "standard output can't" in capfd.readouterr().err


def test_an_error_of_another_file_is_not_attributed_to_standard_output(monkeypatch, capfd):
    """The error contains no file name, as for a write to an open file."""

    def full(options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mpigossip.commands.train._join", full)
    with Path(os.devnull).open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(OSError, match=naming("No space left on device")):
            cli.main(["join", "runs/big"])
    assert "standard output" not in capfd.readouterr().err


@pytest.mark.parametrize("words", [["examples"], ["simulate", JOB, "--nodes", "2", *SHORT]])
def test_a_closed_standard_output_does_not_end_a_command(tmp_path, words):
    shell = ["bash", "-c", '"$@" >&-', "-", *MAIN, *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_characters_that_a_terminal_lacks_do_not_end_a_command(tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    words = ["plan", JOB, "--nodes", "4", "--compute", "1ms", "--latency", "1us", "--bandwidth"]
    done = subprocess.run([*MAIN, *words, "1GB/s"], capture_output=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_ends_the_command_without_an_error():
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    done = subprocess.run([*MAIN, "examples"], stdout=write, stderr=subprocess.PIPE, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def catches(pid, number):
    """Return whether a process has a handler for a signal."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> number - 1 & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_search_saves_the_best_graph_so_far(tmp_path, number):
    words = ["graph", "search", "--nodes", "16", "--degree", "4", "--seconds", "60", "--json"]
    with subprocess.Popen(
        [*MAIN, *words, "--out", "best.json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not catches(process.pid, signal.SIGTERM):  # the search has begun
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(number)
        facts = json.loads(process.communicate(timeout=90)[0])
    assert process.returncode == 0 and facts["interrupted"] and facts["seconds"] < 30
    assert json.loads((tmp_path / "best.json").read_text())["score"] == facts["score"]


def test_a_search_limited_by_evaluations_depends_on_its_seed_only(alone, tmp_path):
    words = ["graph", "search", "--nodes", "12", "--degree", "3", "--evaluations", "400"]
    assert alone(*words, "--seed", "3", "--out", "found.json").returncode == 0
    edges = json.loads((tmp_path / "found.json").read_text())["edges"]
    assert edges == [list(e) for e in search(12, degree=3, evaluations=400, seed=3).edges]


def test_a_graph_of_one_node_is_reported(capsys):
    for command in (["graph", "show", "ring"], ["graph", "compare", "ring"]):
        for nodes in (1, 2):
            assert cli.main([*command, "--nodes", str(nodes)]) == 0
            assert ("warning: --nodes 1: a single node" in capsys.readouterr().out) == (nodes == 1)


def test_graphs_are_compared_also_in_bytes(alone, tmp_path):
    words = ("graph", "compare", "ring", "one-peer-exponential", "--nodes", "8")
    plain = alone(*words).stdout
    sized = alone(*words, "--parameters", "1000").stdout
    assert "bytes" not in plain and "vectors" in plain
    heads, *rows = (line.split() for line in sized.split("\n\n")[1].splitlines())
    assert [row[heads.index("bytes")] for row in rows] == ["8000", "4000"]
    text = alone("graph", "compare", "identity", "--nodes", "8", "--json").stdout
    assert "Infinity" not in text and None in json.loads(text)[0].values()


def test_a_dry_run_prints_the_imagenet_job(alone, tmp_path):
    job = Path(JOB).with_name("imagenet-resnet50.toml")
    done = alone("train", job, "node.devices=cuda:0-7", "--dry-run", "--nodes", 32)
    assert done.returncode == 0, done.stderr
    for text in (
        "epochs = 90",
        "warmup_epochs = 5",
        "milestones = [30",
        "32 nodes x 8 slots",
        "25,557,032 parameters",
        "traffic",
        "memory",
        "largest 3.2",
    ):
        assert text in done.stdout


def test_a_dry_run_of_a_simulation_prints_the_job_and_writes_nothing(alone, tmp_path):
    words = [JOB, "--dry-run", "--nodes", 4, "run.epochs=7"]
    said = [alone(command, *words).stdout for command in ("train", "simulate")]
    assert "epochs = 7" in said[1] and "planned for 4 nodes" in said[1]
    assert max(map(len, said[1].splitlines())) <= 80
    # one difference: a real run of the same job uses the unchanged name of the folder
    assert said[1] == said[0].replace('"runs/{name}"', '"runs/digits-simulated"')
    assert not list(tmp_path.iterdir())


def test_the_imagenet_job_runs_small_on_a_packed_folder(alone, tmp_path):
    """The original ImageNet pipeline at 224x224: JPEGs, decoding processes, resized crops."""
    folder_of_images(tmp_path / "images", "val", sides=(240, 260), count=3, suffix="jpg")
    assert alone("data", "pack", "images", "i.h5").returncode == 0
    job = Path(JOB).with_name("imagenet-resnet50.toml")
    small = [
        "data.source=i.h5",
        "data.batch=1",
        "data.workers=1",
        "node.devices=cpu:2",
        "node.precision=fp32",
        "run.epochs=1",
        "schedule.milestones=[]",
        "model.width=8",
    ]
    done = alone("simulate", job, "--nodes", 2, *small)
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 slots" in done.stdout and "finished at step 2" in done.stdout


def test_a_finished_run_is_printed_again_and_not_trained_again(alone, tmp_path):
    first = alone("simulate", JOB, "--nodes", 2, *SHORT)
    second = alone("simulate", JOB, "--nodes", 2, *SHORT)
    assert digest(first) == digest(second) and "has ended already" in second.stdout


def test_bench_prints_and_writes_rows_and_omits_sizes_without_enough_memory(pooled, tmp_path):
    words = ["--graphs", "one-peer-hypercube", "--sizes", "1KB", "900000GB", "--seconds", "0.05"]
    done = pooled(2, "bench", "exchange", *words, "--json", "--out", "rows.h5")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["graph"] == "one-peer-hypercube" and row["bytes"] >= 1000 and row["times_limit"] > 0
    assert "left out: 900,000,000,000,000 bytes" in done.stderr
    with h5py.File(tmp_path / "rows.h5") as file:
        assert file.attrs["measured"] == "exchange" and file.attrs["ranks"] == 2
        assert file["seconds"][0] == row["seconds"] and file["seconds"].attrs["units"] == "s"


def full(comm, folder):
    """Return the message of `bench checkpoint` on a full disk."""
    from mpigossip.analysis import bench

    error = OSError(28, "No space left")
    options = Namespace(folder=folder, sizes=[1000], seconds=0)
    broken = patch.object(bench, "time_slowest", side_effect=error)
    with SingleProcess() as alone, broken, pytest.raises(Failure) as caught:
        next(bench.checkpoint(alone, options))
    return str(caught.value)


def test_bench_reports_a_missing_folder_or_a_full_disk(pooled, ranks, tmp_path):
    done = pooled(2, "bench", "checkpoint", "--folder", "none", "--sizes", "1KB")
    assert done.returncode == 2 and done.stderr.count("make its folder first") == 1, done.stderr
    assert f'--folder "{tmp_path}" on ' in (said := ranks(2)(full, tmp_path)[0])
    assert "No space left" in said and "--folder" in said


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from mpigossip.__main__ import main
sys.exit(main())
"""


@on_each("name", ["mpigossip.cli", "mpigossip.config", "numpy"])
def test_ctrl_c_during_the_imports_prints_no_traceback(name):
    program = INTERRUPTED_IMPORT.format(name=name)
    words = [sys.executable, "-c", program, "simulate", JOB, "--nodes", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "mpigossip: interrupted\n")
