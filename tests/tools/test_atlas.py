"""Test the predictions and the table of tools/bench/atlas.py; measuring would need root."""

import json
import runpy
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mpigossip.training.machines import Machine

REPO = Path(__file__).parents[2]
MACHINE = Machine(0.2, 0.0, 0.0, 1e-4, 1.2e8, 1e-4, 1.2e8, 1e10)


@pytest.fixture
def atlas(monkeypatch):
    """Return the module of the program, which requires the repository as its working directory."""
    monkeypatch.syspath_prepend(str(REPO))
    yield runpy.run_path(str(REPO / "tools" / "bench" / "atlas.py"))
    sys.modules.pop("tools.bench.atlas", None)


def test_the_table(atlas, tmp_path, capsys):
    out = tmp_path / "cells.jsonl"
    step = atlas["predict_seconds"](atlas["METHODS"]["one-peer"], "", MACHINE, 0.1)
    cell = {"network": "100 Mbit/s", "bytes": 4.2e6, "load": 1.0, "steps": 9}
    rows = [
        {"machine": asdict(replace(MACHINE, where="x")), "network": "1 Gbit/s"},
        cell | {"cell": "one-peer", "step_s": step / 1.1},
        cell | {"cell": "DiLoCo 8", "step_s": 9.9},
    ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    atlas["show"](out)
    said = capsys.readouterr().out
    assert "within 15%: 1 of 2 cells" in said and "| one-peer |" in said and "load" in said
