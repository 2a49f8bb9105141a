"""Parameters and buffers of the model whose step times were published; it cannot be trained."""

import torch
from torch import nn

VOCABULARY = 50_257
WIDTH = 256
HIDDEN = 768
LAYERS = 6
CACHE_ELEMENTS = 2_097_152
"""Elements of the cache of rotary position encodings in each layer: 8.39 MB of float32."""


class Layer(nn.Module):
    """Parameters of one layer: attention, feed-forward network and two norms."""

    def __init__(self):
        super().__init__()
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.register_buffer("rotary_cache", torch.empty(CACHE_ELEMENTS))


class Model(nn.Module):
    """All parameters, in the order in which a forward pass uses them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores without the layers, which only have to be counted."""
        return self.output(self.norm(self.embedding(tokens)))


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model; shape and number of classes are fixed by the publication."""
    return Model()
