"""Write the reference pages of the site from the code.

python tools/docs/reference.py build/docs-source/reference
"""

import argparse
import inspect
import os
import pkgutil
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["COLUMNS"] = "80"  # The help of commands is wrapped at this width.

import mpigossip
from mpigossip import cli, config, graphs
from mpigossip.commands.arguments import every
from mpigossip.config import errors, packaged, sections
from mpigossip.config.choices import BuilderSpec, keyword_only
from mpigossip.config.schema import field_docs
from mpigossip.config.structure import Limit
from mpigossip.config.toml import show
from mpigossip.optim import settings as optim_settings
from mpigossip.store import checkpoint, log
from mpigossip.training import assemble

TABLES = {
    path.partition(".")[0]: table
    for path, table in assemble.tables_of_names().items()
    if not path.startswith("node.")
}
"""For each section whose setting `name` (or `source`) selects a builder: the builders by name. The
keyword-only parameters of a builder are further settings of the section."""
TYPE_NAMES = {int: "whole number", float: "number", str: "text", bool: "true or false"}
EXAMPLES = {
    "algorithm.average_state": "{second=16}", "algorithm.node_weights": "[1,1,2]",
    "run.name": "first", "run.output": "/scratch/{name}", "task.name": "language-model",
    "data.source": "cifar10.h5", "data.tokenizer": "bpe-8192-fb24c4d7", "model.name": "lenet",
    "data.shape": "[1,28,28]", "data.workers": "4", "algorithm.name": "dsgd",
    "local.name": "adamw", "graph.name": "base-2", "graph.weights": "laplacian",
    "graph.placement": "hostnames", "cadence.name": "cpsgd", "schedule.milestones": "[30,60,80]",
    "node.devices": "cuda:0-3", "node.ranks_per_node": "host", "node.wire": "bf16",
    "node.mixer": "asynchronous", "clock.network": "10gbit", "clock.bandwidth": "1.25e9",
    "log.hooks": "['tensorboard']", "log.consensus_every": "100",
}  # fmt: skip
"""Examples of those settings for which :func:`example` has no rule."""
VARIABLES = {
    "MPIGOSSIP_END_TIME": "the time, in seconds since 1970, at which the allocation ends: the run "
    "stops earlier, with a checkpoint; batch scripts set it",
    "MPIGOSSIP_NATIVE": "`0`: use PyTorch's operations instead of the compiled sum; "
    "the results are identical, but computed more slowly",
    "MPIGOSSIP_SITES": "a folder with site files of a computing centre; "
    "`mpigossip job` finds them by name, and before a site of the package with the same name",
    "OMP_NUM_THREADS": "set it to 1, because ranks and slots run at the same time, "
    "with one core each",
    "SLURM_JOB_END_TIME": "the end of the allocation, if Slurm sets it",
    "CUDA_VISIBLE_DEVICES": "the GPUs that a rank can use; the numbers of "
    "`node.devices` refer to these",
    "MPI4PY_LIBMPI": "the MPI library that mpi4py loads: a name with a version number, "
    "`libmpi.so.12` or `libmpi.so.40`, because `libmpi.so` may be a linker script (read by mpi4py)",
    "XDG_CACHE_HOME": "the folder that stores the compiled sum; if unset, `~/.cache`",
    "CC": "the C compiler that builds the compiled sum; if unset, `cc`",
    "HDF5_USE_FILE_LOCKING": "set it to `FALSE` if the file system has no locks (read by HDF5)",
}
"""Environment variables that the package or its libraries read."""


PUBLIC = dict.fromkeys(mpigossip.__all__, "") | {
    "cluster.mpi_world.MPIWorld": "node_group, node_mesh, agree, barrier, broadcast, gather, "
    "abort, close",
    "studies.Study": "best, ties, table, frame, dataset, plot, transient",
    "graphs.base.Graph": "", "graphs.from_matrices": "",
    "algorithms.base.Algorithm": "", "algorithms.base.Step": "",
    "runs.hooks.Hook": "", "engine.measurements.StepMetrics": "",
    "training.evaluate.Evaluation": "",
    "runs.progress.Progress": "job, folder, nodes, steps_per_epoch, total_steps, samples_per_step, "
    "evaluation, checkpoint, epoch, warn",
}  # fmt: skip
"""Objects on the page Python, by their path in the package. The values are the names of the members
that the page shows, separated by commas; "" stands for all public members."""
RECEIVED = (
    "cluster.mpi_world",
    "studies.",
    "graphs.base.G",
    "engine.",
    "training.",
    "runs.progress",
)
"""Prefixes of classes whose objects a program receives, but does not create."""


def describe_type(hint: Any) -> str:
    """Return a text about the type of a setting and its limits, such as "whole number; at least 1".

    :param hint: annotation of the setting
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        (limit,) = (each for each in hint.__metadata__ if isinstance(each, Limit))
        return f"{describe_type(hint.__origin__)}; {limit.words}"
    if origin is Literal:
        return ", ".join(f"`{show(each)}`" for each in arguments)
    if origin in (typing.Union, types.UnionType):
        known = [describe_type(each) for each in arguments if each is not type(None)]
        return " or ".join(known) + "; may be unset" * (type(None) in arguments)
    if origin is tuple:
        return f"list of: {describe_type(arguments[0])}"
    if origin is dict:
        return f"table of names and: {describe_type(arguments[1])}"
    return TYPE_NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def choices(hint: Any) -> list[Any]:
    """Return the values that an annotation with `Literal` allows; [] without `Literal`."""
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    return [value for each in typing.get_args(hint) for value in choices(each)]


def example(path: str, default: Any, hint: Any) -> str:
    """Return an example of a setting, "section.key=value", with a value other than the default.

    :param path: name of the setting, such as "data.batch"
    :param default: its default
    :param hint: its annotation
    :raises LookupError: if no guess is valid, and `EXAMPLES` has no entry for the setting
    """
    guesses = [not default] if isinstance(default, bool) else []
    if isinstance(default, int | float):
        guesses += [2 * default, default / 2]
    guesses += [*reversed(choices(hint)), 1, 2, 0.5, 100]
    for value in [EXAMPLES[path]] if path in EXAMPLES else guesses:
        text = f"{path}={value if isinstance(value, str) else show(value)}"
        try:
            job = config.load({}, [text])
        except errors.JobError:
            continue
        if getattr(getattr(job, path.split(".")[0]), path.split(".")[1]) != default:
            return text
    raise LookupError(
        f"no guess is a valid value of {path}: add an example to EXAMPLES in {__file__}"
    )


def settings() -> dict[str, tuple[str, ...]]:
    """Return texts about all settings, by name: type and limits, default, meaning, example."""
    rows = {}
    for name, cls in sections.SECTIONS.items():
        hints = typing.get_type_hints(cls, include_extras=True)
        about = field_docs(cls)
        for field in fields(cls):
            if field.name == "options":
                continue
            path = f"{name}.{field.name}"
            default = field.default
            if default is MISSING and field.default_factory is not MISSING:
                default = field.default_factory()
            shown = "unset" if default is None else f"`{show(default)}`"
            assert default is not MISSING, path
            words = describe_type(hints[field.name])
            text = example(path, default, hints[field.name])
            rows[path] = (words, shown, about[field.name], text)
    return rows


def options() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the options of all builders as tuples: section, name, option, type, default.

    The name belongs to the builder, for example to an algorithm or a graph.
    """
    for section, table in TABLES.items():
        for name in table:
            for option, (hint, default) in keyword_only(BuilderSpec.of(table, name).build)[
                0
            ].items():
                needed = default is inspect.Parameter.empty
                shown = "must be given" if needed else f"`{show(default)}`"
                words = describe_type(type(default) if hint is Any and not needed else hint)
                yield section, name, option, words, "unset" if default is None else shown


def loop_options() -> list[tuple[str, str]]:
    """Return the settings that `Gossip` accepts as options, as pairs (section, name)."""
    groups = (optim_settings.KEYS, optim_settings.OF_RUN)
    return [(name, key) for keys in groups for name, some in keys.items() for key in some]


def table_row(*row: str) -> str:
    """Return a row of a table in Markdown.

    :param row: texts of the cells
    """
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |"


def table_head(*titles: str) -> list[str]:
    """Return the first two lines of a table in Markdown.

    :param titles: titles of the columns
    """
    return [table_row(*titles), "|---" * len(titles) + "|"]


def settings_page() -> str:
    """Return the page of settings and options."""
    lines = [
        "# Settings",
        "",
        "A job file has these sections. `section.key=value` behind a command replaces a setting;",
        "`--dry-run` prints the complete job. `none` unsets what may be unset.",
        "",
    ]
    known = settings()
    own = list(options())
    for name, cls in sections.SECTIONS.items():
        text = inspect.getdoc(cls).split(": ", 1)[1]
        lines += [f"## [{name}]", "", text[0].upper() + text[1:], ""]
        lines += table_head("setting", "meaning", "type and limits", "default", "example")
        lines += [
            table_row(f"`{path}`", meaning, words, default, f"`{text}`")
            for path, (words, default, meaning, text) in known.items()
            if path.startswith(f"{name}.")
        ]
        if name in TABLES:
            names = ", ".join(f"`{each}`" for each in TABLES[name])
            lines += ["", f"Names for `{name}.{'source' if name == 'data' else 'name'}`: {names}."]
        if name == "graph":
            rules = ", ".join(f"`{each}`" for each in graphs.WEIGHTS)
            lines += ["", f"Rules for `graph.weights`: {rules}."]
        rows = [row for row in own if row[0] == name]
        if rows:
            lines += ["", "Options by name:", ""]
            lines += table_head("name", "option", "type and limits", "default")
            lines += [table_row(f"`{row[1]}`", f"`{name}.{row[2]}`", *row[3:]) for row in rows]
        lines += [""]
    return "\n".join(lines)


def commands() -> dict[str, str]:
    """Return the help texts of all commands, by their words, such as "data pack"."""
    return {words: parser.format_help() for words, parser in every(cli.parser()) if words}


def commands_page() -> str:
    """Return the page of commands."""
    lines = ["# Help texts of the commands", ""]
    lines += [
        "This page shows the output of `--help`. [Commands](../commands.md) has an example of"
    ]
    lines += ["each command, with its output.", ""]
    for words, text in commands().items():
        level = "#" * (1 + len(words.split()))
        lines += [f"{level} mpigossip {words}", "", "```text", text, "```", ""]
    lines += [
        "## Examples",
        "",
        "`mpigossip examples` lists them. Commands accept their names.",
        "",
    ]
    lines += table_head("name", "file", "what it is")
    for name, path in packaged.examples().items():
        inside = "jobs" / path.relative_to(packaged.find("digits.toml").parent)
        lines += [table_row(f"`{name}`", f"`{inside}`", packaged.summary(path))]
    return "\n".join(lines)


def python_page() -> str:
    """Return the page of the Python API, which autodoc fills."""
    lines = ["# Python", "", "```{eval-rst}"]
    for path, members in PUBLIC.items():
        made = pkgutil.resolve_name(f"mpigossip:{path}")
        if not inspect.isclass(made):
            lines += [f".. autofunction:: mpigossip.{path}", ""]
            continue
        given = "()" * path.startswith(RECEIVED)
        lines += [f".. autoclass:: mpigossip.{path}{given}", f"   :members: {members}"]
        lines += ["   :inherited-members: Optimizer, tuple"] * (not members)
        lines += ["   :class-doc-from: both"] * (path in mpigossip.__all__) + [""]
    lines += ["```", "", "## Options of Gossip", ""]
    lines += ["Options of the algorithm, the graph and the cadence have the names that are on the"]
    lines += [
        "page [Settings](settings.md). These settings of jobs are options without their section;"
    ]
    lines += ["settings of the run need `run=`. If two sections have an option, such as `lazy`"]
    lines += ["of `d2` and `graph.lazy`, name the section: `graph_lazy=True`, or"]
    lines += ['`**{"graph.lazy": True}`. `length` (of `defacto` and the cadence `halves`) and']
    lines += ["`on_error` (of the log and checkpoints) have the same meaning, and set both:", ""]
    lines += table_head("option", "setting of a job")
    lines += [table_row(f"`{key}`", f"`{name}.{key}`") for name, key in loop_options()]
    return "\n".join([*lines, ""])


def files_page() -> str:
    """Return the page of log columns, checkpoint layout, exit codes and variables."""
    lines = ["# Files, exit codes, environment variables", "", "## Columns of the log", ""]
    lines += ["`RUN/log.h5` has one row per step and one column per node (group `steps`):", ""]
    steps = log.COLUMNS | {log.VIRTUAL: log.VIRTUAL_COLUMN}
    evaluations = "The group `evaluations` has one row per evaluation:"
    members = "The logs of members also have these columns, with one row per step:"
    for title, columns in (
        ("", steps),
        (members, log.MEMBER_COLUMNS),
        (evaluations, log.EVALUATION_COLUMNS),
    ):
        lines += ["", title, "", *table_head("column", "unit", "meaning")]
        lines += [table_row(f"`{n}`", c.unit, c.description) for n, c in columns.items()]
    lines += ["", "The metrics of a task are further columns. Evaluations also have its loss:"]
    lines += ["`NAME` is a metric of the averaged model, `local_NAME` of each node's model on its"]
    lines += ["own test samples, and `share_NAME` of the averaged model on the same samples.", ""]
    lines += ["## Layout of a checkpoint", ""]
    lines += [inspect.getdoc(checkpoint).split("\n", 2)[2], "", "The file of a node:", ""]
    lines += [inspect.getdoc(checkpoint.NodeState), "", "## Exit codes", ""]
    lines += table_head("code", "meaning")
    lines += [table_row(code, text) for code, text in exit_codes().items()]
    lines += ["", "## Environment variables", "", *table_head("variable", "meaning")]
    lines += [table_row(f"`{name}`", text) for name, text in VARIABLES.items()]
    return "\n".join([*lines, ""])


def exit_codes() -> dict[str, str]:
    """Return the meaning of each exit code, from the table on the page for computing centres."""
    text = (Path(__file__).parent / "centres.md").read_text("utf-8")
    section = text.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {code: meaning for code, meaning, *_ in rows[1:]}


PAGES = {
    "settings": settings_page,
    "commands": commands_page,
    "python": python_page,
    "files": files_page,
}


def main() -> None:
    """Write all pages into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="write the reference pages from the code")
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (out / f"{name}.md").write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
