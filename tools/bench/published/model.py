"""Model with the parameters and buffers of the transformer whose step times were published.

Only their sizes matter here: the model cannot be trained.
"""

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
    """Transformer whose parameters are in the order in which a forward pass would use them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores (batch, time, VOCABULARY) of tokens (batch, time), without the layers.

        The layers are left out, because only their parameters are counted.
        """
        return self.output(self.norm(self.embedding(tokens)))


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model; its sizes are constants, so that ``shape`` and ``classes`` are ignored."""
    return Model()
