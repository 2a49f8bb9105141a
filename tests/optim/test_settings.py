"""Options of `Gossip`: each goes to the section of a job that has it, or that it names."""

import math

import pytest

from mpigossip.cluster.world import SingleProcess
from mpigossip.config import JobError
from mpigossip.config.limits import LARGEST
from mpigossip.optim.settings import settings
from tests.cases import naming, on_each


def read(algorithm, graph=None, folder=None, world_timeout_s=300.0, **options):
    """Return the job for these arguments of Gossip on 4 nodes."""
    world = SingleProcess()
    world.size = 4
    world.timeout_s = world_timeout_s
    cadence = options.pop("cadence", None)
    return settings(
        world, "cpu", algorithm, graph, cadence, None, "synchronous", folder, options
    ).job


@on_each(
    ("algorithm", "graph", "key"),
    [
        ("d2", None, "lazy"),
        ("d2", "ring", "lazy"),
        ("detag", "od-equidyn", "eta"),
    ],
)
def test_an_option_of_two_sections_is_rejected_unless_it_names_its_section(algorithm, graph, key):
    value = True if key == "lazy" else 0.25
    with pytest.raises(JobError) as raised:
        read(algorithm, graph, **{key: value})
    for setting in (f"algorithm.{key}", f"graph.{key}", f"graph_{key}={value}"):
        assert setting in str(raised.value)


@pytest.mark.parametrize("form", ["{}_{}", "{}.{}"])
def test_an_option_may_name_its_section(form):
    lazy = {form.format(section, "lazy"): True for section in ("algorithm", "graph")}
    of_algorithm, of_graph = ({name: value} for name, value in lazy.items())
    job = read("d2", "ring", **of_graph)
    assert job.graph.lazy and "lazy" not in job.algorithm.options
    job = read("d2", "ring", **of_algorithm)
    assert job.algorithm.options["lazy"] is True and not job.graph.lazy
    job = read("d2", "ring", **lazy)
    assert job.algorithm.options["lazy"] is True and job.graph.lazy
    assert read("dsgd", lazy=True).graph.lazy
    job = read("detag", "od-equidyn", **{form.format("graph", "eta"): 0.25})
    assert job.graph.options["eta"] == 0.25 and "eta" not in job.algorithm.options
    assert read("dsgd", **{form.format("node", "timeout_s"): 7.0}).node.timeout_s == 7.0


def test_options_that_mean_the_same_set_all_of_their_sections(tmp_path):
    job = read("defacto", length=4)
    assert job.algorithm.options["length"] == job.cadence.options["length"] == 4
    job = read("dsgd", folder=tmp_path, on_error="continue")
    assert job.checkpoint.on_error == job.log.on_error == "continue"
    job = read("dsgd", folder=tmp_path, log_on_error="continue")
    assert (job.checkpoint.on_error, job.log.on_error) == ("stop", "continue")


@on_each(
    ("options", "message"),
    [
        ({"timeout_s": 5.0, "node_timeout_s": 6.0}, ("node_timeout_s = 6.0", "node.timeout_s")),
        ({"log_on_error": "stop"}, ("log_on_error", 'run="runs/mine"')),
        ({"graph_lazzy": True}, ("graph_lazzy", "unknown")),
        ({"cadence_lazy": True}, ("cadence_lazy", "unknown")),
        ({"lazy_graph": True}, ("lazy_graph", "unknown")),
        ({"outer": {"name": "SGD"}}, ("outer", 'algorithm = "diloco"')),
        ({"alpha": 0.1}, ("alpha", 'cadence = "qsr"')),
    ],
)
def test_options_without_a_single_meaning_are_rejected(options, message):
    with pytest.raises(JobError, match=naming(message)):
        read("dsgd", **options)


@on_each("cadence", ["gossip-pga", "global", "cpsgd"])
def test_global_averages_are_accepted_or_the_style_that_accepts_them_is_named(cadence):
    """With adapt-while-combine, nodes differ by one step after a global average."""
    with pytest.raises(JobError, match=naming("cadence.name", 'algorithm.style = "atc"')):
        read("dsgd", style="awc", cadence=cadence)
    assert read("dsgd", style="atc", cadence=cadence).cadence.name == cadence
    for algorithm in ("dsgt", "momentum-tracking"):
        assert read(algorithm, style="awc", cadence=cadence).cadence.name == cadence
    with pytest.raises(JobError) as raised:
        read("choco", "ring", cadence=cadence)
    assert "style" not in str(raised.value)


@on_each(("given", "setting"), [(math.inf, LARGEST), (12.5, 12.5)])
def test_the_time_limit_of_a_world_is_a_valid_setting(given, setting):
    assert read("dsgd", world_timeout_s=given).node.timeout_s == setting
    assert read("dsgd", world_timeout_s=given, timeout_s=7.0).node.timeout_s == 7.0
