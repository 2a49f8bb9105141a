"""Networks by name: mlp, lenet, resnet20, resnet56, resnet50, gpt, or "package.module:factory"."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpigossip.config import JobError
from mpigossip.config.errors import UserError
from mpigossip.config.limits import AboveZero, Positive
from mpigossip.config.memory import host_memory
from mpigossip.config.readable import format_bytes as in_bytes
from mpigossip.config.toml import near
from mpigossip.config.user_code import call_factory, describe_exception, import_object, is_user_code
from mpigossip.models.counting import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    is_small,
    limited,
    on_meta,
)
from mpigossip.models.gpt import gpt
from mpigossip.models.resnet import image_shape, resnet20, resnet50, resnet56

Shape = tuple[int, ...]


def mlp(shape: Shape, classes: int, *, hidden: tuple[Positive, ...] = (128,)) -> nn.Module:
    """Fully connected layers of the widths `hidden`, ReLU between them; any (…) input shape."""
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, next_wide in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(wide, next_wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling: two 5x5 convolutions (6, 16), then 120, 84, classes.

    Input (C, H, W). Images smaller than 32 pixels (28 of MNIST, 8 of the digits) are padded by 2
    before each convolution, so that H, W >= 4 will do. LeCun et al., Proc. IEEE 86 (1998).
    """
    channels, height, width = image_shape(shape, "lenet", 4)
    padding = 0 if min(height, width) >= 32 else 2
    sides = [((side + 2 * padding - 4) // 2 + 2 * padding - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * sides[0] * sides[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class Point(nn.Module):
    """A point of a function: a parameter, given back as it is."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.x = nn.Parameter(start)

    def forward(self) -> Tensor:
        return self.x


def point(shape: Shape) -> nn.Module:
    """A point of as many entries as the last dimension of the samples, 0 at first."""
    return Point(torch.zeros(shape[-1]))


def factors(shape: Shape, *, rank: Positive = 3, size: AboveZero = 0.3) -> nn.Module:
    """U (m, rank) over V (k, rank) for samples (m, k), normal numbers of deviation `size`."""
    return Point(size * torch.randn(sum(shape), rank))


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "resnet20": resnet20,
    "resnet56": resnet56,
    "resnet50": resnet50,
    "gpt": gpt,
    "point": point,
    "factors": factors,
}
"""What `model.name` can be; keyword-only parameters are the options of section `[model]`."""


def model(
    name: str,
    shape: Shape,
    classes: int,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """Return a network for samples of this shape, its parameters drawn from seed.

    name: one of BUILDERS, or "package.module:factory", which is given the options, and shape and
    classes where it names them, or where it can't be called without; dtype: of the samples,
    torch.int64 for tokens. The global random generator is left as it was. The result has been tried
    on one sample of zeros (of the last token), for scores of all classes; with dtype None it
    hasn't, and may give anything. Raises JobError for what can't be imported, built or applied to
    the shape, and for a model whose parameters don't fit into the memory of this host, before that
    memory is allocated.
    """
    described = _described(name, shape, options)
    memory = host_memory()
    smaller = f"this host has {in_bytes(memory)} of memory: {_smaller(options)}"
    if name in BUILDERS:  # custom code is called once only
        with limited(described, memory // 4, MAX_TENSORS, smaller):
            _build_on_meta(name, shape, classes, options)
    with torch.random.fork_rng(devices=()):
        # Not torch.manual_seed: that would reseed the generators of all GPUs too.
        torch.default_generator.manual_seed(seed)
        with limited(described, memory // 4, math.inf, smaller):
            network = _build(name, shape, classes, options)
        if dtype is not None:
            # tokens: the last one, which a model made for fewer hasn't
            value = classes - 1 if dtype == torch.int64 else 0
            _try(network, name, torch.full((1, *shape), value, dtype=dtype), classes)
    return network


def counted(
    name: str,
    shape: Shape,
    classes: int,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """Return a network whose parameters are only to be counted, with the arguments of `model`.

    A large network lies on the meta device: it takes no memory, and hasn't been tried on a sample.
    Custom code that can't run there makes the network that `model` returns. Raises JobError, too,
    for more parameters than any host has memory for.
    """
    built_in = name in BUILDERS
    parameters, tensors = (MAX_PARAMETERS, MAX_TENSORS) if built_in else (math.inf, math.inf)
    described = _described(name, shape, options)
    smaller = _smaller(options)
    try:
        with limited(described, parameters, tensors, smaller), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # values that are loaded don't get anywhere
            network = _build_on_meta(name, shape, classes, options)
    except JobError:
        if built_in:
            raise
    else:
        if not is_small(network, tuple(shape), dtype == torch.int64):
            return network
    return model(name, shape, classes, seed, dtype, **options)


def _build_on_meta(name: str, shape: Shape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a network on the meta device; the global random generator is left as it was."""
    with torch.random.fork_rng(devices=()), on_meta():
        return _build(name, shape, classes, options)


def _build(name: str, shape: Shape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Call the builder of this name; JobError if it fails or returns something else."""
    builder = _factory(name)
    try:
        network = call_factory(builder, {"shape": tuple(shape), "classes": classes}, options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f'model "{name}" can\'t be built with the options {options} for samples of shape '
            f"{tuple(shape)} and {classes} classes: {describe_exception(error)}"
        ) from error
    if not isinstance(network, nn.Module):
        raise JobError(
            f'model "{name}" returned {type(network).__name__}; it should return a torch.nn.Module'
        )
    return network


def _described(name: str, shape: Shape, options: Mapping[str, Any]) -> str:
    """Describe a model by the settings that decide its size."""
    settings = "".join(f", model.{key} = {options[key]}" for key in _sizes(options))
    return f'model.name = "{name}"{settings}, for samples of shape {tuple(shape)},'


def _sizes(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that are whole numbers, or several of them."""
    return [key for key, value in options.items() if type(value) in (int, tuple, list)]


def _smaller(options: Mapping[str, Any]) -> str:
    """Name the settings that decide the size of a model, as a remedy."""
    settings = [*(f"model.{key}" for key in _sizes(options)), "the shape of the samples"]
    return f"make {' or '.join(settings)} smaller"


def decayed(module: nn.Module) -> set[str]:
    """Return the parameters that take weight decay when biases and norm parameters are left alone.

    These are the parameters of two or more dimensions: matrices, convolutions, embeddings.
    """
    return {name for name, parameter in module.named_parameters() if parameter.ndim > 1}


def loss_and_correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats and the number of right predictions.

    outputs: (..., classes), targets: (...) int64; for tokens both have a time axis.
    """
    flat = outputs.flatten(0, -2).float()
    wanted = targets.flatten()
    return functional.cross_entropy(flat, wanted), (flat.detach().argmax(-1) == wanted).sum()


def scores(outputs: Any) -> Tensor:
    """The scores that a model gives: a tensor, or in `logits` as models of transformers do."""
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def _factory(name: str) -> Callable[..., nn.Module]:
    """Return the builder of this name or the object that it imports."""
    if name in BUILDERS:
        return BUILDERS[name]
    if is_user_code(name):
        return import_object(
            "model.name", name, "(shape, classes, **options) that returns a module"
        )
    raise JobError(
        f'model.name = "{name}" is unknown, and not of the form "package.module:factory"; '
        f"{near(name, BUILDERS)}"
    )


def _try(network: nn.Module, name: str, sample: Tensor, classes: int) -> None:
    """Apply the network to one sample (1, ...) and compare the shape of what comes out."""
    shape = tuple(sample.shape[1:])
    tokens = sample.dtype == torch.int64
    what = f"tokens of shape {shape}, 0 … {classes - 1}" if tokens else f"samples of shape {shape}"
    expected = (*sample.shape, classes) if sample.dtype == torch.int64 else (1, classes)
    training = network.training
    network.eval()
    try:
        with torch.no_grad():
            outputs = scores(network(sample))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise JobError(f'model "{name}" can\'t be applied to {what}: {error}') from error
    finally:
        network.train(training)
    if not isinstance(outputs, Tensor):
        raise JobError(
            f'model "{name}" gives a {type(outputs).__name__} for one of {what}, not a tensor of '
            f"shape {expected} or something with such `.logits`; a task.name of your own takes "
            "what it wants"
        )
    found = tuple(outputs.shape)
    if found != expected:
        raise JobError(
            f'model "{name}" gives outputs of shape {found} for one of {what}; '
            f"{classes} classes need {expected}"
        )
