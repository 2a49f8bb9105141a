"""Check outgoing messages for NaN and infinity, so that one node's fault reaches no other."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from mpigossip.config.errors import NotFinite


def check_message(
    engine: Any, segment: int, out: Sequence[torch.Tensor], columns: Sequence[slice]
) -> None:
    """Raise NotFinite where what a segment is about to send has NaN or infinite values.

    ``out``: its part of the outbox; ``columns``: those of the segment that lie there side by side.
    """
    # one pass over each; large values may overflow: then look at each
    for part, total in [(part, part.sum()) for part in out[: engine.method.vectors]]:
        if math.isfinite(total):
            continue
        for node, row in zip(engine.mixer.rows, part, strict=True):
            if len(wrong := row.isfinite().logical_not().nonzero()):
                raise NotFinite(
                    f"step {engine.index}: {len(wrong):,} values that node {node} was about to "
                    "send are NaN or infinite, the first in "
                    f"{_parameter(engine.vector, segment, columns, int(wrong[0]))}; the other "
                    "nodes have got none of them. Its data or its gradients are at fault, or too "
                    "high a learning rate: clip (algorithm.clip_norm = 1.0 in a job), lower it, "
                    "or let torch.amp.GradScaler leave such steps out"
                )


def _parameter(vector: Any, segment: int, columns: Sequence[slice], at: int) -> str:
    """Return the name of the parameter that has element ``at`` of a message."""
    flat = vector.flat.own
    for c in columns:
        if at < c.stop - c.start:
            # what FSDP2 has sharded lies at the same offsets in all slots
            column = (vector.first[segment] + c.start + at) % flat.size
            return next(n for n, p in zip(flat.names, flat.places, strict=True) if column < p.stop)
        at -= c.stop - c.start
    return "the padding"
