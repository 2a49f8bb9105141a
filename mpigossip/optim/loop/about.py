"""What a loop with a folder says of itself: the first screen, and the settings in log and files."""

from __future__ import annotations

import json
import sys

from mpigossip import config
from mpigossip.cluster.world import World
from mpigossip.config import Job
from mpigossip.config.readable import size
from mpigossip.optim.inner import title
from mpigossip.optim.loop.state import SECTIONS
from mpigossip.optim.node import Node
from mpigossip.runs.overview import between, nodes


def screen(job: Job, node: Node, world: World) -> list[tuple[str, str]]:
    """Words and texts."""
    flat = node.flat
    cadence = "" if job.cadence.name == "always" else f", cadence {job.cadence.name}"
    method = f"{job.algorithm.name} ({title(node.inner)}) on {job.graph.name}{cadence}"
    model = f"{type(node.model).__name__}, {flat.count:,} parameters, {size(4 * flat.count)}"
    device = str(next(node.model.parameters()).device)
    return [
        ("nodes", nodes(node.mixer.n, [device], world)),
        ("model", model),
        ("method", method),
        *between(node.engine, node.graph, job.node, world),
        ("files", f"{job.run.folder}: log.h5 every {job.log.flush_steps} steps, checkpoints/ "
                  "by save() and at the end"),
    ]  # fmt: skip


def settings(job: Job, node: Node) -> str:
    """As a job's, and what the program brings."""
    named = {name for name, _ in node.model.named_buffers()} | set(node.flat.names)
    about = {
        "program": " ".join(sys.argv),
        "model": type(node.model).__name__,
        "optimizer": title(node.inner),
        "left_out": len(node.model.state_dict().keys() - named),
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in about.items()]
    return config.dump(job, SECTIONS) + "\n".join(["\n[loop]", *lines, ""])
