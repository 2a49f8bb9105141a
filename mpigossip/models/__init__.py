"""Models by name: the built-in models of `BUILDERS`, and custom ones, "package.module:factory"."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpigossip.config import JobError
from mpigossip.config.errors import UserError
from mpigossip.config.host import host_memory
from mpigossip.config.limits import AboveZero, Positive
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
    """Return a network of fully connected layers with ReLU in between, for samples of any shape.

    :param shape: shape of a sample
    :param classes: number of classes
    :param hidden: widths of the hidden layers
    """
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, next_wide in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(wide, next_wide), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def lenet(shape: Shape, classes: int) -> nn.Module:
    """Return LeNet-5 with ReLU and max pooling (LeCun et al., Proc. IEEE 86, 1998).

    It has two 5x5 convolutions with 6 and 16 channels, then layers of 120, 84 and ``classes``
    units. Images with less than 32 pixels per side, such as MNIST, are padded by 2 before each
    convolution, so that H, W >= 4 is enough.

    :param shape: shape of a sample, (C, H, W)
    :param classes: number of classes
    :raises JobError: if samples are no images, or too small
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
    """Module whose output is its only parameter, which is a point in the domain of a function."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.x = nn.Parameter(start)

    def forward(self) -> Tensor:
        return self.x


def point(shape: Shape) -> nn.Module:
    """Return a :class:`Point` at 0; the last dimension of a sample is its number of elements."""
    return Point(torch.zeros(shape[-1]))


def factors(shape: Shape, *, rank: Positive = 3, size: AboveZero = 0.3) -> nn.Module:
    """Return a :class:`Point` for the factorization of matrices, (m, k), into U Vᵀ.

    The point consists of U, (m, rank), stacked on V, (k, rank).

    :param shape: shape (m, k) of the matrices
    :param rank: number of columns of U and V
    :param size: standard deviation of the elements, which are normal random numbers
    """
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
"""Builder of each name that `model.name` may have; their keyword-only parameters are the options of
section `[model]`.
"""


def model(
    name: str,
    shape: Shape,
    classes: int,
    seed: int,
    dtype: torch.dtype | None = torch.float32,
    **options: Any,
) -> nn.Module:
    """Return a model for samples of this shape, with parameters initialized from a seed.

    The state of the CPU's global random number generator is not changed. The model is tested on a
    sample of zeros (for tokens, of copies of the last token), and must return a score for each
    class.

    :param name: name in BUILDERS, or "package.module:factory". A factory gets the options; if it
        has parameters `shape` and `classes`, or cannot be called without these values, it gets
        them, too
    :param shape: shape of a sample, without the batch dimension
    :param classes: number of classes, or of tokens
    :param seed: seed of the initialization
    :param dtype: type of the samples, torch.int64 for tokens; None: do not test the model, which
        may then return anything
    :param options: options of the model, as in section `[model]`
    :raises JobError: if the model cannot be imported, built or applied to a sample; or, before
        memory is allocated, if its parameters do not fit into the memory of this host
    :raises UserError: unchanged, if the builder raises it
    """
    described = _described(name, shape, options)
    memory = host_memory()
    smaller = f"this host has {in_bytes(memory)} of memory: {_smaller(options)}"
    # Custom code is called only once, because it may have side effects.
    if name in BUILDERS:
        with limited(described, memory // 4, MAX_TENSORS, smaller):
            _build_on_meta(name, shape, classes, options)
    with torch.random.fork_rng(devices=()):
        # torch.manual_seed would also reseed the generators of all GPUs.
        torch.default_generator.manual_seed(seed)
        with limited(described, memory // 4, math.inf, smaller):
            network = _build(name, shape, classes, options)
        if dtype is not None:
            # a model for fewer tokens fails on the last token
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
    """Return a model whose parameters are to be counted, but not used.

    A large model is built on torch's meta device, so that it takes no memory, and is not tested on
    a sample. A small model, and custom code that cannot run on this device, are built by `model`.

    :param name: name in BUILDERS, or "package.module:factory"
    :param shape: shape of a sample, without the batch dimension
    :param classes: number of classes, or of tokens
    :param seed: seed of the initialization
    :param dtype: type of the samples; None: do not test the model
    :param options: options of the model
    :raises JobError: if the model cannot be built or, if it is small, applied to a sample; or if a
        built-in model exceeds `MAX_PARAMETERS` or `MAX_TENSORS`
    :raises UserError: unchanged, if the builder raises it
    """
    built_in = name in BUILDERS
    parameters, tensors = (MAX_PARAMETERS, MAX_TENSORS) if built_in else (math.inf, math.inf)
    described = _described(name, shape, options)
    smaller = _smaller(options)
    try:
        with limited(described, parameters, tensors, smaller), warnings.catch_warnings():
            # torch warns that values loaded on the meta device are lost.
            warnings.simplefilter("ignore")
            network = _build_on_meta(name, shape, classes, options)
    except JobError:
        if built_in:
            raise
    else:
        if not is_small(network, tuple(shape), dtype == torch.int64):
            return network
    return model(name, shape, classes, seed, dtype, **options)


def _build_on_meta(name: str, shape: Shape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a model on torch's meta device, without changing the global random number generator."""
    with torch.random.fork_rng(devices=()), on_meta():
        return _build(name, shape, classes, options)


def _build(name: str, shape: Shape, classes: int, options: Mapping[str, Any]) -> nn.Module:
    """Build a model by calling the builder of its name.

    :param name: value of `model.name`
    :param shape: shape of a sample, without the batch dimension
    :param classes: number of classes, or of tokens
    :param options: options of the model
    :raises JobError: if the builder is unknown or fails, or does not return a module
    :raises UserError: unchanged, if the builder raises it
    """
    builder = _factory(name)
    try:
        network = call_factory(builder, {"shape": tuple(shape), "classes": classes}, options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(
            f'model.name = "{name}" can\'t be built with the options {options} for samples of '
            f"shape {tuple(shape)} and {classes} classes: {describe_exception(error)}; change "
            "section [model], or the function that it names"
        ) from error
    if not isinstance(network, nn.Module):
        raise JobError(
            f'model.name = "{name}" returned {type(network).__name__}; it must return a '
            "torch.nn.Module"
        )
    return network


def _described(name: str, shape: Shape, options: Mapping[str, Any]) -> str:
    """Return a description of a model for messages, with the settings that determine its size.

    :param name: value of `model.name`
    :param shape: shape of a sample
    :param options: options of the model
    """
    settings = "".join(f", model.{key} = {options[key]}" for key in _sizes(options))
    return f'model.name = "{name}"{settings}, for samples of shape {tuple(shape)},'


def _sizes(options: Mapping[str, Any]) -> list[str]:
    """Return the names of options that may determine the size of a model: integers and lists."""
    return [key for key, value in options.items() if type(value) in (int, tuple, list)]


def _smaller(options: Mapping[str, Any]) -> str:
    """Return the remedy for a model that is too large, with settings that determine its size."""
    settings = [*(f"model.{key}" for key in _sizes(options)), "the shape of the samples"]
    return f"make {' or '.join(settings)} smaller"


def decayed(module: nn.Module) -> set[str]:
    """Return the names of the parameters that get weight decay if biases and norms do not.

    They are the parameters with two or more dimensions: matrices, convolutions, embeddings.
    """
    return {name for name, parameter in module.named_parameters() if parameter.ndim > 1}


def loss_and_correct(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy in nats and the number of correct predictions.

    :param outputs: scores, (..., classes); for tokens, (B, T, classes)
    :param targets: classes, (...) int64
    """
    flat = outputs.flatten(0, -2).float()
    labels = targets.flatten()
    return functional.cross_entropy(flat, labels), (flat.detach().argmax(-1) == labels).sum()


def scores(outputs: Any) -> Tensor:
    """Return the scores in ``outputs``, which a model has returned.

    ``outputs`` is a tensor of scores, or an object with the attribute `logits`, as in transformers.
    Any other object is returned unchanged.
    """
    return outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", outputs)


def _factory(name: str) -> Callable[..., nn.Module]:
    """Return the built-in builder, or import the custom builder, that `model.name` names.

    :param name: value of `model.name`
    :raises JobError: if the name is unknown, or the custom builder can't be imported
    """
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
    """Apply the model to a batch of one sample, and check the shape of its output.

    :param network: the model
    :param name: value of `model.name`, for messages
    :param sample: the batch, (1, …)
    :param classes: number of classes, or of tokens
    :raises JobError: if the model fails, or its output has another shape
    """
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
        raise JobError(
            f'model.name = "{name}" can\'t be applied to {what} ({error}); choose another '
            "model.name, or data of another shape"
        ) from error
    finally:
        network.train(training)
    if not isinstance(outputs, Tensor):
        raise JobError(
            f'model.name = "{name}" returns a {type(outputs).__name__} for one of {what}; return a '
            f"tensor of shape {expected} or an object with such `.logits`, or set task.name to a "
            "custom task that accepts this output"
        )
    output_shape = tuple(outputs.shape)
    if output_shape != expected:
        raise JobError(
            f'model.name = "{name}" returns outputs of shape {output_shape} for one of {what}; '
            f"{classes} classes need {expected}; change the last layer of the model, or the number "
            "of classes of the data"
        )
