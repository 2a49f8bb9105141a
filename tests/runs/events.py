"""Scalars of TensorBoard's event files."""

import pytest


def scalars(folder):
    """Return the steps and values of each tag in a folder of events."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    loaded = reader.EventAccumulator(str(folder))
    loaded.Reload()
    return {
        tag: [(event.step, event.value) for event in loaded.Scalars(tag)]
        for tag in loaded.Tags()["scalars"]
    }
