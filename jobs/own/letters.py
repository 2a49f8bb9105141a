"""A tiny model of the package transformers, trained from random weights; nothing is downloaded.

    PYTHONPATH=. mpirun -n 4 mpigossip train letters.toml

The built-in task "language-model" accepts batches in the form of tokenizers' results (mappings with
"input_ids") and the output objects that models of transformers return.
"""

import torch
from torch.utils.data import Dataset

TEXT = "one peer a round, and after some rounds all of them have the mean; "


class Windows(Dataset):
    """Windows of a text, each a mapping like a tokenizer's result.

    Its items `input_ids` and `attention_mask` have the shape (context,).
    """

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
    """Return the training set and the test set, as a dict.

    :param samples: number of training samples, the setting data.samples
    :param test_samples: number of test samples, the setting data.test_samples
    :param context: number of bytes of a sample, the setting data.context
    """
    return {
        "train": Windows(samples, context, 0),
        "test": Windows(test_samples, context, 3),
    }


def llama(width=32, layers=2):
    """Build a Llama model of the package transformers, with random weights."""
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
