"""`mpigossip checkpoint`: show and verify checkpoints, export models."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, family, run_named, tell
from mpigossip.config.errors import OK, WRONG

EXAMPLES = """
mpigossip checkpoint verify runs/digits
mpigossip checkpoint export runs/digits --out model.safetensors
"""
EXPORT = """
mpigossip checkpoint export runs/digits --out model.safetensors
mpigossip checkpoint export runs/digits --out node2.pt --node 2
"""


def add(commands) -> None:
    """Add them to the parser."""
    checkpoint = family(
        commands, "checkpoint", "show|verify|export", "look into checkpoints, export models",
        EXAMPLES,
    )  # fmt: skip
    show = command(
        checkpoint,
        "show",
        _show,
        "what a checkpoint holds",
        "mpigossip checkpoint show runs/digits",
    )
    verify = command(
        checkpoint,
        "verify",
        _verify,
        "read all of it and compare checksums",
        "mpigossip checkpoint verify runs/digits",
    )
    export = command(checkpoint, "export", _export, "the averaged model for plain torch", EXPORT)
    for each in (show, verify, export):
        each.add_argument("path", type=Path, metavar="RUN", help="run folder or checkpoint")
    export.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="model.safetensors or model.pt"
    )
    export.add_argument(
        "--node", type=int, metavar="K", help="node K's model; default: the average of all nodes"
    )
    export.add_argument(
        "--trust-model",
        action="store_true",
        help="import the module:factory that the checkpoint names, for frozen and tied parameters",
    )


def _checkpoint_of(path: Path) -> Path:
    """The checkpoint meant: itself, or a run's newest."""
    from mpigossip.store import StoreError, checkpoint

    if (run_named(path) / "checkpoint.h5").exists():
        return path
    newest, damaged = checkpoint.newest(path)
    if damaged or newest is None:
        whole = f'"{path}" is no checkpoint, and no run directory that has a whole one'
        whole = f"the newest whole one, to be named itself, is {newest}" if newest else whole
        raise StoreError("; ".join([*damaged.values(), whole]))
    return newest


def _show(options) -> None:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    manifest = checkpoint.read_manifest(path)
    tell(f"{path}: step {manifest.step}, {manifest.n} nodes")
    for entry in manifest.entries:
        tell(f"  {entry.file}  {entry.bytes:,} bytes")
    tell(f"digest {checkpoint.digest(path)}\n\n{manifest.job}")


def _verify(options) -> int:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    problems = checkpoint.verify(path)
    tell("\n".join(problems) or f"{path}: whole")
    return WRONG if problems else OK


def _export(options) -> None:
    from mpigossip.runs.model_export import export

    path = _checkpoint_of(options.path)
    tell(export(path, options.out, options.node, options.trust_model))
