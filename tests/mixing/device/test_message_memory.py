"""Memory of the transport by messages: separate from torch's, if CuPy is installed."""

import pytest
import torch

from mpigossip.config import readable
from mpigossip.mixing.device import memory

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """Replace the allocations on GPUs; return the names of the functions that were called."""
    calls = []
    for name in ("private", "ordinary"):
        monkeypatch.setattr(memory, name, lambda *_, name=name: calls.append(name))
    return calls


def test_messages_have_separate_allocations(calls, monkeypatch):
    monkeypatch.setattr(memory, "_cupy", lambda device: None)
    memory.message_memory(16, GPU)
    assert calls == ["private"]
    memory.message_memory(16, torch.device("cpu"))
    assert calls == ["private", "ordinary"]


@pytest.mark.parametrize("option", ["", "expandable_segments:True,max_split_size_mb:64"])
def test_without_cupy_a_note_names_the_option_that_makes_messages_slow(
    calls, monkeypatch, capsys, option
):
    def missing(device):
        raise memory.TransportUnavailable("CuPy can't be imported")

    monkeypatch.setattr(memory, "_cupy", missing)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", option)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(readable, "noted", set())
    memory.message_memory(16, GPU)
    assert calls == ["ordinary"]
    assert ("expandable_segments" in capsys.readouterr().err) == bool(option)
