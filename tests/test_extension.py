"""User code outside the package: graph, algorithm, model, data and hook."""

import copy
import re
from dataclasses import replace

import networkx
import numpy as np
import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.engine.vector import scatter_row
from mpigossip.runs import start_and_resume
from mpigossip.store import checkpoint
from mpigossip.store.log import read
from mpigossip.training import assemble
from tests.cases import naming, on_each
from tests.jobs import train

OWN = '''
import numpy as np
import torch
from torch import nn

from typing import NamedTuple

from mpigossip.algorithms import Algorithm
from mpigossip.data.sources import Source
from mpigossip.runs.hooks import Hook


class State(NamedTuple):
    momentum: torch.Tensor


class Exact(NamedTuple):
    momentum: torch.Tensor
    steps: torch.Tensor


def heavy_ball(local, *, beta=0.9):
    """x <- W (x - lr m), m <- beta m + g: momentum stays at home."""

    def init(x):
        return State(torch.zeros_like(x))

    def send(x, g, state, out, step):
        state.momentum.mul_(beta).add_(g)
        torch.add(x, state.momentum, alpha=-step.lr, out=out[0])
        return state

    def receive(x, g, state, sent, mixed, step):
        x.copy_(mixed[0])
        return state

    return Algorithm(init, send, receive)


def exact_heavy_ball(local, *, beta=0.9):
    """The same with a momentum of float64, and one number per row."""

    def init(x):
        return Exact(torch.zeros_like(x, dtype=torch.float64), torch.zeros(len(x), 1).double())

    def send(x, g, state, out, step):
        state.momentum.mul_(beta).add_(g, alpha=1 / 3)
        state.steps.add_(1)
        torch.sub(x, (step.lr * state.momentum).float(), out=out[0])
        return state

    def receive(x, g, state, sent, mixed, step):
        x.copy_(mixed[0])
        return state

    return Algorithm(init, send, receive)


def net(shape, classes, *, width=16):
    return nn.Sequential(nn.Linear(shape[0], width), nn.Tanh(), nn.Linear(width, classes))


class Points(Source):
    """Two noisy rings of points."""

    classes, shape = 2, (2,)

    def __init__(self, data, seed):
        draw = np.random.default_rng(seed)
        self.labels_ = np.arange(data.samples + data.test_samples) % 2
        angle = draw.uniform(0, 2 * np.pi, len(self.labels_))
        radius = 1 + self.labels_ + 0.1 * draw.standard_normal(len(angle))
        self.points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
        self.train_labels = self.labels_[: data.samples]
        self.test_labels = self.labels_[data.samples :]

    def raw(self, split, indices, key=()):
        shift = 0 if split == "train" else len(self.train_labels)
        return self.points[indices + shift].astype(np.float32)

    def finish(self, raw, labels):
        return raw, labels


SEEN = []


class Spy(Hook):
    def __init__(self, world):
        self.rank = world.rank

    def step(self, progress, record):
        SEEN.append((self.rank, record.index, float(record.loss.mean())))

    def stop(self, progress, summary):
        SEEN.append(summary["accuracy"])


def wrong(*anything):
    return 3


three = 3


class Plain(torch.utils.data.Dataset):
    """A data set of torch, as tutorials have them."""

    def __len__(self):
        return 64


def frozen(shape, classes):
    return net(shape, classes).requires_grad_(False)


class Scores(NamedTuple):
    logits: torch.Tensor


class Named(nn.Linear):
    """Gives its scores by name, as models of transformers do."""

    def __init__(self, shape, classes):
        super().__init__(shape[0], classes)

    def forward(self, x):
        return Scores(super().forward(x))


class Twice(Named):
    """Gives two tensors, which only a task of one's own can use."""

    def forward(self, x):
        return x, x


def own_needs(path):
    return path


def demanding(local):
    return heavy_ball(local)._replace(needs=frozenset({"doubly", "unsigned"}))


def configured(config, *rest):
    return nn.Linear(config.hidden_size, 2)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Make the user's module importable, as PYTHONPATH does."""
    import sys

    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "wrong.py").write_text("import os\nos.nothing")
    (tmp_path / "typo.py").write_text("def net(:")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


def job(folder, **sections):
    graph = networkx.petersen_graph()
    networkx.write_graphml(graph, folder / "petersen.graphml")
    settings = {
        "run": {"output": str(folder / "run"), "epochs": 12},
        "data": {"source": "mine:Points", "samples": 640, "test_samples": 100, "batch": 8},
        "model": {"name": "mine:net", "width": 24},
        "algorithm": {"name": "mine:heavy_ball", "beta": 0.8},
        "graph": {"name": f"file:{folder / 'petersen.graphml'}", "weights": "metropolis-hastings"},
        "schedule": {"lr": 0.4},
        "log": {"hooks": ["mine:Spy"]},
    }
    return assemble.load(settings | sections)


def test_all_custom_parts_at_once(own):
    """A job that takes only the mixing from the package trains, and resumes bitwise identically."""
    summary = train(job(own), 10)
    assert summary["accuracy"] > 0.95 and summary["nodes"] == 10
    import mine

    assert mine.SEEN[0][:2] == (0, 0) and mine.SEEN[-1] == summary["accuracy"]
    assert len(mine.SEEN) == 1 + summary["steps"]
    half = train(job(own, run={"output": str(own / "cut"), "epochs": 12, "steps": 40}), 10)
    with SingleProcess() as alone:
        again = start_and_resume.resume(own / "cut", ["run.steps=none"], alone, None)
    assert half["steps"] == 40 and again["digest"] == summary["digest"]
    assert "beta = 0.8" in read(own / "run" / "log.h5").job


@on_each("slots", [1, 2])
def test_a_momentum_of_float64_resumes_bitwise(own, slots):
    """Each slot of a node has a shard of the momentum, and all shards are saved."""

    def made(folder, **run):
        run = {"output": str(own / f"{folder}-{slots}"), "epochs": 1} | run
        # 3 * 300 + 302 parameters: the second slot has a part of them
        return job(
            own,
            run=run,
            node={"devices": f"cpu:{slots}"},
            model={"name": "mine:net", "width": 300},
            algorithm={"name": "mine:exact_heavy_ball"},
            graph={"name": "ring"},
            data={"source": "mine:Points", "samples": 96, "test_samples": 8, "batch": 8},
        )

    whole = train(made("whole"), 2)
    cut = made("cut", steps=3)
    train(cut, 2)
    saved = checkpoint.read_node(checkpoint.latest(cut.run.folder), 0)
    assert saved.arrays["state/momentum"].shape == saved.parameters.shape
    assert saved.arrays["state/momentum"].dtype == np.float64
    assert saved.arrays["state/steps"].tolist() == [3.0]
    with SingleProcess() as alone:
        again = start_and_resume.resume(cut.run.folder, ["run.steps=none"], alone, None)
    assert again["digest"] == whole["digest"]


def test_a_state_of_float64_that_was_saved_with_padding_is_loaded(own):
    """Earlier versions saved such an array as the whole row of the flat parameters."""

    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, mpigossip.Gossip(SingleProcess(), model, inner, "mine:exact_heavy_ball")

    def train_steps(model, gossip, count):
        for _ in range(count):
            gossip.zero_grad()
            model(torch.ones(5, 4)).square().mean().backward()
            gossip.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    model, gossip = made()
    train_steps(model, gossip, 2)
    state = copy.deepcopy(gossip.state_dict())
    flat = gossip.vector.flat
    padded = torch.zeros(flat.size, dtype=torch.float64)
    flat.unpack(state["gossip"]["arrays"]["state/momentum"], padded)
    assert padded.shape != state["gossip"]["arrays"]["state/momentum"].shape
    state["gossip"]["arrays"]["state/momentum"] = padded
    wanted = train_steps(model, gossip, 2)
    again, resumed = made()
    resumed.load_state_dict(state)
    assert torch.equal(train_steps(again, resumed, 2), wanted)
    parts = gossip.engine.parts()["state/momentum"]
    with pytest.raises(ValueError, match=naming("512", "23")):
        scatter_row(np.zeros(512), parts, 0, replace(flat, size=1024, slots=2))


GRAPHS = "tests.graphs.test_networks"
ROUNDS = [
    {"name": f"{GRAPHS}:pairs"},
    {"name": f"{GRAPHS}:drawn", "degree": 1, "seed": 5},
    {"name": f"{GRAPHS}:warming", "degree": 2, "lazy": True},
]


def with_rounds(folder, graph, **run):
    run = {"output": str(folder), "epochs": 1} | run
    sections = {"data": {"batch": 8, "samples": 480}, "model": {"name": "mlp", "hidden": [16]}}
    return assemble.load(sections | {"graph": graph, "run": run})


def on_ranks(comm, folder, stop):
    from mpigossip.cluster.mpi_world import MPIWorld

    digests = []
    for k, graph in enumerate(ROUNDS):
        with MPIWorld(comm) as world:
            if stop:
                start_and_resume.train(with_rounds(folder / f"{k}", graph, steps=7), world)
        with MPIWorld(comm) as world:
            digests.append(
                start_and_resume.resume(folder / f"{k}", ["run.steps=none"], world, None)
            )
    return [each.get("digest") for each in digests]


@pytest.mark.every
def test_a_custom_graph_trains_in_jobs_and_resumes(ranks, tmp_path, one_thread):
    """Each round is made by a function; ranks equal the simulator bitwise, also after a resume."""
    with SingleProcess() as alone:
        wanted = [
            start_and_resume.train(with_rounds(tmp_path / f"s{k}", graph), alone, 3)["digest"]
            for k, graph in enumerate(ROUNDS)
        ]
    assert len(set(wanted)) == 3
    assert ranks(3)(on_ranks, tmp_path, True, timeout=180)[0] == wanted


def varying_loop(comm, kind, scale=1):
    """Make six steps on rows of custom code, and the same by numpy; or return the error."""
    from tests.graphs.examples import A, B, drawn

    graphs = {
        "tabulated": mpigossip.graph(lambda t: [A, B][t % 2], 3, period=2),
        "named": f"{GRAPHS}:drawn",
        "by rank": mpigossip.graph([A, B] if comm.rank else [B, A], 3),
        "function": lambda n, seed, t: A,
    }
    options = {"degree": 1, "seed": 3} if kind == "named" else {}
    model = torch.nn.Linear(3, 1, bias=False)
    with mpigossip.world() as world:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            gossip = mpigossip.Gossip(world, model, optimizer, graph=graphs[kind], **options)
        except JobError as error:
            return str(error)
        x = np.zeros((3, 3), np.float32)
        with torch.no_grad():
            model.weight.zero_()
        for t in range(6):
            gossip.zero_grad()
            model.weight.grad = -torch.eye(3)[comm.rank : comm.rank + 1]
            gossip.step()
            x += np.eye(3, dtype=np.float32)
            x = (drawn(3, 3, t) if kind == "named" else [A, B][t % 2]) @ x
        return model.weight.detach().numpy()[0], x[comm.rank]


def test_a_time_varying_graph_in_a_custom_loop(ranks):
    pool = ranks(3)
    for kind in ("tabulated", "named"):
        for got, wanted in pool(varying_loop, kind, timeout=180):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, err_msg=kind)
    for kind, says in [
        ("by rank", "graph.name = .* 64 rounds"),
        ("function", "period="),
    ]:
        for said in pool(varying_loop, kind, timeout=180):
            assert re.search(says, said), said


def too_late(comm, folder):
    from mpigossip.cluster.mpi_world import MPIWorld

    job = with_rounds(folder, {"name": f"{GRAPHS}:growing", "degree": 1}, epochs=9)
    try:
        with MPIWorld(comm) as world:
            start_and_resume.train(job, world)
    except ValueError as error:
        return str(error)


def test_a_round_of_more_neighbours_than_stated_is_not_sent(ranks, tmp_path):
    for said in ranks(3)(too_late, tmp_path, timeout=180):
        assert re.search(naming("round 70", "degree = 1"), said)
    assert read(tmp_path / "log.h5").steps["loss"].shape[0] <= 70


@pytest.mark.parametrize(
    "sections, says",
    [
        ({"algorithm": {"name": "mine:heavy_bal"}}, ("mine", "heavy_bal")),
        ({"algorithm": {"name": "mine:heavy_ball", "betta": 1}}, ("algorithm.betta", "beta")),
        ({"algorithm": {"name": "mine:three"}}, ("mine:three", "type int")),
        ({"algorithm": {"name": "mine:demanding"}}, ("needs", '"unsigned"')),
        ({"algorithm": {"name": "nowhere:thing"}}, ("nowhere", "imported")),
        ({"model": {"name": "wrong:net"}}, ("AttributeError", "wrong.py:2", "'os'")),
        ({"data": {"source": "typo:data"}}, ("SyntaxError", "typo.py, line 1")),
        ({"data": {"source": "mine:wrong"}}, ("returned int", "mpigossip.data.sources.Source")),
        ({"data": {"source": "mine:Plain"}}, ("returned Plain", "mpigossip.data.sources.Source")),
        ({"data": {"source": "mine:three"}}, ("mine:three", "type int")),
        ({"data": {"source": "mine:own_needs"}}, ("1 positional", "mpigossip.data.sources.Source")),
        ({"model": {"name": "mine:wrong"}}, "returned int"),
        ({"model": {"name": "mine:frozen"}}, ("no parameter", "requires_grad_()")),
        ({"model": {"name": "mine:Twice"}}, ("tuple", "(1, 2)", "`.logits`")),
        ({"model": {"name": "mine:configured"}}, ("mine:configured", "'hidden_size'")),
        ({"log": {"hooks": ["mine:wrong"]}}, ("returned int", "mpigossip.runs.hooks.Hook")),
        ({"log": {"hooks": ["tensorbord"]}}, ("tensorbord", "tensorboard")),
    ],
)
def test_an_invalid_part_is_named_with_the_expected_form(own, sections, says):
    with pytest.raises(JobError, match=naming(says)):
        train(job(own, **sections), 10)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_while_the_run_goes_on(own):
    from tests.runs.events import scalars

    pytest.importorskip("tensorboard", reason="tensorboard isn't installed")
    summary = train(job(own, log={"hooks": ["tensorboard"]}), 10)
    shown = scalars(own / "run" / "tensorboard")
    assert len(shown["loss/training"]) == summary["steps"]
    assert shown["accuracy/test"][-1][1] == pytest.approx(summary["accuracy"])
    log = read(own / "run" / "log.h5")
    np.testing.assert_allclose(
        [value for _, value in shown["loss/training"]], log.steps["loss"].mean(1), rtol=1e-5
    )
