"""The summary at the end of a run, as text: what the run prints and what its log shows."""

from __future__ import annotations

from typing import Any

from mpigossip.config.readable import counted, size

SPLIT = {"compute_s": "compute", "node_s": "node", "exchange_s": "exchange", "idle_s": "idle"}


def describe(summary: dict[str, Any]) -> str:
    """The summary block as text."""
    state = "finished" if summary["finished"] else "stopped, to be resumed"
    epochs = f" ({summary['epochs']:.2f} epochs)" if "epochs" in summary else ""
    lines = [
        f"run        {state} at step {summary['steps']}{epochs}, "
        f"{counted(summary['nodes'], 'node')} x {counted(summary['slots'], 'slot')}"
    ]
    if "accuracy" in summary:
        lines.append(
            f"accuracy   {summary['accuracy']:.4f} (averaged model), "
            f"test loss {summary['loss']:.4f}"
        )
    if "figures" in summary:
        lines.append(f"figures    {summary['figures']}")
    spent = {name: summary[key] for key, name in SPLIT.items() if key in summary}
    total = sum(spent.values())
    if total:
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in spent.items())
        lines.append(f"time       {summary['seconds']:.1f} s; steps {total:.1f} s: {shares}")
        if summary.get("samples_per_second"):
            speed = f"{summary['samples_per_second']:,.0f} samples/s over all nodes"
            lines.append(f"speed      {speed}")
    if "lost" in summary:
        lines.append(f"lost       {summary['lost']}")
    if "warnings" in summary:
        lines.append(f"warnings   {summary['warnings']}")
    lines.append(f"sent       {size(summary['bytes_sent'])} a node")
    if "checkpoint" in summary:
        lines.append(f"checkpoint {summary['checkpoint']}")
        lines.append(f"digest     {summary['digest']}")
    return "\n".join(lines)
