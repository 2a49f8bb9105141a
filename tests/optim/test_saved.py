"""States that do not belong together, and states that state_dict() has not made."""

import contextlib
import copy
import io
import re

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster import deadline
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError, readable
from mpigossip.store import StoreError
from tests.cases import naming, on_each, with_world
from tests.optim.loops import change_arrays, make_steps, set_entry


def made(world):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, mpigossip.Gossip(world, model, optimizer, timeout_s=20.0)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()


@with_world
def load_states_of_steps(world, has):
    """Return the error of this rank before and after the first step.

    :param has: for each rank, the step whose state the rank loads
    """
    model, optimizer = made(world)
    states = [optimizer.state_dict()]
    for _ in range(2):
        train(model, optimizer, 1)
        states.append(copy.deepcopy(optimizer.state_dict()))
    results = []
    again = made(world)
    # The first pair of model and optimizer has made no step yet.
    for one, stepper in (again, (model, optimizer)):
        stepper.load_state_dict(states[has[world.rank]])
        with pytest.raises(JobError) as said:
            train(one, stepper, 1)
        results.append(str(said.value))
    return results


def test_states_of_different_steps_are_rejected_on_all_nodes(ranks):
    for early, late in ranks(2)(load_states_of_steps, (2, 1)):
        assert early == late
        assert re.search(naming("rank 0", "step 2", "rank 1", "step 1"), early)
        assert "same step" in early


# -- the state of another node ---------------------------------------------------------------------

TRAINED = {"dsgd": {}, "diloco": {"period": 1}, "dmsgd": {}}
DISTINCT = {
    "dsgt": {},
    "momentum-tracking": {},
    "d2": {"graph": "ring"},
    "detag": {},
    "sgp": {},
    "choco": {"graph": "ring", "wire": "sign"},
}
LOADED = {"own": lambda rank: rank, "of rank 0": lambda _: 0}


@with_world
def train_after_loading(world, algorithm, loaded, names_its_node):
    """Load a state and make a step, twice; return the error, or "", and the output on stderr.

    :param algorithm: name of the algorithm
    :param loaded: key of `LOADED`: whose state this rank loads
    :param names_its_node: whether the state contains the node that saved it
    """
    readable.noted.clear()

    def make():
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        options = (TRAINED | DISTINCT)[algorithm]
        return model, mpigossip.Gossip(world, model, inner, algorithm, **options)

    model, optimizer = make()
    train(model, optimizer, 2)
    states = world.comm.allgather(optimizer.state_dict())
    state = states[LOADED[loaded](world.rank)]
    if not names_its_node:
        for key in ("node", "nodes", "local_rank"):
            del state["gossip"][key]
    model, optimizer = make()
    written = io.StringIO()
    error = ""
    with contextlib.redirect_stderr(written):
        for _ in range(2):
            optimizer.load_state_dict(state)
            try:
                train(model, optimizer, 1)
            except JobError as raised:
                error = str(raised)
    return error, written.getvalue()


@on_each("algorithm", [*TRAINED, *DISTINCT])
def test_the_state_of_another_node_is_named_once_or_rejected(ranks, algorithm):
    for rank, (error, written) in enumerate(
        ranks(2)(train_after_loading, algorithm, "of rank 0", True)
    ):
        message = error if algorithm in DISTINCT else written
        if algorithm in TRAINED:
            assert not error
            assert bool(written) == (rank == 0)
        if message:
            assert message.count("rank 1 is node 1 of 2") == 1
            assert "state-{world.rank}.pt" in message
        if algorithm in DISTINCT:
            assert f'algorithm.name = "{algorithm}"' in error


@on_each(
    ("algorithm", "loaded", "names_its_node"),
    [
        ("dsgd", "own", True),
        ("dsgt", "own", True),
        ("dsgd", "of rank 0", False),
        ("dsgt", "of rank 0", False),
    ],
)
def test_a_nodes_own_state_and_one_without_a_node_load_silently(
    ranks, algorithm, loaded, names_its_node
):
    got = ranks(2)(train_after_loading, algorithm, loaded, names_its_node)
    assert got == [("", "")] * 2


def number(name, value):
    return set_entry("numbers", lambda numbers: numbers | {name: value})


def without(name):
    return lambda state: state["gossip"].pop(name)


def whole(state):
    state["gossip"] = 5


NONE = "state of Gossip"
FORGED = {
    "nothing": (whole, NONE),
    "lacks a part": (without("arrays"), (NONE, "'arrays'")),
    "shorter": (set_entry("model", lambda m: m[:-1]), ("torch.float32 (14,)", "15 elements")),
    "longer": (
        set_entry("model", lambda m: torch.cat([m, m])),
        ("torch.float32 (30,)", "15 elements"),
    ),
    "whole numbers": (
        set_entry("model", torch.Tensor.int),
        ("torch.int32", "15 elements", "torch.float32"),
    ),
    "doubles": (
        set_entry("model", torch.Tensor.double),
        ("torch.float64", "15 elements", "torch.float32"),
    ),
    "of numpy": (
        set_entry("model", torch.Tensor.numpy),
        ("ndarray", "15 elements", "torch.float32"),
    ),
    "of two axes": (set_entry("model", lambda m: m[None]), ("(1, 15)", "15 elements")),
    "transposed": (set_entry("shapes", [[4, 3], [3]]), "other parameters"),
    "names": (
        set_entry("names", ["bias", "weight"]),
        ("other parameters", "bias, weight"),
    ),
    "negative": (number("index", -5), ("index = -5", "0")),
    "a fraction": (number("round", 2.5), ("round = 2.5", "0")),
    "a text": (number("born", "1"), ("born = 1", "0")),
    "a negative node": (set_entry("node", -1), ("node = -1", "0")),
    "a node by name": (set_entry("node", "first"), ("node = first", "0")),
    "an algorithm by number": (set_entry("algorithm", 5), NONE),
    "endless": (number("bytes_sent", 1 << 70), (f"bytes_sent = {1 << 70}", "0")),
}
LATER = {
    "momenta of integers": (change_arrays(torch.Tensor.int), "another algorithm"),
    "no momenta": (set_entry("arrays", {}), "another algorithm"),
    "shorter momenta": (change_arrays(lambda m: m[:-1]), "another algorithm"),
    "other counters": (number("cadence/period", 3), "another algorithm"),
}


@on_each("forged", FORGED | LATER)
def test_a_forged_state_is_rejected_and_changes_nothing(forged):
    change, message = (FORGED | LATER)[forged]
    with SingleProcess() as world:
        made = make_steps(world)
        state = copy.deepcopy(made.state_dict())
        before = made.vector.x[0].clone()
        change(state)
        with pytest.raises(JobError, match=naming(message)):
            made.load_state_dict(state)
            made.step()
        assert torch.equal(made.vector.x[0], before)


@on_each("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rejected_state_leaves_the_model_as_it_was(dtype):
    model = nn.Linear(4, 2).to(dtype)
    gossip = mpigossip.Gossip(SingleProcess(), model, torch.optim.Adam(model.parameters(), 0.1))
    state = gossip.state_dict()
    before = [p.data for p in model.parameters()]
    state["param_groups"] = [*state["param_groups"], {"params": []}]
    with pytest.raises(ValueError, match=naming("number of parameter groups")):
        gossip.load_state_dict(state)
    for p, data in zip(model.parameters(), before, strict=True):
        assert p.dtype == dtype and p.data_ptr() == data.data_ptr()


TORCHS = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop")


def make_gossip(optimizer, change=None, state=None, **options):
    """Return Gossip around a torch optimizer, after loading a state, if any, and one step.

    :param optimizer: name of the class in `torch.optim`
    :param change: settings of the parameter groups; None: the defaults
    :param state: state to load; None: none
    :param options: arguments of Gossip
    """
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    inner = getattr(torch.optim, optimizer)(model.parameters(), 0.01)
    for group in inner.param_groups:
        group.update(change or {})
    gossip = mpigossip.Gossip(SingleProcess(), model, inner, **options)
    if state is not None:
        gossip.load_state_dict(copy.deepcopy(state))
    train(model, gossip, 1)
    return gossip


@on_each(("saved", "other", "fits"), [
    ("diloco", "slowmo", False),
    ("slowmo", "noloco", False),
    ("noloco", "gasloc", False),
    ("dsgd", "cpsgd", True),
])  # fmt: skip
def test_a_state_of_another_algorithm_is_rejected_by_name_if_its_arrays_fit(saved, other, fits):
    state = make_gossip("SGD", algorithm=saved).state_dict()
    if fits:
        make_gossip("SGD", state=state, algorithm=other)
    else:
        names = f'"{saved}"', f'algorithm = "{other}"', '"gossip"'
        with pytest.raises(JobError, match=naming("load_state_dict", *names)):
            make_gossip("SGD", state=state, algorithm=other)
    del state["gossip"]["algorithm"]  # as earlier versions saved it
    make_gossip("SGD", state=state, algorithm=other)


def as_earlier_version(state, *keys):
    """Return a state as earlier versions saved it, without ``keys`` in its parameter groups."""
    state = copy.deepcopy(state)
    del state["gossip"]["optimizer"]
    for group in state["param_groups"]:
        for key in keys:
            del group[key]
    return state


def test_the_state_of_another_optimizer_is_rejected(capsys):
    states = {name: make_gossip(name).state_dict() for name in TORCHS}
    for saved, state in states.items():
        for name in TORCHS:
            if name == saved:
                make_gossip(name, state=state)
                continue
            with pytest.raises(StoreError, match=naming(saved, f"Gossip has {name}")):
                make_gossip(name, state=state)
    assert "load_state_dict" not in capsys.readouterr().out
    with pytest.raises(StoreError, match=naming("amsgrad, betas", "Gossip has SGD")):
        make_gossip("SGD", state=as_earlier_version(states["AdamW"]))
    with pytest.raises(ValueError, match=naming("number of parameter groups")):
        group = {"params": []}
        make_gossip("SGD", state=states["SGD"] | {"param_groups": [group, group]})


def test_settings_that_a_state_lacks_keep_their_present_values(capsys):
    state = make_gossip("AdamW", {"lr": 0.25, "max_lr": 3}).state_dict()
    gossip = make_gossip(
        "AdamW", {"eps": 0.5, "initial_lr": 0.7}, as_earlier_version(state, "amsgrad", "eps")
    )
    printed = capsys.readouterr().out
    assert ": amsgrad = False, eps = 0.5\n" in printed
    assert "max_lr" not in printed
    group = gossip.param_groups[0]
    assert [group[key] for key in ("lr", "eps", "max_lr", "initial_lr")] == [0.25, 0.5, 3, 0.7]
    gossip = make_gossip("AdamW", state=make_gossip("AdamW", {"own": 1}).state_dict())
    assert "AdamW lacks: own\n" in capsys.readouterr().out
    assert gossip.param_groups[0]["own"] == 1


def test_average_is_rejected_with_fragments():
    model = nn.Linear(4, 32)
    inner = torch.optim.AdamW(model.parameters(), 0.01)
    more = {"fragments": 2, "delay": 2}
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, "diloco", period=4, **more)
    with pytest.raises(JobError, match=naming("average()", "fragments")):
        optimizer.average()


@with_world
def count_numbered_calls(world):
    """Return the number of calls that a rank counts if ranks make different calls after loading.

    Ranks compare the numbers of their collective calls. Asynchronous ranks may make different
    calls, which must therefore have no number.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = mpigossip.Gossip(world, model, inner, timeout_s=20.0, mixer="asynchronous")
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    before = deadline.this_rank.ordered_calls
    if world.rank:
        optimizer.average()
    else:
        train(model, optimizer, 1)
    return deadline.this_rank.ordered_calls - before


def test_the_first_asynchronous_call_after_loading_has_no_number(ranks):
    assert ranks(2)(count_numbered_calls) == [0, 0]
