"""Translation of jobs that an earlier version of this package stored in a checkpoint or a log.

A stored job lists all settings, also those that its user did not set. Some of these settings have
been removed or renamed since. This module removes or renames them when the job is read. Job files,
which users write, are not translated.
"""

from collections.abc import Mapping
from typing import Any

ANY = "*"
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("node", ""): {"overlap": True, "gpu_window": "auto"},
    ("algorithm", "noloco"): {"form": "one_vector"},
    ("algorithm", "detag"): {"tracker": "stale", "momentum": "new"},
    ("algorithm", ANY): {"blend_end": None, "blend_shape": "linear"},
}
"""Former default of each removed setting. The keys are the section and the value of its setting
``name``, which is "" in a section without one; `ANY` stands for all values."""
RENAMED = {("node", "kept"): "density"}
"""New names of settings, by section and old key."""


def update(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored job without removed settings, and with the new names of renamed ones.

    A removed setting is left out only if it has its former default. With any other value it is
    kept, so that the check of the job reports it as an unknown key.

    :param job: sections of the stored job by name; they are not modified
    """
    updated = dict(job)
    for (section, key), new in RENAMED.items():
        table = updated.get(section)
        if isinstance(table, dict) and key in table and new not in table:
            updated[section] = {new if k == key else k: value for k, value in table.items()}
    for (section, name), former in DEFAULTS.items():
        table = updated.get(section)
        if isinstance(table, dict) and name in (ANY, table.get("name", "")):
            updated[section] = {
                key: value
                for key, value in table.items()
                if key not in former or value != former[key]
            }
    return updated
