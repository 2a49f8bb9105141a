"""Models that are too large are rejected before their memory is allocated."""

import math

import pytest
import torch
from torch import nn

from mpigossip import models
from mpigossip.config import JobError
from mpigossip.models import BUILDERS, counting
from mpigossip.training import assemble, costs
from tests.cases import naming

SHAPES = {"gpt": (16,), "point": (5,), "factors": (4, 3), "resnet50": (3, 32, 32)}
LARGE = {
    "layers": ("gpt", (64,), {"layers": 10**8}),
    "width": ("gpt", (64,), {"width": 2**26, "heads": 1}),
    "hidden": ("mlp", (10**4,), {"hidden": (10**9,)}),
}


@pytest.fixture
def built(monkeypatch):
    """Yield the set of device types of all parameters that the test registers."""
    devices = set()

    def add(module, name, parameter):
        devices.update({parameter.device.type} if parameter is not None else ())

    handle = nn.modules.module.register_module_parameter_registration_hook(add)
    yield devices
    handle.remove()


@pytest.mark.parametrize("name", BUILDERS)
def test_a_model_is_counted_as_it_is_built(name, monkeypatch):
    monkeypatch.setattr(counting, "TRIED_PARAMETERS", 0)
    arguments = name, SHAPES.get(name, (3, 8, 8)), 10, 0, None
    meta = models.counted(*arguments)
    real = models.model(*arguments)
    assert all(parameter.is_meta for parameter in meta.parameters())
    sizes = [{n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (meta, real)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("make", [models.model, models.counted])
@pytest.mark.parametrize("option", LARGE)
def test_a_model_that_is_too_large_is_rejected_before_it_takes_memory(option, make, built):
    name, shape, options = LARGE[option]
    with pytest.raises(JobError, match=naming(f"model.{option}", "smaller")):
        make(name, shape, 1000, 0, torch.int64 if name == "gpt" else torch.float32, **options)
    assert built <= {"meta"}


def test_the_limit_of_training_is_the_memory_of_the_host(monkeypatch, built):
    monkeypatch.setattr(models, "host_memory", lambda: 10_000)
    with pytest.raises(JobError, match=naming("model.hidden = (128,)")):
        models.model("mlp", (64,), 10, 0, hidden=(128,))
    assert built == {"meta"}
    models.counted("mlp", (10**6,), 10, 0, hidden=(128,))


def test_custom_code_that_needs_values_is_counted_as_well(tmp_path, monkeypatch):
    code = "import torch\ndef net():\n    return torch.nn.Linear(4, int(torch.ones(1).item()) + 1)"
    (tmp_path / "needs_values.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = models.counted("needs_values:net", (4,), 2, 0)
    assert module.weight.shape == (2, 4) and not module.weight.is_meta


def test_synthetic_samples_are_made_when_they_are_read():
    large = {"source": "synthetic", "shape": [4, 4], "samples": 10**9, "test_samples": 10**9}
    job = {"data": large, "model": {"name": "mlp"}}
    assert costs.subject(assemble.load(job))[0].samples == 10**9
    shape = {"source": "synthetic", "shape": [10**6, 10**6]}
    data, _ = costs.data_or_stand_in(assemble.load({"data": shape}))
    with pytest.raises(JobError, match=naming("data.shape")):
        data.sample("train")
    assert math.prod(data.shape) == 10**12


def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def test_a_model_with_lazy_modules_is_built_to_be_counted():
    module = models.counted(f"{__name__}:lazy", (1, 2, 3), 4, 0)
    assert module[1].weight.shape == (4, 6) and not module[1].weight.is_meta
