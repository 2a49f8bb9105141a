"""Jobs that an earlier version has stored in a checkpoint or a log, and that are read today.

Such a job is complete: it contains settings that no longer exist, or have another name, although no
user has set them. Files that users write are read without these changes.
"""

from collections.abc import Mapping
from typing import Any

DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("node", ""): {"overlap": True, "gpu_window": "auto"},
    ("algorithm", "noloco"): {"form": "one_vector"},
    ("algorithm", "detag"): {"tracker": "stale", "momentum": "new"},
}
"""Former defaults of settings that no longer exist, by section and name."""
RENAMED = {("node", "kept"): "density"}
"""New names of settings, by section and old key."""


def update(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored job without the settings that no longer exist, and with the new names.

    A setting that no longer exists is dropped only if it has its former default; any other value is
    an unknown key, which is reported later.

    :param job: sections by name, which are not changed
    """
    updated = dict(job)
    for (section, key), new in RENAMED.items():
        table = updated.get(section)
        if isinstance(table, dict) and key in table and new not in table:
            updated[section] = {new if k == key else k: value for k, value in table.items()}
    for (section, name), former in DEFAULTS.items():
        table = updated.get(section)
        if isinstance(table, dict) and table.get("name", "") == name:
            updated[section] = {
                key: value
                for key, value in table.items()
                if key not in former or value != former[key]
            }
    return updated
