"""Fixture that starts loading processes as forks of a process that has imported torch."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from mpigossip.data import loader


class Forking(DataLoader):
    """DataLoader whose processes are forks of one that has imported torch; its data are pickled."""

    def __init__(self, *args, **kwargs):
        if kwargs.get("multiprocessing_context") == "spawn":
            multiprocessing.set_forkserver_preload(["torch", "mpigossip.data.loader"])
            kwargs["multiprocessing_context"] = "forkserver"
        super().__init__(*args, **kwargs)


@pytest.fixture
def forked(monkeypatch) -> None:
    """Fork loading processes instead of starting new ones, which import torch for seconds."""
    monkeypatch.setattr(loader, "DataLoader", Forking)
    # Torch waits for this number of seconds if a process does not end.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
