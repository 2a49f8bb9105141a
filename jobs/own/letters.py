"""A tiny, randomly initialized model of transformers, trained on a text; nothing is downloaded.

    PYTHONPATH=. mpirun -n 4 mpigossip train letters.toml

The built-in task "language-model" accepts the mappings that tokenizers return and the outputs that
models of transformers return.
"""

import torch
from torch.utils.data import Dataset

TEXT = "one peer a round, and after some rounds all of them have the mean; "


class Windows(Dataset):
    """Windows of a text in the form of tokenizers' results: `input_ids`, `attention_mask` (T,)."""

    def __init__(self, samples, context, first):
        """Prepare ``samples`` windows of ``context`` bytes.

        Window i begins at position ``first`` + 5 i of the text, which is repeated endlessly.
        """
        self.samples = samples
        self.context = context
        self.first = first
        self.text = torch.tensor(list(TEXT.encode()))

    def __len__(self):
        """Return the number of windows."""
        return self.samples

    def __getitem__(self, index):
        """Return window number ``index`` with its attention mask, which is 1 everywhere."""
        places = (self.first + 5 * index + torch.arange(self.context)) % len(self.text)
        return {"input_ids": self.text[places], "attention_mask": torch.ones_like(places)}


def windows(samples, test_samples, context):
    """Return the training set and the test set; the three parameters are settings of every job."""
    return {
        "train": Windows(samples, context, 0),
        "test": Windows(test_samples, context, 3),
    }


def llama(width=32, layers=2):
    """Build a Llama model from a configuration; inputs and outputs are as in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)
