"""Messages above 2^31 bytes, where C's int ends: whether each way brings them whole.

    mpiexec -n 2 python tools/labs/large_messages.py [GIGABYTES]

Two rounds of a pair's average on each way between two ranks of this host, 2.2 GB unless said (13 GB
of memory for both): in place, put into the inbox, by plain messages. Each value is compared.
"""

from __future__ import annotations

import sys
import time

import torch

from mpigossip.cluster.ranks import world
from mpigossip.graphs import graph
from mpigossip.mixing import mixer_class
from mpigossip.mixing.base import Kind, Layout

WAYS = {
    "read in place": ("ranks", {"same_host": "read"}),
    "put": ("ranks", {"same_host": "put"}),
    "plain messages": ("survivors", {}),
}
CUT = 1 << 24
"""Values compared at once: the memory is the messages'."""


def tried(ranks, where: str, options: dict, width: int) -> tuple[int, float]:
    """Wrong values of two rounds on this rank, and seconds."""
    made = graph("one-peer-exponential", ranks.size)
    mixer = mixer_class("synchronous", where)(made, Layout((width,)), ranks, **options)
    wrong, began = 0, time.perf_counter()
    for t in range(2):
        ((x,),) = mixer.outbox(t)
        for at in range(0, width, CUT):  # whole numbers below 2^24: exact in float32
            values = torch.arange(min(CUT, width - at), dtype=torch.float32) % 1021
            x[0, at : at + CUT] = values + 2 * ranks.rank + 4 * t + at % 1019
        mixer.start(Kind.GOSSIP, t)
        _, ((mixed,),) = mixer.finish()
        for at in range(0, width, CUT):
            values = torch.arange(min(CUT, width - at), dtype=torch.float32) % 1021
            wrong += int((mixed[0, at : at + CUT] != values + 1 + 4 * t + at % 1019).sum())
    mixer.close()
    return wrong, time.perf_counter() - began


def main() -> int:
    """Try each way; 1 where a value was wrong."""
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.2
    torch.set_num_threads(1)
    bad = 0
    with world() as ranks:
        for name, (where, options) in WAYS.items():
            wrong, seconds = tried(ranks, where, options, int(gigabytes * 1e9 / 4))
            everyone = ranks.gather((wrong, seconds))
            if everyone is not None:
                found = sum(count for count, _ in everyone)
                bad += found
                took = f"{gigabytes:g} GB, 2 rounds in {seconds:.1f} s"
                print(f"{name:15} {took}: {found} wrong values", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
