"""The inner optimizer's state in a checkpoint: arrays ``torch/<parameter>/<key>``, and JSON.

Nested state of numbers, texts, lists, tables and tensors becomes JSON and arrays, without pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from mpigossip.config import JobError
from mpigossip.engine.sharded import full, part_like
from mpigossip.optim.inner import title
from mpigossip.store import StoreError
from mpigossip.training.snapshot import plain


def written(
    optimizer: torch.optim.Optimizer, model: nn.Module, arrays: dict[str, np.ndarray] | None
) -> str:
    """The state's JSON; tensors go into ``arrays``, None: nowhere.

    Collective over the ranks between which parameters are cut, whose state is made whole.
    """
    state, names = optimizer.state_dict(), _names(optimizer, model)
    groups = [
        {key: names[k] if key == "params" else value for key, value in group.items()}
        for k, group in enumerate(state["param_groups"])
    ]
    flat = [name for group in names for name in group]
    of: dict[str, Any] = {}
    for k, one in state["state"].items():
        whole = {key: full(value) for key, value in one.items()}
        of[flat[k]] = packed(whole, f"torch/{flat[k]}", {} if arrays is None else arrays)
    kept = packed(groups, "torch/#groups", {} if arrays is None else arrays)
    return json.dumps({"optimizer": title(optimizer), "groups": kept, "state": of})


def read(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    text: str,
    arrays: Mapping[str, np.ndarray],
) -> tuple[dict[str, Any], list[str]]:
    """What :func:`saved.load` takes, and parameters whose state ``arrays`` lacks.

    StoreError where the groups have other parameters.
    """
    saved, names = json.loads(text), _names(optimizer, model)
    groups = unpacked(saved["groups"], arrays)
    was = [group["params"] for group in groups]
    if was != names:
        raise StoreError(
            f"the optimizer's groups have {_counts(names)} parameters, those that were saved "
            f"{_counts(was)}, or in another order: make it as it was"
        )
    place = {name: k for k, name in enumerate(name for group in names for name in group)}
    found, lacking = {}, []
    own = dict(model.named_parameters())
    for name, one in saved["state"].items():
        try:
            whole = unpacked(one, arrays)
            found[place[name]] = {key: part_like(own[name], value) for key, value in whole.items()}
        except KeyError:
            lacking.append(name)
    now = optimizer.state_dict()["param_groups"]
    for group, present in zip(groups, now, strict=True):
        group["params"] = present["params"]
    of = {"optimizer": saved.get("optimizer")}
    return {"state": found, "param_groups": groups, **of}, lacking


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The model's names of each group's parameters."""
    name = {id(p): n for n, p in model.named_parameters()}
    return [[name[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _counts(names: list[list[str]]) -> str:
    return " + ".join(str(len(group)) for group in names)


TYPES = {str(getattr(torch, name)): getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)}  # fmt: skip


def packed(value: Any, at: str, arrays: dict[str, np.ndarray]) -> Any:
    """What JSON holds of a value; its tensors go into ``arrays``, by the path ``at`` and below.

    JobError, with the path, for anything else.
    """
    if isinstance(value, torch.Tensor) and str(value.dtype) in TYPES:
        arrays[at] = plain(value).copy()
        return {"#tensor": at, "type": str(value.dtype)}
    if isinstance(value, Mapping):
        items = [(key, packed(one, f"{at}/{_link(key)}", arrays)) for key, one in value.items()]
        if all(isinstance(key, str) and not key.startswith("#") for key in value):
            return dict(items)
        return {"#items": [[packed(key, at, arrays), one] for key, one in items]}
    if isinstance(value, list | tuple):
        items = [packed(one, f"{at}/{k}", arrays) for k, one in enumerate(value)]
        return items if isinstance(value, list) else {"#tuple": items}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise JobError(
        [f"save: {at} is a {type(value).__name__}; a checkpoint takes tensors, numbers, texts, "
         "lists and tables of these"]
    )  # fmt: skip


def unpacked(saved: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value again; KeyError where ``arrays`` lacks one of its tensors."""
    if isinstance(saved, list):
        return [unpacked(one, arrays) for one in saved]
    if not isinstance(saved, dict):
        return saved
    if "#tensor" in saved:
        return torch.from_numpy(np.array(arrays[saved["#tensor"]])).to(TYPES[saved["type"]])
    if "#items" in saved:
        return {unpacked(key, arrays): unpacked(one, arrays) for key, one in saved["#items"]}
    if "#tuple" in saved:
        return tuple(unpacked(one, arrays) for one in saved["#tuple"])
    return {key: unpacked(one, arrays) for key, one in saved.items()}


def _link(key: Any) -> str:
    """A key as the name of a link in HDF5, which splits at slashes and takes no lone dots."""
    text = str(key).replace("/", "|")
    return text if text.strip(".") else f"_{text}"
