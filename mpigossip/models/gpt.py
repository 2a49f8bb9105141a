"""Language model on tokens: GPT-2 (Radford et al., 2019), with newer components as options."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mpigossip.config import JobError
from mpigossip.config.limits import Positive

BASE = 10_000.0
"""Base of the angles of rotary positions, whose longest wavelength is about 2π · BASE tokens."""
NORMS: dict[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
"""Class of the norm layers, by the value of the option ``norm``."""

Turn = tuple[Tensor, Tensor]
"""Cosines and sines, (T, D/2) each, of the angles by which queries and keys are rotated."""


def turns(time: int, size: int, device: torch.device) -> Turn:
    """Return the cosines and sines of the angles of rotary positions (Su et al., 2021).

    The angles of position t are t · BASE^(−2k/D) for k = 0 … D/2 − 1.

    :param time: T, number of positions
    :param size: D, width of a head
    :param device: device of the results
    """
    waves = torch.exp(torch.arange(0, size, 2, device=device) * (-math.log(BASE) / size))
    angles = torch.outer(torch.arange(time, device=device, dtype=torch.float32), waves)
    return angles.cos(), angles.sin()


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Rotate the pairs (x_k, x_{k+D/2}) of x, (…, T, D), by angles from :func:`turns`."""
    cos, sin = (part.to(x.dtype) for part in turn)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """Block of a transformer: causal attention, then two layers with an inner width of 4 · width.

    Each of the two begins with a norm ("layer" or "rms"), and its result is added to its input. The
    width is a multiple of the number of heads.
    """

    def __init__(self, width: int, heads: int, norm: str = "layer", bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = NORMS[norm](width)
        self.norm2 = NORMS[norm](width)
        self.attention = nn.Linear(width, 3 * width, bias)
        self.join = nn.Linear(width, width, bias)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: Tensor, turn: Turn | None = None) -> Tensor:
        """Return the output for x; both have the shape (B, T, width)."""
        batch, time, width = x.shape
        split = self.attention(self.norm1(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        if turn is not None:
            query = turned(query, turn)
            key = turned(key, turn)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Language model, which maps tokens (B, T) int64 to scores (B, T, classes).

    Input and output use the same embedding matrix. The parameters are the parameters of
    :func:`gpt`, except that ``rotary`` states whether positions are rotary, and ``context`` is the
    number of learned positions, which limits T.
    """

    def __init__(
        self,
        context: int,
        classes: int,
        layers: int,
        heads: int,
        width: int,
        *,
        rotary: bool = False,
        norm: str = "layer",
        bias: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.turned = width // heads if rotary else 0
        self.recompute = recompute
        self.tokens = nn.Embedding(classes, width)
        self.places = None if rotary else nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, norm, bias) for _ in range(layers))
        self.norm = NORMS[norm](width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Layers whose output is added to a residual have smaller initial weights, by
                # 1/√(number of additions).
                adds = name.endswith(("join.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / (math.sqrt(2 * layers) if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        device = tokens.device
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(time, device=device))
        turn = turns(time, self.turned, device) if self.turned else None
        for block in self.blocks:
            # A block draws no random numbers, so their state need not be restored.
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, turn, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, turn)
        return functional.linear(self.norm(x), self.tokens.weight)


def gpt(
    shape: tuple[int, ...],
    classes: int,
    *,
    layers: Positive = 4,
    heads: Positive = 4,
    width: Positive = 128,
    positions: Literal["learned", "rotary"] = "learned",
    norm: Literal["layer", "rms"] = "layer",
    bias: bool = True,
    recompute: bool = False,
) -> nn.Module:
    """Return a causal transformer for samples of T tokens.

    With the default options, its blocks have 0.8 million parameters.

    :param shape: shape of a sample, (T,)
    :param classes: number of tokens
    :param layers: number of blocks
    :param heads: number of attention heads
    :param width: width of the model, a multiple of ``heads``
    :param positions: "learned": a learned vector is added for each position; "rotary": queries and
        keys are rotated according to their positions
    :param norm: "layer": LayerNorm; "rms": RMSNorm
    :param bias: whether the linear layers have a bias
    :param recompute: whether to keep only the input of each block, and to compute its activations
        again during the backward pass. The memory then contains the activations of one block
        instead of all blocks. This takes a third more computation; the result is bitwise identical
    :raises JobError: if samples are not tokens, if ``width`` is not a multiple of ``heads``, or if
        rotary positions would rotate heads of odd width
    """
    rotary = positions == "rotary"
    if len(shape) != 1:
        raise JobError(
            'model.name = "gpt" takes tokens in samples of shape (T,), but samples have the shape '
            f"{shape}; pack text with: mpigossip data pack FOLDER OUT.h5 --text"
        )
    if width % heads:
        raise JobError(
            f"model.width = {width} is not a multiple of model.heads = {heads}; the next "
            f"multiple is {width + heads - width % heads}"
        )
    if rotary and width // heads % 2:
        raise JobError(
            f"model.width / model.heads = {width // heads}: rotary positions rotate pairs of "
            f"values and need an even number; choose model.width = {width + heads}"
        )
    return GPT(
        shape[0],
        classes,
        layers,
        heads,
        width,
        rotary=rotary,
        norm=norm,
        bias=bias,
        recompute=recompute,
    )
