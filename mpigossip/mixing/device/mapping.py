"""Whether mapped memory is what its owner has: a pattern read and one written through each area.

In virtual machines and behind some switches peers see each other's memory by name only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from mpi4py import MPI

from mpigossip.mixing.device.memory import Mapped, current
from mpigossip.mixing.device.proof import synchronize

MARK = 64
"""Bytes of a pattern at most."""


def reaches(on_host: MPI.Comm, own: Sequence[torch.Tensor], mapped: Mapping[int, Mapped]) -> str:
    """What is wrong with the memory of this host's other ranks as it is mapped here; "": nothing.

    ``own``: this rank's areas, in the order of all; zeros afterwards. Collective.
    """
    rank, wrong = on_host.rank, ""
    left, right = (rank - 1) % on_host.size, (rank + 1) % on_host.size
    for k, area in enumerate(own):
        _marks(area)[0].fill_(_pattern(rank, k))
    _settle(own)
    on_host.Barrier()
    try:
        for place, there in mapped.items():
            for k, (area, mine) in enumerate(zip(there.arrays, own, strict=True)):
                with current(mine.device):
                    read, written = _marks(area)
                    if not (read.cpu() == _pattern(place, k)).all():
                        wrong = f"memory of place {place} on this host, mapped for {mine.device}"
                    if place == right:
                        written.fill_(_pattern(rank, k) ^ 255)
    except RuntimeError as error:
        wrong = str(error)
    _settle(own)
    on_host.Barrier()
    for k, area in enumerate(own):
        if not (_marks(area)[1].cpu() == _pattern(left, k) ^ 255).all():
            wrong = wrong or f"{area.device}, written by place {left} on this host"
        area[: 2 * MARK].zero_()
    _settle(own)
    return wrong and f"other bytes than its owner has: {wrong} (cudaIpc works in name only)"


def _marks(area: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where an area is marked by its owner, and by another rank."""
    size = min(MARK, area.numel() // 2)
    return area[:size], area[size : 2 * size]


def _pattern(place: int, area: int) -> int:
    return (17 * place + 5 * area) % 251 + 1


def _settle(areas: Sequence[torch.Tensor]) -> None:
    for device in {area.device for area in areas}:
        synchronize(device)
