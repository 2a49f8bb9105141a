"""A custom loop survives rank failures: exact values, callbacks, and rejected arguments."""

import hashlib
import re
import shlex
import sys

import numpy as np
import pytest
import torch

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.optim.state import copied, put_back
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from tests import launch, survivors
from tests.cases import every, naming, on_each

pytestmark = pytest.mark.both


N = 4
STEPS = 30


@pytest.fixture
def tolerant(mpirun, monkeypatch):
    """Run the loop on four ranks, of which `victims` are killed; return the finished process."""
    if not launch.is_open_mpi():
        pytest.skip("only Open MPI's launcher has --with-ft ulfm")
    monkeypatch.setenv("MPIGOSSIP_MPIEXEC", shlex.join([*launch.launcher(), "--with-ft", "ulfm"]))

    def run(victims, *more):
        command = [sys.executable, launch.REPO / "tests/victim.py", survivors.SCRIPT]
        words = ["--steps", STEPS, "--evaluate-every", 10, *more]
        plan = " ".join(f"{rank}@{at}" for rank, at in victims.items())
        done = mpirun(N, [*command, *words], 120, env={"VICTIMS": plan})
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


@pytest.mark.parametrize(
    "victims",
    [
        {2: "7"},  # inside the exchange of a step, which is repeated unless its message was sent
        every({0: "5", 3: "21"}),  # rank 0, and later another rank
        {1: "10g"},  # inside averaged(), after step 10: the next step continues without the rank
        {0: "3", 1: "3", 2: "3"},  # all ranks but one
    ],
)
def test_survivors_have_the_exact_values(tolerant, victims):
    done = tolerant(victims)
    lost = survivors.lost(done.stderr)
    steps = {rank: step for names, step in lost for rank in names}
    assert steps.keys() == victims.keys(), done.stderr
    assert all(0 <= steps[r] - int(at.rstrip("g")) <= 1 for r, at in victims.items()), done.stderr
    assert survivors.digests(done.stdout) == survivors.expected(N, STEPS, lost), done.stderr
    assert f"of {N - len(victims)}: " in done.stdout
    assert done.stdout.count(f"step {STEPS}: ") == 1


@pytest.mark.parametrize("folder", [False, True])
def test_a_rank_behind_finished_ranks_ends_alone(tolerant, tmp_path, folder):
    """Rank 2 is killed before it sends its last message to rank 0; ranks 1 and 3 exchange."""
    for attempt in range(3):
        out = tmp_path / str(attempt)
        done = tolerant({2: f"{STEPS - 1}s"}, *(["--out", out] if folder else []))
        if "3 nodes continue" not in done.stderr:
            break
    else:
        pytest.skip("in three attempts, the other ranks noticed the failure before their last step")
    result = survivors.digests(done.stdout)
    whole = survivors.expected(N, STEPS)
    assert [result[1], result[3]] == [whole[1], whole[3]], done.stderr
    first = survivors.after(N, STEPS - 1)[0]
    first.step(0, N - 1, STEPS - 1)
    assert result[0] == first.digest(), done.stderr
    assert "left their loops" in done.stderr
    if folder:  # all three survivors have completed the run directory
        log = read(out / "log.h5")
        path = checkpoint.latest(out)
        assert (path.name, log.summary["nodes"]) == (f"step-{STEPS:08d}", N - 1)
        assert log.steps["step"].tolist() == list(range(STEPS)) and not checkpoint.verify(path)
        states = [checkpoint.read_node(path, node).parameters for node in range(N - 1)]
        written = [hashlib.sha256(state.tobytes()).hexdigest() for state in states]
        assert written == [result[name] for name in sorted(result)]


@pytest.mark.parametrize(
    "victims",
    [
        {0: "7", 3: "24"},  # rank 0, which writes log and manifest, and later another rank
        every({2: "10g"}),  # inside averaged(), so that save() is skipped at this step
        every({0: "20c"}),  # while a checkpoint is written
    ],
)
def test_a_run_continues_with_log_and_checkpoints(tolerant, mpirun, tmp_path, victims):
    done = tolerant(victims, "--out", tmp_path)
    left = N - len(victims)
    lost = survivors.lost(done.stderr)
    wanted = survivors.expected(N, STEPS, lost)
    assert survivors.digests(done.stdout) == wanted, done.stderr
    log = read(tmp_path / "log.h5")
    path = checkpoint.latest(tmp_path)
    assert log.steps["step"].tolist() == list(range(STEPS))
    assert not np.isnan(log.steps["loss"]).all(axis=1).any(), "a step that nobody has logged"
    after = log.steps["loss"][lost[-1][1] :]
    assert np.isfinite(after[:, :left]).all() and np.isnan(after[:, left:]).all()
    assert all(f"rank {rank} on" in log.summary["lost"] for rank in victims)
    assert (path.name, log.summary["nodes"]) == (f"step-{STEPS:08d}", left)
    manifest = checkpoint.read_manifest(path)
    assert (manifest.n, manifest.meta["asked"]) == (left, N) and not checkpoint.verify(path)
    assert log.summary["digest"] == checkpoint.digest(path)

    words = ["--steps", STEPS + 10, "--evaluate-every", 10, "--out", tmp_path]
    again = mpirun(left, [sys.executable, survivors.SCRIPT, *words])
    assert again.returncode == 0, again.stderr[-3000:]
    assert read(tmp_path / "log.h5").summary["lost"] == log.summary["lost"]
    longer = survivors.expected(N, STEPS + 10, lost)
    result = survivors.digests(again.stdout)
    assert [result[node] for node in range(left)] == list(longer.values()), again.stdout


def test_the_survivors_write_the_end_of_a_run(tolerant, tmp_path):
    """Rank 0 is killed after the last checkpoint is complete, before the summary."""
    done = tolerant({0: "end"}, "--out", tmp_path)
    assert survivors.digests(done.stdout) == survivors.expected(N, STEPS)
    log = read(tmp_path / "log.h5")
    path = checkpoint.latest(tmp_path)
    assert re.search(naming("failed", f"step {STEPS}", "3 nodes end"), done.stderr)
    assert log.steps["step"].tolist() == list(range(STEPS))
    assert (log.summary["finished"], log.summary["nodes"]) == (1, N - 1)
    assert "rank 0 on" in log.summary["lost"] and checkpoint.read_manifest(path).n == N - 1
    assert log.summary["digest"] == checkpoint.digest(path)


def test_without_a_rank_failure_the_loop_is_like_any_other(pooled):
    done = pooled(3, survivors.SCRIPT, "--steps", STEPS, "--evaluate-every", 10)
    assert done.returncode == 0, done.stderr[-3000:]
    assert survivors.digests(done.stdout) == survivors.expected(3, STEPS)
    assert "run.survive = true: MPI was not started" in done.stderr


class Four(SingleProcess):
    """World of four ranks, for checks that come before any communication."""

    size = 4


def refused(world=None, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(JobError) as caught:
        mpigossip.Gossip(world or Four(), model, optimizer, **options)
    return str(caught.value)


def test_arguments_that_do_not_go_with_survive_are_rejected():
    networkx = pytest.importorskip("networkx")
    said = refused(survive=True)
    assert "survive = True" in said and "not None" in said and "on_change=function" in said
    assert "with survive = True only" in refused(on_change=print)
    both = {"survive": True, "on_change": print}
    assert "one node fewer" in refused(graph="one-peer-hypercube", **both)
    assert "graph object" in refused(graph=networkx.cycle_graph(4), **both)
    assert 'node.mixer = "synchronous"' in refused(mixer="asynchronous", **both)


@on_each("name", ["SGD", "AdamW", "Adagrad", "NAdam", "ASGD"])
def test_an_undone_step_leaves_no_trace_in_the_optimizer(name):
    """The state is copied after two steps; the third step, which is undone, has a new gradient."""
    torch.manual_seed(0)
    some, late = (torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2))
    options = {"momentum": 0.9} if name == "SGD" else {}
    inner = getattr(torch.optim, name)([some, late], lr=0.1, **options)
    gradients = torch.randn(4, 5, 3)
    spare = []
    for k in range(2):
        some.grad = gradients[k].clone()
        inner.step()
        spare = copied(inner, spare)
    kept = spare
    before = some.detach().clone()
    known = late in inner.state
    after = []
    for _ in range(2):
        some.grad = gradients[2].clone()
        late.grad = gradients[3].clone()
        inner.step()
        after.append(some.detach().clone())
        put_back(inner, kept)
        late.grad = None
        assert (late in inner.state) is known
        some.data.copy_(before)
    assert torch.equal(*after)
