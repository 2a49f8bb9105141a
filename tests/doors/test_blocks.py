"""Layers that a user's loop sends during backward: the bits of whole messages, or a refusal."""

import copy
import re

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.ranks import Alone
from mpigossip.config import JobError
from mpigossip.doors.sliced_optimizer import ELEMENTWISE
from tests.engine.test_overlap import SIZE, short_chunks

STEPS = 5
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "SGD fused": {"momentum": 0.9, "fused": True},
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "AdamW fused": {"fused": True},
    "AdamW foreach": {"foreach": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "Rprop": {},
    "ASGD": {},
}
METHODS = {
    "dsgd": {}, "dmsgd-vanilla": {"wire": "bf16"}, "dmsgd": {}, "qg-dmsgd": {"wire": "qsgd"},
    "d2": {}, "dsgt": {"graph": "exponential"}, "slowmo": {"period": 2}, "noloco": {"period": 2},
    "gossip-pga": {"period": 2, "wire": "bf16"}, "dsgd every": {"cadence": "every", "period": 2},
}  # fmt: skip


class Net(nn.Module):
    """Tied, frozen, sometimes unused and never used parameters, a convolution, and wide layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.narrow, self.wide = nn.Linear(64, 110), nn.Linear(110, 110)
        self.again = nn.Linear(110, 110)
        self.again.weight = self.wide.weight
        self.frozen = nn.Linear(110, 64).requires_grad_(False)
        self.sometimes, self.never = nn.Linear(64, 100), nn.Linear(64, 80)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, use):
        x = self.narrow(torch.relu(self.conv(x)).flatten(1)) * self.scale
        x = self.frozen(torch.tanh(self.again(torch.tanh(self.wide(x)))))
        return self.sometimes(x) if use else x


def net():
    torch.manual_seed(0)
    return Net().to(memory_format=torch.channels_last)


def optimizer(model, name, **options):
    few = list(model.conv.parameters()) + [model.sometimes.weight]
    others = [p for p in model.parameters() if all(p is not one for one in few)]
    groups = [{"params": few, "lr": 0.03}, {"params": others}]
    if name not in ("SGD", "AdamW"):
        return getattr(torch.optim, name.split()[0])(groups, lr=0.01, **options)
    return getattr(torch.optim, name)([*few, *others], lr=0.01, **options)


def backward(model, node, step, part=0):
    draw = torch.Generator().manual_seed(1000 * node + 10 * step + part)
    x = torch.randn(4, 3, 4, 4, generator=draw).to(model.scale.dtype)
    loss = model(x, use=step % 2 == 0).float().square().mean()
    loss.backward()
    return loss


def gossip(world, model, inner, overlap, algorithm="dsgd", **options):
    """A Gossip whose messages, though short, have several pieces."""
    made = mpigossip.Gossip(
        world, model, inner, algorithm, overlap=overlap, same_host="put", timeout_s=30, **options
    )
    made.mixer._slots.cut(SIZE)
    return made


def counted(made):
    """The blocks sent from now on, by the step that was under way."""
    sent, mixer = [], made.mixer
    filled = mixer.filled
    mixer.filled = lambda block: (sent.append(made.engine.index), filled(block))
    return sent


def train(made, model, node, first, last, parts=1):
    rate = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    for step in range(first, last):
        made.zero_grad()
        with made.no_sync():
            for part in range(parts - 1):
                backward(model, node, step, part)
        before = [p.detach().clone() for p in model.parameters()]
        backward(model, node, step, parts)
        # what is sent is not yet stepped along
        assert all(map(torch.equal, before, model.parameters()))
        made.step()
        rate.step()


def leaves(model, made):
    """All that a step leaves behind, as lists of tensors and numbers."""
    state = copy.deepcopy(made.state_dict())
    numbers = state["gossip"].pop("numbers")
    tensors = [p.detach().clone() for p in model.parameters()] + [state["gossip"]["model"]]
    kept = [
        (k, key, torch.as_tensor(value)) for k, each in sorted(state["state"].items())
        for key, value in sorted(each.items())
    ]  # fmt: skip
    return tensors + [value for _, _, value in kept], [name[:2] for name in kept], numbers


def same(one, other):
    tensors = zip(one[0], other[0], strict=True)
    shapes = all(a.shape == b.shape and torch.equal(a, b) for a, b in tensors)
    return shapes and one[1:] == other[1:]


def both_ways(comm, cases, dtype=torch.float32):
    """For each case what is left with layers sent during backward, and without."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    found = {}
    with short_chunks(), World(comm) as world:
        for name, (algorithm, inner, options, keywords, parts) in cases.items():
            ends, sent = [], None
            for overlap in ("auto", "layers"):
                model = net().to(dtype)
                one = optimizer(model, inner, **options)
                made = gossip(world, model, one, overlap, algorithm, **keywords)
                sent = counted(made)
                train(made, model, world.rank, 0, STEPS, parts)
                ends.append(leaves(model, made))
                many = len(made.mixer.blocks)
                made.close()
            found[name] = same(*ends), many, [sent.count(step) for step in range(STEPS)]
    return found


def check(got, often=STEPS - 1):
    for each in got:
        for name, (equal, many, sent) in each.items():
            assert equal, name
            # the first step lays the vector out: nothing is sent in its backward pass
            assert many > 4 and sent[0] == 0 and set(sent) <= {0, many}, (name, many, sent)
            assert sent.count(many) >= often, (name, many, sent)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_layers_sent_during_backward_have_the_bits_of_whole_models(ranks, n):
    cases = {
        name: ("dsgd", name, OPTIMIZERS[name], {}, 1)
        for name in (OPTIMIZERS if n == 3 else ("SGD", "AdamW", "RMSprop"))
    }
    assert n != 3 or {getattr(torch.optim, name.split()[0]) for name in cases} == set(ELEMENTWISE)
    check(ranks(n)(both_ways, cases, timeout=120))


def test_every_method_that_goes_by_columns(ranks):
    cases = {}
    for name, keywords in METHODS.items():
        inner, options = "AdamW", {}
        if name in ("dmsgd", "qg-dmsgd"):
            inner, options = "SGD", {"weight_decay": 0.01}
        cases[name] = (name.split()[0], inner, options, keywords, 1)
    check(ranks(3)(both_ways, cases, timeout=120), often=2)


def test_gradients_that_add_up_are_sent_by_the_last_pass(ranks):
    cases = {name: ("dsgd", name, OPTIMIZERS[name], {}, 3) for name in ("SGD", "AdamW")}
    check(ranks(2)(both_ways, cases))


def test_float32_masters_of_bfloat16_parameters_are_sent(ranks):
    cases = {name: ("dsgd", name, OPTIMIZERS[name], {}, 2) for name in ("SGD", "AdamW")}
    cases["dmsgd"] = ("dmsgd", "SGD", {"weight_decay": 0.01}, {}, 2)
    check(ranks(2)(both_ways, cases, torch.bfloat16))


def goes_on(comm):
    """Six steps; three, and the rest in a new Gossip; and the rest again in the first one."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    found = []
    with short_chunks(), World(comm) as world:
        for algorithm in ("dsgd", "slowmo"):

            def begin(overlap="layers", algorithm=algorithm):
                model = net()
                options = {"period": 2} if algorithm == "slowmo" else {}
                inner = optimizer(model, "AdamW")
                return model, gossip(world, model, inner, overlap, algorithm, **options)

            def steps(model, made, first, last):
                for step in range(first, last):
                    made.zero_grad()
                    backward(model, world.rank, step)
                    made.step()
                return leaves(model, made)

            model, made = begin()
            steps(model, made, 0, 3)
            kept = copy.deepcopy((model.state_dict(), made.state_dict()))
            whole = steps(model, made, 3, 6)
            for other, one in (begin(), begin("never"), (model, made)):
                other.load_state_dict(kept[0])
                one.load_state_dict(copy.deepcopy(kept[1]))
                found.append(same(whole, steps(other, one, 3, 6)))
    return found


def test_state_dicts_go_on_to_the_bit_with_and_without_layers(ranks):
    assert ranks(2)(goes_on, timeout=120) == [[True] * 6] * 2


# -- what it doesn't bear ------------------------------------------------------------------------


def refused(match, make=lambda p: torch.optim.SGD(p, lr=0.1), algorithm="dsgd", **options):
    model = net()
    with pytest.raises(JobError, match=match):
        mpigossip.Gossip(
            Alone(), model, make(list(model.parameters())), algorithm, overlap="layers", **options
        )


class Own(torch.optim.AdamW):
    """Who knows what it does."""


def test_what_would_be_another_method_is_refused_with_the_reason():
    if hasattr(torch.optim, "Adafactor"):
        reason = r"Adafactor is not known to be elementwise.*inside parameters.*overlap=\"auto\""
        refused(reason, torch.optim.Adafactor)
    refused(r"Own is not known to be elementwise", Own)
    if hasattr(torch.optim, "Muon"):
        refused(r"Muon is not known", lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]))
    refused(r"LBFGS evaluates its closure", torch.optim.LBFGS)
    refused(r'"dsgd" sends before there is a gradient', style="awc")
    refused(r'"parallel" sends whole models only', algorithm="parallel")
    refused(r'node\.mixer = "asynchronous" shows whole models', mixer="asynchronous")
    refused(r"run\.survive = true: a loss in the middle", survive=True, on_change=print)
    refused(r"gradients of 2 devices are averaged after backward", devices=("cpu", "cpu"))
    model = net()
    with pytest.raises(JobError, match='overlap = "always": choose one of auto, layers, never'):
        mpigossip.Gossip(Alone(), model, optimizer(model, "SGD"), overlap="always")


def clipped(model, made):
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def all_reduced(model, made):
    """As gloo does it in a bucket that gradients are views of."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.numpy()[...] += 1


def zeroed(model, made):
    made.zero_grad()


def new_rate(model, made):
    made.param_groups[0]["lr"] *= 0.5


def clamped(model, made):
    with torch.no_grad():
        model.scale.clamp_(0, 0.5)


def elsewhere(model, made):
    model.scale.data = model.scale.data * 2


def again(model, made):
    backward(model, 0, 9)


def saved(model, made):
    made.state_dict()


def loaded(model, made):
    made.load_state_dict({})


def looked_at(model, made):
    made.consensus_distance()


def unscaled(model, made):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(made)


def by_closure(model, made):
    made.step(lambda: backward(model, 0, 9))


MEANWHILE = {
    clipped: r"gradient of \S+ was changed between backward and step\(\).*clipping.*\"auto\"",
    all_reduced: r"gradient of \S+ was changed between.*all-reduce",
    zeroed: r"gradient of \S+ was changed between",
    new_rate: r"numbers \(learning rate.*were changed between.*before backward",
    clamped: r"parameter scale was changed between",
    elsewhere: r"parameter scale was changed between",
    again: r"gradient of \S+ changed after it was sent.*no_sync\(\)",
    saved: r"state_dict\(\) between backward and step",
    loaded: r"load_state_dict\(\) between backward and step",
    looked_at: r"consensus_distance\(\) between backward and step",
    unscaled: r"a GradScaler has its gradients unscaled",
    by_closure: r"a closure runs backward within step",
}


def meanwhile(comm):
    """What is said to each deed between backward and step."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    said = {}
    with short_chunks(), World(comm) as world:
        for deed in MEANWHILE:
            model = net()
            made = gossip(world, model, optimizer(model, "SGD"), "layers")
            train(made, model, world.rank, 0, 2)
            made.zero_grad()
            backward(model, world.rank, 2)
            try:
                deed(model, made)
                made.step()
            except JobError as error:
                said[deed.__name__] = str(error)
            world.barrier()
            made.close()
    return said


def test_what_changes_after_it_was_sent_is_said(ranks):
    for said in ranks(2)(meanwhile, timeout=120):
        for deed, match in MEANWHILE.items():
            assert re.search(match, said.get(deed.__name__, "nothing")), (deed, said)


def sparse(comm):
    """What is said to an embedding's sparse gradient."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    with short_chunks(), World(comm) as world:
        model = nn.Embedding(1000, 40, sparse=True)
        made = gossip(world, model, torch.optim.SGD(model.parameters(), 0.1), "layers")
        model(torch.tensor([1])).sum().backward()
        try:
            made.step()
        except JobError as error:
            return str(error)
    return "nothing"


def test_sparse_gradients_are_refused(ranks):
    assert all("weight has a sparse gradient" in said for said in ranks(2)(sparse))


def between_steps(comm):
    """Deeds between steps, which are nobody's business; equal to those without layers."""
    from mpigossip.cluster.ranks import World

    torch.set_num_threads(1)
    ends = []
    with short_chunks(), World(comm) as world:
        for overlap in ("layers", "never"):
            model = net()
            made = gossip(world, model, optimizer(model, "AdamW"), overlap)
            for step in range(STEPS):
                made.zero_grad()
                if step != 3:  # a node without data this time
                    backward(model, world.rank, step)
                made.step()
                with torch.no_grad():
                    model.scale.clamp_(0.5, 0.9)
                made.zero_grad()
                with made.averaged() as average:
                    backward(average, world.rank, step)
                assert made.consensus_distance() >= 0
            ends.append(leaves(model, made))
    return same(*ends)


def test_looks_and_changes_between_steps_do_no_harm(ranks):
    assert ranks(2)(between_steps) == [True, True]
