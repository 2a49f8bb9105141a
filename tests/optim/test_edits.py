"""Parameters that a program edits through `.data`, moves to other memory, or replaces.

Edits must be kept or rejected, but never lost without an error.
"""

import itertools
from typing import NamedTuple

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError, readable
from tests.cases import covering, every, naming, on_each, with_world

RATE = 0.1
OUTER_RATE = 0.7
OUTER_BETA = 0.9
PERIOD = 2
"""Number of steps between two averages of diloco."""
LATE = 25
"""Step after the first 20 in which values aren't compared."""


@pytest.fixture(autouse=True)
def nothing_reported_yet():
    readable.noted.clear()


def make(low=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return model.bfloat16() if low else model


def backward(model, node, step):
    draw = torch.Generator().manual_seed(100 * node + step)
    inputs = torch.randn(4, 6, generator=draw).to(model[0].weight.dtype)
    model(inputs).float().square().mean().backward()


def train(optimizer, model, steps, node=0):
    for step in steps:
        optimizer.zero_grad()
        backward(model, node, step)
        optimizer.step()


def values(model):
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


# -- every kind of edit ----------------------------------------------------------------------------

EDITS = {
    "mul_": lambda p: p.data.mul_(0.9),
    "clamp_": lambda p: p.data.clamp_(-0.1, 0.1),
    "copy_": lambda p: p.data.copy_(p.data + 0.03),
    "add_": lambda p: p.grad is not None and p.data.add_(p.grad, alpha=-0.5),
}
METHODS = {
    "awc": ("dsgd", {"style": "awc"}),
    "atc": ("dsgd", {}),
    "diloco": ("diloco", {"period": PERIOD}),
}
PLACES = ("before forward", "before step", "after step")
WHEN = {"each": range(6), "early": (3,), "late": (LATE,)}


class Case(NamedTuple):
    """Edits of parameters in a training: kind, types, algorithm, position in a step, and steps."""

    edit: str
    low: bool
    method: str
    overlap: str
    place: str
    when: str

    def apply(self, model: nn.Module, place: str, step: int) -> None:
        if place == self.place and step in WHEN[self.when]:
            for p in model.parameters():
                EDITS[self.edit](p)

    @property
    def steps(self) -> range:
        """Steps of the training: one more than the last edited step, which could undo an edit."""
        return range(max(WHEN[self.when]) + 2)


CASES = [
    Case(*one)
    for one in itertools.product(EDITS, (False, True), METHODS, ("auto", "never"), PLACES, WHEN)
]


def representative(case: Case) -> bool:
    """Return whether a case runs by default; these cases contain each value of each field."""
    if case.when != "each":
        return case == Case("clamp_", case.low, "awc", "auto", "before forward", case.when)
    if case.overlap == "never":
        return case == Case("add_", True, case.method, "never", "before step", "each")
    return case.edit == "mul_" and case.place != "before step"


DEFAULT = [case for case in CASES if representative(case)]


def covering_cases(n: int) -> list[Case]:
    """Return the cases of n = 2 or 3 ranks that only ``--all`` runs.

    They and the default cases contain each combination of three values of different fields, of
    which one is the number of ranks, because algorithm, overlap and step decide together whether
    an edit is kept.
    """
    everything = [(ranks, *case) for ranks in (2, 3) for case in CASES]
    chosen = covering(everything, 3, covered=[(2, *case) for case in DEFAULT])
    return [Case(*fields) for ranks, *fields in chosen if ranks == n]


def expected(case: Case) -> str:
    if case.method != "awc" or case.overlap == "never":
        return "kept"
    return "lost" if case.when == "late" else "rejected"


@with_world(timeout_s=60)
def train_with_edits(world, cases):
    """Train each case; return the parameters after it, or None if Gossip rejected an edit."""
    results = []
    for case in cases:
        model = make(case.low)
        algorithm, options = METHODS[case.method]
        inner = torch.optim.SGD(model.parameters(), lr=RATE)
        gossip = mpigossip.Gossip(world, model, inner, algorithm, overlap=case.overlap, **options)
        try:
            for step in case.steps:
                case.apply(model, "before forward", step)
                gossip.zero_grad()
                backward(model, world.rank, step)
                case.apply(model, "before step", step)
                gossip.step()
                case.apply(model, "after step", step)
            results.append(values(model).numpy())
        except JobError as error:
            assert 'overlap="never"' in str(error)
            results.append(None)
        gossip.close()
    return results


class Reference:
    """Reference of a case: the same training of n nodes in one process, without this package."""

    def __init__(self, n: int, case: Case):
        self.case = case
        self.graph = mpigossip.graph("one-peer-exponential", n)
        self.models = [make(case.low) for _ in range(n)]
        self.exact = [
            [p.detach().float().clone() for p in model.parameters()] for model in self.models
        ]
        self.outer: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        """For each node, the parameters after diloco's last outer step, and its momentum."""

    def edit(self, place: str, step: int) -> None:
        """Edit the models, and copy elements that have changed to their float32 copies."""
        for model, exact in zip(self.models, self.exact, strict=True):
            self.case.apply(model, place, step)
            for p, x in zip(model.parameters(), exact, strict=True):
                x.copy_(torch.where(x.to(p.dtype) == p.data, x, p.data.float()))

    def mixed(self, step: int) -> list[list[torch.Tensor]]:
        results = []
        for node in range(len(self.models)):
            sources, weights, own = self.graph.neighbours(step, node)
            row = [float(own) * x for x in self.exact[node]]
            for j, weight in zip(sources, weights, strict=True):
                row = [a + float(weight) * b for a, b in zip(row, self.exact[j], strict=True)]
            results.append(row)
        return results

    def descend(self) -> None:
        for model, exact in zip(self.models, self.exact, strict=True):
            for p, x in zip(model.parameters(), exact, strict=True):
                x.add_(p.grad.float(), alpha=-RATE)

    def outer_step(self) -> None:
        """Make the outer step of diloco with the changes of all nodes, which include edits."""
        means = [sum(parts) / len(parts) for parts in zip(*self.exact, strict=True)]
        for row, outer in zip(self.exact, self.outer, strict=True):
            for x, mean, (anchor, slow) in zip(row, means, outer, strict=True):
                slow.mul_(OUTER_BETA).add_(anchor - mean)
                anchor.sub_(OUTER_RATE * (anchor - mean + OUTER_BETA * slow))
                x.copy_(anchor)

    def step(self, step: int) -> None:
        self.edit("before forward", step)
        for node, model in enumerate(self.models):
            model.zero_grad()
            backward(model, node, step)
        self.edit("before step", step)
        if step == 0:  # the state of diloco is initialized here, after edits before the first step
            self.outer = [[(x.clone(), torch.zeros_like(x)) for x in row] for row in self.exact]
        if self.case.method == "awc":
            self.exact = self.mixed(step)
        self.descend()
        if self.case.method == "atc":
            self.exact = self.mixed(step)
        if self.case.method == "diloco" and (step + 1) % PERIOD == 0:
            self.outer_step()
        for model, exact in zip(self.models, self.exact, strict=True):
            for p, x in zip(model.parameters(), exact, strict=True):
                p.data.copy_(x)
        self.edit("after step", step)

    def run(self) -> list[torch.Tensor]:
        for step in self.case.steps:
            self.step(step)
        return [values(model) for model in self.models]


def outcomes(n: int, cases: list[Case], results_of_ranks: list[list]) -> dict[Case, str]:
    """Return "kept", "rejected" or "lost" for each case.

    :param n: number of ranks
    :param cases: cases that the ranks have trained
    :param results_of_ranks: result of :func:`train_with_edits` of each rank
    """
    table = {}
    for k, case in enumerate(cases):
        after = [of_rank[k] for of_rank in results_of_ranks]
        if all(one is None for one in after):
            table[case] = "rejected"
            continue
        wanted = Reference(n, case).run()
        # diloco computes its average and outer step in another order than the reference.
        near = 0.0 if case.method != "diloco" else 1e-2 if case.low else 1e-5
        exact = all(
            one is not None and float((torch.from_numpy(one) - two).abs().max()) <= near
            for one, two in zip(after, wanted, strict=True)
        )
        table[case] = "kept" if exact else "lost"
    return table


@pytest.mark.parametrize(
    ("n", "which"), [(2, "default"), every(2, "covering"), every(3, "covering")]
)
def test_edits_in_each_step_are_kept_or_rejected(ranks, n, which):
    cases = DEFAULT if which == "default" else covering_cases(n)
    result = outcomes(n, cases, ranks(n)(train_with_edits, cases, timeout=600))
    assert result == {case: expected(case) for case in cases}


def outer_by_hand(steps: int, period: int, factor: float) -> float:
    """Return a weight that begins at 1 and is multiplied after each step of diloco at rate 0."""
    x = anchor = 1.0
    slow = 0.0
    for step in range(steps):
        if (step + 1) % period == 0:
            slow = OUTER_BETA * slow + anchor - x
            x = anchor - OUTER_RATE * (anchor - x + OUTER_BETA * slow)
            anchor = x
        x *= factor
    return x


@on_each("period", [1, 4, 8, 50])
def test_diloco_treats_edits_as_local_steps(period):
    """Its outer step moves along them, with momentum: the weight isn't 0.9^20 afterwards."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    gossip = mpigossip.Gossip(SingleProcess(), model, inner, "diloco", period=period)
    for _ in range(20):
        gossip.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        gossip.step()
        model.weight.data.mul_(0.9)
    assert model.weight.item() == pytest.approx(outer_by_hand(20, period, 0.9), abs=1e-6)


def wrapped(algorithm="dsgd", low=False, **options):
    model = make(low)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    return model, mpigossip.Gossip(SingleProcess(), model, inner, algorithm, **options)


@on_each("algorithm", ["detag", "defacto"])
def test_edits_are_rejected_by_methods_that_keep_their_own_model(algorithm):
    model, gossip = wrapped(algorithm, overlap="never")
    train(gossip, model, range(2))
    EDITS["mul_"](model[0].weight)
    with pytest.raises(JobError, match=naming(f'"{algorithm}"', '"dsgt"')):
        gossip.step()


@on_each("low", [False, True])
def test_an_edit_after_a_collective_call_is_rejected_like_one_before_it(low):
    model, gossip = wrapped(style="awc", low=low)
    train(gossip, model, range(2))
    with gossip.averaged():
        EDITS["mul_"](model[0].weight)  # averaged() undoes it at its end.
    gossip.consensus_distance()
    gossip.state_dict()
    train(gossip, model, range(2, 4))
    gossip.consensus_distance()
    with torch.no_grad():
        model[0].weight.mul_(0.9)
    with pytest.raises(JobError, match=naming('overlap="never"')):
        gossip.step()


def test_an_edit_before_state_dict_is_rejected_at_the_step():
    model, gossip = wrapped(style="awc")
    train(gossip, model, range(2))
    model[0].weight.data = model[0].weight.data * 0.9
    gossip.state_dict()
    with pytest.raises(JobError, match=naming('overlap="never"')):
        gossip.step()


# -- exchanges without a step ----------------------------------------------------------------------


@with_world(timeout_s=60)
def edited_before_average(world, low, moved):
    """Return the values after average() of models whose parameters equal the rank."""
    model = make(low)
    gossip = mpigossip.Gossip(world, model, torch.optim.SGD(model.parameters(), lr=RATE))
    train(gossip, model, range(1), world.rank)
    if moved:
        model.share_memory()
    for p in model.parameters():
        p.data.fill_(float(world.rank))
    gossip.average()
    return values(model).unique().tolist()


@on_each(("low", "moved"), [(False, False), (False, True), (True, False), (True, True)])
def test_average_exchanges_edited_and_moved_parameters(ranks, low, moved):
    assert ranks(2)(edited_before_average, low, moved) == [[0.5]] * 2


@with_world(timeout_s=60)
def edited_before_a_pause(world, low, moved):
    model = make(low)
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    gossip = mpigossip.Gossip(world, model, inner, mixer="asynchronous")
    train(gossip, model, range(1), world.rank)
    if moved:
        model.share_memory()
    for p in model.parameters():
        p.data.fill_(1000.0)
    world.barrier()
    with gossip.paused():
        pass
    return float(values(model).mean())


@on_each(("low", "moved"), [(True, False), (False, True)])
def test_a_pause_keeps_edited_and_moved_parameters(ranks, low, moved):
    """Exchanges with an older model of a neighbour may remove a part of the edit, but not all."""
    assert min(ranks(2)(edited_before_a_pause, low, moved)) > 100


@with_world(timeout_s=60)
def averaged_after_each_step(world, algorithm):
    model = make()
    inner = torch.optim.SGD(model.parameters(), lr=RATE)
    gossip = mpigossip.Gossip(world, model, inner, algorithm, overlap="never")
    for step in range(4):
        train(gossip, model, [step], world.rank)
        gossip.average()
    EDITS["mul_"](model[0].weight)
    with pytest.raises(JobError, match=naming(f'"{algorithm}"', '"dsgt"')):
        gossip.average()
    with pytest.raises(JobError, match=naming(f'"{algorithm}"', '"dsgt"')):
        gossip.step()


@on_each("algorithm", ["detag", "defacto"])
def test_average_is_no_edit_of_a_model_that_the_method_keeps(ranks, algorithm):
    ranks(2)(averaged_after_each_step, algorithm)


# -- memory that is moved to other processes -------------------------------------------------------


class Modelled(torch.utils.data.Dataset):
    """Dataset whose samples a model computes in the workers of the loader."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(torch.ones(6, dtype=self.model[0].weight.dtype))


def check_values(model):
    """Check that a model is readable; this is called in another process."""
    assert values(model).isfinite().all()


def share(model):
    model.share_memory()


def queued(model):
    from torch import multiprocessing

    queue = multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(model.state_dict())
    queue.get()


def forked_loader(model):
    assert len([*torch.utils.data.DataLoader(Modelled(model), num_workers=1)]) == 4


def spawned_loader(model):
    context = "spawn"
    loader = torch.utils.data.DataLoader(
        Modelled(model), num_workers=1, multiprocessing_context=context
    )
    assert len([*loader]) == 4


def spawned_process(model):
    from torch import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=check_values, args=(model,))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "move", [share, queued, forked_loader, every(spawned_loader), every(spawned_process)]
)
@pytest.mark.parametrize(("low", "options"), [(False, {}), (False, {"style": "awc"}), (True, {})])
def test_parameters_that_are_moved_to_shared_memory_are_trained_on(move, low, options):
    """A spawned process imports torch, which takes seconds."""
    plain, gossip = wrapped(low=low, **options)
    train(gossip, plain, range(6))
    model, gossip = wrapped(low=low, **options)
    move(model)
    train(gossip, model, range(2))
    move(model)
    train(gossip, model, range(2, 4))
    move(model)
    train(gossip, model, range(4, 6))
    assert torch.equal(values(model), values(plain))


def test_a_move_to_shared_memory_is_reported_once(capsys):
    model, gossip = wrapped()
    train(gossip, model, range(1))
    for step in range(1, 3):
        model.share_memory()
        train(gossip, model, [step])
        assert not model[0].weight.is_shared()
    assert capsys.readouterr().err.count("after share_memory()") == 1


# -- parameters that share memory ------------------------------------------------------------------


class Pieces(nn.Module):
    """Parameters that are views of one array."""

    def __init__(self, *views):
        super().__init__()
        array = torch.arange(24.0).view(4, 6) / 24
        self.pieces = nn.ParameterList(nn.Parameter(view(array)) for view in views)

    def forward(self, inputs):
        return sum(piece.sum() for piece in self.pieces) * inputs


def gossip_of(model):
    return mpigossip.Gossip(SingleProcess(), model, torch.optim.SGD(model.parameters(), lr=RATE))


SHARED = {
    "same": (lambda a: a[:2], lambda a: a[:2]),
    "overlapping rows": (lambda a: a[:3], lambda a: a[2:]),
    "overlapping columns": (lambda a: a[:, :4], lambda a: a[:, 3:]),
    "transposed": (lambda a: a[:2], lambda a: a[1:3].t()),
    "behind others": (lambda a: a[:, :1], lambda a: a[:, 1:2], lambda a: a[1:3, 0]),
}
SEPARATE = {
    "rows": (lambda a: a[:2], lambda a: a[2:]),
    "columns": (lambda a: a[:, :3], lambda a: a[:, 3:]),
    "empty": (lambda a: a[:2], lambda a: a[:0]),
    "strided": (lambda a: a[::2], lambda a: a[1::2]),
}


@on_each("views", [*SHARED.values()])
def test_parameters_that_share_memory_are_rejected(views):
    with pytest.raises(JobError, match=naming("pieces.0", f"pieces.{len(views) - 1}", ".clone()")):
        gossip_of(Pieces(*views))


@on_each("views", [*SEPARATE.values()])
def test_parameters_that_lie_in_one_array_without_overlap_are_accepted(views):
    model = Pieces(*views)
    before = values(model)
    gossip = gossip_of(model)
    model(torch.ones(())).backward()
    gossip.step()
    assert torch.allclose(values(model), before - RATE)


def test_parameters_that_come_to_share_memory_later_are_rejected():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gossip = gossip_of(model)
    model[1].weight.data = model[0].weight.data
    with pytest.raises(JobError, match=naming("0.weight", "1.weight", "share")):
        gossip.step()
    model[1].weight.data = model[0].weight.data.clone()
    model(torch.ones(4)).sum().backward()
    gossip.step()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(JobError, match=naming("0.weight", "1.weight", "share")):
        gossip.step()


@on_each("low", [False, True])
def test_a_transposed_view_of_a_parameter_is_an_edit(low):
    """`p.data.t()` of a square matrix keeps the address and the shape of the parameter."""
    trained = nn.Linear(4, 4, bias=False)
    reference = nn.Linear(4, 4, bias=False)
    if low:
        trained, reference = trained.bfloat16(), reference.bfloat16()
    with torch.no_grad():
        for model in (trained, reference):
            model.weight.copy_(torch.arange(16.0).view(4, 4) / 8)
    gossip = gossip_of(trained)
    inner = torch.optim.SGD(reference.parameters(), lr=RATE)
    inputs = torch.tensor([[1.0, -0.5, 0.25, 2.0]]).to(trained.weight.dtype)
    for _ in range(3):
        for model, optimizer in ((trained, gossip), (reference, inner)):
            model.weight.data = model.weight.data.t()
            optimizer.zero_grad()
            model(inputs).sum().backward()
            optimizer.step()
    assert torch.allclose(trained.weight, reference.weight, atol=0.02 if low else 0)


def test_a_buffer_in_the_memory_of_a_parameter_is_rejected():
    model = nn.Linear(4, 4)
    model.register_buffer("copy", model.weight.data)
    with pytest.raises(JobError, match=naming("weight", "buffer copy", "share")):
        gossip_of(model)
    model.copy = model.weight.data.clone()
    gossip_of(model)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index):
        return self.head(self.embedding(index))


def test_weights_that_are_tied_by_one_parameter_are_accepted():
    model = Tied()
    gossip = gossip_of(model)
    model(torch.tensor([1])).sum().backward()
    gossip.step()
    assert model.head.weight is model.embedding.weight


# -- modules that are replaced ---------------------------------------------------------------------


def replaced(model):
    model[2] = nn.Linear(5, 2)


def removed(model):
    del model[2]


def replaced_inside(model):
    model[3] = nn.Sequential(nn.Linear(2, 2))


@on_each(
    ("replace", "name"),
    [(replaced, "2.weight"), (removed, "2.weight"), (replaced_inside, "3.0.weight")],
)
def test_a_replaced_layer_is_rejected(replace, name):
    model = make().append(nn.Sequential(nn.Linear(2, 2)))
    gossip = gossip_of(model)
    train(gossip, model, range(2))
    replace(model)
    for look in (gossip.step, gossip.state_dict):
        with pytest.raises(JobError, match=naming(name, "left")):
            look()


def test_a_replaced_layer_of_a_tied_weight_is_rejected():
    model = Tied()
    gossip = gossip_of(model)
    model(torch.tensor([1])).sum().backward()
    gossip.step()
    model.head = nn.Linear(3, 5, bias=False)
    with pytest.raises(JobError, match=naming("head", "Linear")):
        gossip.step()


def test_a_wrapper_may_take_the_place_of_a_layer():
    model, gossip = wrapped()
    plain, other = wrapped()
    train(gossip, model, range(2))
    train(other, plain, range(4))
    model[2] = nn.Sequential(model[2])
    train(gossip, model, range(2, 4))
    assert torch.equal(values(model), values(plain))
