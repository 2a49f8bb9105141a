"""Nested state of numbers, texts, lists, tables and tensors as JSON and arrays, without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mpigossip.config import JobError
from mpigossip.training.snapshot import plain

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
