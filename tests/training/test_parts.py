"""Parts of a job: jobs, custom loops and plans make the same object, each with its layout."""

import numpy as np
import torch
from torch import nn

import mpigossip
from mpigossip import algorithms
from mpigossip.cluster.world import SingleProcess
from mpigossip.engine.vector import ParameterLayout, flatten
from mpigossip.mixing.base import ExchangeKind
from mpigossip.training import assemble, parts
from mpigossip.training.costs import exchanges, subject
from mpigossip.training.parts import make_graph, make_parts
from tests.cases import on_each

N = 4
TWO = ParameterLayout(("x",), ((1024,),), ((1,),), (0,), size=1024, decayed=600, slots=2)


def job(settings="", **sections):
    return assemble.load(sections, settings.split())


def parts_of(settings, flat=TWO, **more):
    made = job(settings)
    return make_parts(made, make_graph(made, N), flat, **more)


@on_each("name", list(algorithms.BUILDERS))
def test_every_method_is_made_without_neighbours_and_a_model(name):
    alone = make_parts(job(f"algorithm.name={name}"))
    near = parts_of(f"algorithm.name={name}") if name not in ("ceca", "defacto") else alone
    assert alone.method.always_global == near.method.always_global
    assert alone.method.ahead == near.method.ahead and alone.layout.widths == (0,)
    assert alone.cadence.kinds == near.cadence.kinds


def test_a_layout_contains_the_local_shards():
    both = parts_of("algorithm.name=dsgt")
    second = parts_of("", shards=range(1, 2), devices=["cpu"])
    assert both.layout.widths == (512, 512) and both.layout.first == (0, 512)
    assert both.layout.vectors == 2 and len(both.methods) == 2
    assert second.layout.widths == (512,) and second.layout.first == (512,)
    assert second.layout.devices == ("cpu",) and len(second.methods) == 1


def test_each_shard_decays_its_own_elements():
    made = parts_of("algorithm.name=dsgd local.name=adamw local.decoupled_decay=0.5")
    x = torch.ones(1, 512)
    change = []
    for method in made.methods:
        now = x.clone()
        out = (torch.empty(1, 512),)
        step = algorithms.Step(0, 0, ExchangeKind.GOSSIP, 0.1, counts=(0,))
        method.send(now, torch.zeros(1, 512), method.init(now), out, step)
        change.append(int((out[0] != 1).sum()))
    assert change == [512, 600 - 512]


def test_a_fragments_message_consists_of_whole_buckets():
    words = "algorithm.name=diloco cadence.period=4 cadence.fragments=4"
    full = parts_of(words)
    assert full.layout.widths == (128, 128) and full.layout.first == (0, 128)
    coded = parts_of(f"{words} node.wire=qsgd")
    assert coded.layout.widths == (512, 512)
    cuts = full.make_fragments(TWO, range(2)).cuts
    for fragments in cuts:
        columns = [np.r_[c] for each in fragments for c in each]
        assert sorted(np.concatenate(columns)) == list(range(512))
    assert parts_of("").make_fragments(TWO, range(2)) is None


def test_cadences_depend_on_the_graph_and_the_steps_of_the_run():
    made = parts_of("algorithm.name=adpsgd", total=1000)
    assert "variance" in made.cadence.measures
    assert make_parts(job("algorithm.name=parallel")).cadence.kinds == {ExchangeKind.GLOBAL}


def count(monkeypatch):
    """Count how often graphs and methods are made."""
    calls = dict.fromkeys(("graph", "build"), 0)

    def counting(module, name):
        made = getattr(module, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return made(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counting(parts.graphs, "graph")
    counting(parts.algorithms, "build")
    return calls


def test_an_assembly_makes_the_graph_once(monkeypatch):
    calls = count(monkeypatch)
    made = assemble.assemble(job("model.name=mlp"), SingleProcess(), N)
    made.close()
    assert calls["graph"] == 1
    assert (
        made.engine.cadence is made.parts.cadence and made.engine.mixer.layout is made.parts.layout
    )


def test_a_loop_makes_the_graph_once(monkeypatch):
    calls = count(monkeypatch)
    model = nn.Linear(3, 2)
    with SingleProcess() as world:
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = mpigossip.Gossip(world, model, inner, "choco")
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert optimizer.engine.cadence is optimizer._node.parts.cadence
    assert calls["graph"] == 1


def test_plan_and_a_loop_have_the_parts_of_the_job():
    """All three give the same layout, kinds and graph for the same job."""
    words = "model.name=mlp algorithm.name=dsgt node.wire=qsgd graph.name=exponential"
    made = assemble.assemble(job(words), SingleProcess(), N)
    planned = exchanges(subject(job(words))[0], N).parts
    of_loop = make_parts(job(words), made.parts.graph, flatten(made.trainer.replicas.modules[0][0]))
    made.close()
    for other in (planned, of_loop):
        assert other.graph == made.parts.graph and other.cadence.kinds == made.parts.cadence.kinds
        assert other.layout.sent_bytes == made.parts.layout.sent_bytes
        assert other.layout.first == made.parts.layout.first


def test_another_mixer_can_be_requested():
    made = parts_of("node.mixer=asynchronous algorithm.name=dsgd")
    assert not made.open_mixer(SingleProcess()).synchronous
    assert made.open_mixer(SingleProcess(), mixer="synchronous").synchronous
