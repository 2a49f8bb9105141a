"""Settings and options that were removed, each with a sentence that names the replacement."""

from typing import Any

SETTINGS = {
    "algorithm.local": "the local step has its own section; write local.name",
    "algorithm.growing": "all phases have the same length; write algorithm.phase",
    "algorithm.quotient": "write algorithm.phase; `help(detag)` has the formula of the corollary",
    "algorithm.tracker": 'leave it out; "dsgt" with algorithm.style = "awc" is not delayed',
    "algorithm.form": "leave it out; NoLoCo sends one vector, of the same sum as the paper's two",
    "node.overlap": "layers are no longer sent during backward; leave it out (an algorithm that is "
    'ahead, such as "dsgd" with style = "awc", overlaps the entire exchange with computation)',
    "node.gpu_window": 'write node.exchange; the value "device" is now "windows", and "auto", '
    '"nccl" and "host" keep their meaning',
    "node.kept": "write node.density, the same fraction of values under its usual name",
    'node.mixer = "product"': 'use "synchronous", which is bitwise identical to a run on ranks',
    "study.together": "leave it out; seeds run at the same time, each in its own process",
}
"""Replacements of settings, by "section.key", or by 'section.key = "value"' if only one value was
removed. The section `study` stands for the keys of a study file."""
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("node", ""): {"overlap": True, "gpu_window": "auto"},
    ("algorithm", "noloco"): {"form": "one_vector"},
    ("algorithm", "detag"): {"tracker": "stale", "momentum": "new"},
}
"""Former defaults of removed settings, by section and name. Complete jobs in older checkpoints and
logs contain them although no user has set them."""
RENAMED = {("node", "kept"): "density"}
"""New names of settings, by section and old key, for complete jobs of an earlier version."""
MATCHINGS = (
    'use graph.name = "one-peer-exponential", "base-2" or "random-matching", whose rounds '
    'consist of pairs; graph.placement = "hostnames" assigns ranks of one rack to graph nodes '
    "that exchange most with each other"
)
GOSSIP = {
    "devices": "a rank has one device, which holds its model; start one rank per device and "
    "join the ranks of a node by mpigossip.world(ranks_per_node=…), or run a job, which supports "
    "several devices per rank",
    "models": "a rank has one model, which is an argument of Gossip",
    "kept": "write density",
    "no_sync": "nothing is sent before step(), so backward may be called several times without it",
    "run": "a rank has one device; call forward and backward of the model as in any torch loop",
}
"""Replacements of arguments, methods and attributes of `mpigossip.Gossip`."""
OPTIONS = {
    "graph search --rounds": MATCHINGS,
    "graph search --racks": MATCHINGS,
    "graph search --between": MATCHINGS,
    "log export --netcdf": 'log.h5 can be read directly: xarray.open_dataset("RUN/log.h5", '
    'engine="h5netcdf").to_netcdf("OUT.nc")',
    "simulate --seeds": "`mpigossip study` runs all seeds of its file at the same time",
}
"""Replacements of command-line options, by command and option, as in "graph search --rounds"."""


def update(job: dict[str, Any]) -> None:
    """Drop and rename removed settings in a complete job that an earlier version wrote.

    Only settings with their former default are dropped; any other value is reported later.
    """
    for (section, key), new in RENAMED.items():
        table = job.get(section)
        if isinstance(table, dict) and key in table and new not in table:
            table[new] = table.pop(key)
    for (section, name), values in DEFAULTS.items():
        table = job.get(section)
        if isinstance(table, dict) and table.get("name", "") == name:
            for key in [key for key, value in values.items() if table.get(key) == value]:
                del table[key]


def of_setting(path: str) -> str:
    """Return the message for a removed setting or value; "" if ``path`` is not one."""
    return f"{path}: removed; {SETTINGS[path]}" if path in SETTINGS else ""


def of_argument(key: str) -> str:
    """Return the message for a removed name of Gossip or a removed setting passed to it, or ""."""
    replacements = {path.rpartition(".")[2]: text for path, text in SETTINGS.items()} | GOSSIP
    return f"{key}: removed; {replacements[key]}" if key in replacements else ""


def of_words(words: list[str]) -> str:
    """Return the message for the first removed option in the words of a command line, or ""."""
    names = [word.partition("=")[0] for word in words]
    for name, replacement in OPTIONS.items():
        *command, option = name.split()
        if names[: len(command)] == command and option in names:
            return f"{option}: removed; {replacement}"
    return ""
