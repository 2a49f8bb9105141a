"""A model of transformers, random and tiny, on a text of letters; nothing is downloaded.

    PYTHONPATH=. mpirun -n 4 mpigossip train letters.toml

The built-in task "language-model" takes the mappings that tokenizers give and the outputs that
models of transformers give.
"""

import torch
from torch.utils.data import Dataset

TEXT = "one peer a round, and after some rounds all of them have the mean; "


class Windows(Dataset):
    """Windows of a text as a tokenizer would give them: `input_ids` and `attention_mask` (T,)."""

    def __init__(self, samples, context, first):
        """Window i begins at place first + 5 i of the text, which is repeated."""
        self.samples = samples
        self.context = context
        self.first = first
        self.text = torch.tensor(list(TEXT.encode()))

    def __len__(self):
        """Number of windows."""
        return self.samples

    def __getitem__(self, index):
        """One window."""
        places = (self.first + 5 * index + torch.arange(self.context)) % len(self.text)
        return {"input_ids": self.text[places], "attention_mask": torch.ones_like(places)}


def windows(samples, test_samples, context):
    """All three are settings of every job."""
    return {
        "train": Windows(samples, context, 0),
        "test": Windows(test_samples, context, 3),
    }


def llama(width=32, layers=2):
    """A model from a configuration; its input and output have the forms that transformers gives."""
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
