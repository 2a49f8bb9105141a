"""Loading processes that begin with torch imported."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader

from mpigossip.data import loader


class Forking(DataLoader):
    """Its processes are forks of one that has imported torch; what they are given is pickled."""

    def __init__(self, *given, **more):
        if more.get("multiprocessing_context") == "spawn":
            multiprocessing.set_forkserver_preload(["torch", "mpigossip.data.loader"])
            more["multiprocessing_context"] = "forkserver"
        super().__init__(*given, **more)


@pytest.fixture
def forked(monkeypatch) -> None:
    """In place of new processes, each of which imports torch for seconds."""
    monkeypatch.setattr(loader, "DataLoader", Forking)
    # what torch waits for a silent process before it ends it
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
