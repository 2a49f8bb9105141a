"""Optimizers, GradScaler and types of torch inside Gossip, compared with torch's own steps."""

import copy

import pytest
import torch
from torch import nn

import mpigossip
from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from tests.cases import naming, with_world
from tests.optim.loops import mix_models

N = 2
STEPS = 5
OPTIMIZERS = {
    "AdamW": {},
    "AdamW fused": {"fused": True},
    "AdamW foreach": {"foreach": True},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5},
    "Adafactor": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "Rprop": {},
    "ASGD": {},
}


class Net(nn.Module):
    """Model with tied, frozen, sometimes and never used parameters, a convolution and a norm."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.narrow = nn.Linear(16, 16)
        self.wide = nn.Linear(16, 16)
        self.wide.weight = self.narrow.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.sometimes = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)

    def forward(self, x, use):
        x = self.norm(self.conv(x)).flatten(1)
        x = self.frozen(torch.tanh(self.wide(torch.tanh(self.narrow(x)))))
        return self.sometimes(x) if use else x


def net(node=None):
    torch.manual_seed(0)
    made = Net().to(memory_format=torch.channels_last)
    if node:  # the initial model of all nodes but the first differs
        with torch.no_grad():
            for p in made.parameters():
                p.add_(node)
    return made


def optimizer(model, name, **options):
    few = list(model.conv.parameters())
    others = []
    others = [p for p in model.parameters() if all(p is not one for one in few)]
    groups = [{"params": few, "lr": 0.03}, {"params": others}]
    return getattr(torch.optim, name.split()[0])(groups, lr=0.01, **options)


def inputs(node, step):
    draw = torch.Generator().manual_seed(100 * node + step)
    return torch.randn(4, 3, 4, 4, generator=draw)


def backward(model, node, step, scale=1.0):
    x = inputs(node, step).to(next(model.parameters()).dtype)
    (model(x, use=step % 2 == 0).float().square().mean() * scale).backward()


def values(model):
    return [t.detach().clone() for t in model.parameters()]


def same(got, models):
    pairs = zip(got, map(values, models), strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


@with_world
def every_optimizer(world):
    results = {}
    for name, options in OPTIMIZERS.items():
        model = net(world.rank)
        gossip = mpigossip.Gossip(world, model, optimizer(model, name, **options))
        for step in range(STEPS):
            gossip.zero_grad()
            backward(model, world.rank, step)
            gossip.step()
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        results[name] = values(model)
    return results


@pytest.mark.both
def test_steps_are_bitwise_those_of_the_optimizer_mixed(ranks):
    got = ranks(N)(every_optimizer)
    for name, options in OPTIMIZERS.items():
        models = [net(node) for node in range(N)]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())
        inner = [optimizer(model, name, **options) for model in models]
        for step in range(STEPS):
            for node, (model, one) in enumerate(zip(models, inner, strict=True)):
                one.zero_grad()
                backward(model, node, step)
                one.step()
            mix_models(models, step)
        assert same([each[name] for each in got], models), name


def scaled(models, steppers, scalers, clip, node, step):
    model = models[node]
    stepper = steppers[node]
    scaler = scalers[node]
    stepper.zero_grad()
    scale = float(scaler.scale(torch.ones(())))
    overflow = float("inf") if (node, step) == (1, 2) else 1.0
    backward(model, node, step, scale * overflow)
    if clip:
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(stepper)
    scaler.update()


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**8)


@with_world
def with_scaler(world, clip):
    model = net()
    one = scaler()
    node = world.rank
    gossip = mpigossip.Gossip(world, model, optimizer(model, "AdamW"))
    for step in range(STEPS):
        scaled({node: model}, {node: gossip}, {node: one}, clip, node, step)
    return values(model), one.get_scale(), gossip.mixer.bytes_sent[0]


@pytest.mark.parametrize("clip", [False, True])
def test_an_overflow_on_one_rank_skips_its_step_and_no_rank_waits(ranks, clip):
    got = ranks(N)(with_scaler, clip)
    models = [net() for _ in range(N)]
    inner = [optimizer(model, "AdamW") for model in models]
    scalers = [scaler() for _ in range(N)]
    for step in range(STEPS):
        for node in range(N):
            scaled(models, inner, scalers, clip, node, step)
        mix_models(models, step)
    assert same([parameters for parameters, _, _ in got], models)
    assert [scale for _, scale, _ in got] == [2.0**8, 2.0**7]
    assert got[0][2] == got[1][2] > 0


def test_bfloat16_parameters_have_a_float32_master():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    for master in masters:
        master.requires_grad_(True)
    inner = torch.optim.AdamW(masters, lr=1e-4)  # far below what bfloat16 resolves
    twin = copy.deepcopy(model)
    gossip = mpigossip.Gossip(
        SingleProcess(), model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    )
    for step in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
        for one in (model, twin):
            one.zero_grad()
            one(x).float().square().mean().backward()
        gossip.step()
        for master, p in zip(masters, twin.parameters(), strict=True):
            master.grad = p.grad.float()
        inner.step()
        with torch.no_grad():
            for master, p in zip(masters, twin.parameters(), strict=True):
                p.copy_(master)
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        assert all(a.dtype == torch.bfloat16 and torch.equal(a, b) for a, b in pairs)
    views = gossip.vector.cut(gossip.vector.x[0][0])
    assert all(torch.equal(a, b) for a, b in zip(views, masters, strict=True))


@pytest.mark.parametrize("algorithm", ["dsgd", "dmsgd"])
def test_scaled_gradients_of_float16_are_divided_in_float32(algorithm):
    """float16 can't represent the gradient of 1e-8; the model makes ten steps of 1e5 times it."""
    model = nn.Linear(4, 1, bias=False).half()
    with torch.no_grad():
        model.weight.fill_(1.0)
    inner = torch.optim.SGD(model.parameters(), lr=1e5)
    more = {"beta": 0.0} if algorithm == "dmsgd" else {}
    optimizer = mpigossip.Gossip(SingleProcess(), model, inner, algorithm, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for _ in range(10):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4).half()).float().sum() * 1e-8).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.vector.x[0][0, 0].item() == pytest.approx(0.99, abs=1e-4)


def test_schedulers_and_closures_see_the_inner_optimizer():
    made = [net(), net()]
    inner = [optimizer(model, "SGD", momentum=0.9) for model in made]
    gossip = mpigossip.Gossip(SingleProcess(), made[0], inner[0])
    steppers = [gossip, inner[1]]
    rates = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=9) for one in steppers]
    calls = []
    gossip.register_step_post_hook(lambda *_: calls.append("after"))
    for step in range(6):
        for model, stepper, rate in zip(made, steppers, rates, strict=True):

            def closure(model=model, stepper=stepper, step=step):
                calls.append(model)
                stepper.zero_grad()
                loss = model(inputs(0, step), True).square().mean()
                loss.backward()
                return loss

            assert stepper.step(closure).requires_grad
            rate.step()
    assert same([values(made[0])], made[1:])
    assert calls.count(made[0]) == calls.count("after") == 6
    assert gossip.param_groups is inner[0].param_groups and gossip.state is inner[0].state


def refused(named, algorithm="dsgd", make=None, **options):
    model = net()
    inner = (make or (lambda p: torch.optim.SGD(p, lr=0.1)))(list(model.parameters()))
    with pytest.raises(JobError, match=naming(named)):
        mpigossip.Gossip(SingleProcess(), model, inner, algorithm, **options)


def test_unsupported_arguments_are_rejected():
    refused(("LBFGS", "closure", "torch.optim.Adam"), make=lambda p: torch.optim.LBFGS(p))
    refused("differentiable = True", make=lambda p: torch.optim.SGD(p, differentiable=True))
    refused(("torch.optim.SGD", "AdamW"), "dmsgd", lambda p: torch.optim.AdamW(p))
    refused("momentum = 0.9", "dmsgd", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    refused(('cadence.name = "gossip-aga"', "loss"), "gossip-aga")
    refused("total=", "adpsgd")
    refused(('cadence.name = "never"', "gossip-pga"), "gossip-pga", cadence="never")
    refused(('"asynchronous"', '"choco"'), "choco", graph="ring", mixer="asynchronous")
    refused('node.wire = "sign"', wire="sign")
    refused("graph='ring'", "ring")
    refused("cadence.name = 4", cadence=4)
    refused(("perio", '"period"'), "gossip-pga", perio=3)
    refused("local = 'adamw'", local="adamw")
    refused(
        ("1 parameters", "the model"),
        make=lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))], lr=0.1),
    )


def ready(algorithm="dsgd", **options):
    model = net()
    gossip = mpigossip.Gossip(
        SingleProcess(), model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, **options
    )
    backward(model, 0, 0)
    gossip.step()
    return model, gossip


def test_gradients_that_were_never_zeroed_are_reported():
    model, gossip = ready()
    backward(model, 0, 1)
    with pytest.raises(JobError, match=naming("optimizer.zero_grad()")):
        gossip.step()
    for to_none in (True, False):
        gossip.zero_grad(to_none)
        backward(model, 0, 2)
        backward(model, 0, 3)
        gossip.step()


def clear_without_counting(model):
    """Set all gradients to zero in a way that torch's version counters do not count."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def test_gradients_may_be_cleared_through_data():
    model, gossip = ready()
    clear_without_counting(model)
    backward(model, 0, 1)
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    gossip.step()
    clear_without_counting(model)
    backward(model, 0, 2)
    backward(model, 0, 3)
    clear_without_counting(model)
    backward(model, 0, 4)
    gossip.step()
    assert any(grad is not None for grad in expected)
    backward(model, 0, 5)
    with pytest.raises(JobError, match=naming("optimizer.zero_grad()")):
        gossip.step()


def test_an_edit_during_an_exchange_is_rejected():
    model, gossip = ready(style="awc")
    with torch.no_grad():
        model.conv.weight.mul_(2)
    with pytest.raises(JobError, match=naming('overlap="never"')):
        gossip.step()
    model, gossip = ready(style="awc", overlap="never")
    with torch.no_grad():
        model.conv.weight.mul_(2)
    gossip.step()


def test_a_state_fits_a_model_that_was_changed_before_the_first_step():
    model, gossip = ready()
    other = net().to(memory_format=torch.contiguous_format)
    other.conv.requires_grad_(False)
    again = mpigossip.Gossip(SingleProcess(), other, torch.optim.SGD(other.parameters(), lr=0.1))
    other.requires_grad_(True).frozen.requires_grad_(False)
    other.to(memory_format=torch.channels_last)
    again.load_state_dict(copy.deepcopy(gossip.state_dict()))
    for one, stepper in ((model, gossip), (other, again)):
        stepper.zero_grad()
        backward(one, 0, 1)
        stepper.step()
    assert same([values(model)], [other])


METHODS = {
    "dsgd": {}, "dsgd awc": {"style": "awc"}, "d2": {}, "dsgt awc": {"style": "awc"},
    "slowmo": {"period": 2}, "dmsgd": {}, "choco": {"graph": "ring"}, "sgp": {"wire": "bf16"},
    "detag": {"cadence": "every", "period": 2},
    # After the third step, when the state is saved, an exchange of these two is in flight.
    "choco late": {"graph": "ring", "cadence": "every", "period": 2, "fragments": 1, "delay": 2},
    "diloco late": {"period": 4, "fragments": 2, "delay": 2},
}  # fmt: skip


@with_world
def train_and_resume(world):
    """Return the parameters after six steps, for each method: uninterrupted, and twice resumed.

    The state of step 3 is loaded by a new Gossip, and by the Gossip that has made all six steps.
    """
    results = {}
    for name, options in METHODS.items():

        def begin(name=name, options=options):
            model = net()
            inner = "SGD" if name in ("dmsgd", "detag") else "AdamW"
            one = getattr(torch.optim, inner)(model.parameters(), lr=0.01)
            return model, mpigossip.Gossip(world, model, one, name.split()[0], **options)

        def train(model, gossip, first, last):
            for step in range(first, last):
                gossip.zero_grad()
                backward(model, world.rank, step)
                gossip.step()
            return values(model)

        model, gossip = begin()
        train(model, gossip, 0, 3)
        kept = copy.deepcopy((model.state_dict(), gossip.state_dict()))
        if name == "diloco late":
            assert "state/fragments/received" in kept[1]["gossip"]["arrays"]
        ends = [train(model, gossip, 3, 6)]
        other, fresh = begin()
        for one, stepper in ((other, fresh), (model, gossip)):
            one.load_state_dict(kept[0])
            stepper.load_state_dict(copy.deepcopy(kept[1]))
            ends.append(train(one, stepper, 3, 6))
        results[name] = ends
    return results


def test_state_dicts_resume_bitwise(ranks):
    for each in ranks(N)(train_and_resume, timeout=120):
        for name, (whole, *others) in each.items():
            for k, other in enumerate(others):
                assert all(map(torch.equal, whole, other)), (name, k)
