"""A small language model on bytes, of the GPT-2 form (Radford et al., 2019)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpigossip.config import JobError


class Block(nn.Module):
    """Norm, causal attention, norm, two layers of 4x width; a residual around each half."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        batch, time, width = x.shape
        split = self.attention(self.norm1(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens (B, T) int64 to (B, T, classes); input and output share one embedding matrix."""

    def __init__(self, context: int, classes: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(classes, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # What adds to the residual stream is scaled by 1/√(number of additions).
                adds = name.endswith(("join.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, 0.02 / (math.sqrt(2 * layers) if adds else 1.0))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the unnormalized log-probabilities of the next token."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def gpt(
    shape: tuple[int, ...], classes: int, *, layers: int = 4, heads: int = 4, width: int = 128
) -> nn.Module:
    """Causal transformer for samples of (T,) tokens; 0.8 million parameters as it stands."""
    if len(shape) != 1:
        raise JobError(
            [
                f'model "gpt" takes tokens, samples of shape (T,), got {shape}; pack text '
                "with: mpigossip data pack FOLDER OUT.h5 --text"
            ]
        )
    if width % heads:
        raise JobError(
            [
                f"model.width = {width} is not a multiple of model.heads = {heads}; the "
                f"next one is {width + heads - width % heads}"
            ]
        )
    return GPT(shape[0], classes, layers, heads, width)
