"""Batch scripts: the template of a scheduler, filled in for a site (a machine) and a user's job.

Sites are TOML files, such as those in `jobs/sites`, and there is one template for each scheduler in
`jobs/templates`. Text from a job or a command line is checked or quoted before it becomes part of a
script, so that it cannot become a command.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from mpigossip.config import JobError
from mpigossip.config.errors import STOPPED, WRONG
from mpigossip.config.packaged import find
from mpigossip.config.readable import pluralize
from mpigossip.config.structure import Limit, structure
from mpigossip.config.toml import near

WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,:+@=/-]*"
EARLY_S = 180
"""Seconds before the end at which Slurm sends SIGUSR2, for jobs of at least `EARLY_FROM_S`.

Slurm may send it up to a minute earlier. Shorter jobs get no signal: the run itself stops in time
before the end of its allocation.
"""
EARLY_FROM_S = 1800
"""Shortest time limit, in seconds, of a job that gets the signal."""

SITES_VARIABLE = "MPIGOSSIP_SITES"
"""Environment variable with the path of a computing centre's own folder of site files."""
MPI_PLUGIN = r"(?!list$)[A-Za-z][A-Za-z0-9_.]*"
"""Form of a value of srun's option --mpi; `list` would start nothing."""

Line = Annotated[str, Limit(str.isprintable, "must be one line of printable text")]
Module = Annotated[
    str, Limit(lambda v: re.fullmatch(WORD, v) is not None, "must be a module's name")
]
Directive = Annotated[
    str,
    Limit(
        lambda v: re.fullmatch(r"-[A-Za-z0-9_.,:+@=/ &-]*", v) is not None,
        "must be an option of the scheduler, such as --constraint=gpu",
    ),
]
Count = Annotated[int, Limit(lambda v: v >= 0, "must be at least 0")]
RequiredOption = Literal["account", "partition", "qos"]


@dataclass(frozen=True, kw_only=True)
class Workaround:
    """Environment variables that avoid a known fault of a site's software."""

    what: Line
    """Description of the fault."""
    since: Line
    """Month from which on the fault is known, such as "2025-06"."""
    link: Line
    """Page that describes the fault."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Values of the variables, by name."""
    several: bool = True
    """True if the workaround also applies to jobs with several ranks per host."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """The properties of a site, which is a machine with a scheduler, that a batch script needs."""

    title: Line
    """Name of the machine, for comments and messages."""
    link: Line
    """Page of the computing centre."""
    scheduler: Literal["slurm", "pbs", "flux"]
    tested: Literal[False] | Line
    """Date of the last test of this file on the machine itself; False: never tested."""
    launcher: Line
    """Command that starts one rank per host; `$NAME` stands for an environment variable.

    If it contains $RANKS, $TASKS or $CORES, the script sets them as for `launcher_multi`.
    """
    launcher_multi: Line = ""
    """Command that starts $RANKS ranks per host, $TASKS in total, with $CORES cores each.

    Each rank sees all GPUs of its host.
    """
    launcher_gpu: Line = ""
    """Command that starts one rank per GPU, with the same variables; empty: `launcher_multi`.

    It binds rank i of a host to the cores next to GPU i.
    """
    examples_use: Literal["node", "gpu"] = "node"
    """Unit that the centre's own examples start one rank for: a host or a GPU."""
    gpus: Count = 0
    """Number of GPUs per host; 0: unknown."""
    nics: Count = 0
    """Number of network cards per host; 0: unknown."""
    cores: Count = 0
    """Number of CPUs per host that a job may use, as the scheduler counts them; 0: unknown.

    Schedulers count hardware threads on some machines, and cores on others.
    """
    directives: tuple[Directive, ...] = ()
    """Options of the scheduler that each job on this site gets."""
    needs: tuple[RequiredOption, ...] = ()
    """Required options among --account, --partition and --qos."""
    modules: tuple[Module, ...] = ()
    """Modules that the script loads, in this order."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Values of environment variables that the script sets, by name."""
    notes: tuple[Line, ...] = ()
    """Comments of the script."""
    workarounds: tuple[Workaround, ...] = ()
    page_checked: Literal[False] | Line = False
    """Date of the version of the centre's page that this file was compared with; False: never."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """The user's request for a batch job, apart from the job file."""

    nodes: int
    """Number of hosts."""
    seconds: int
    """Time limit of the job, in seconds."""
    ranks: int = 1
    """Number of ranks per host."""
    ranks_per_node: int | None = None
    """Number of ranks of a node of the graph, for a comment; None: it is not known."""
    name: str = "mpigossip"
    """Name of the job, of which a script uses at most 40 characters."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    """Account, partition (or queue) and quality of service; None: the option is not given."""
    venv: str | None = None
    """Folder of the virtual environment that the script activates; None: it activates none."""
    launcher: str | None = None
    """Command that replaces the site's launcher; None: the site's launcher."""
    mpi: str | None = None
    """Value of the option --mpi, which only srun has; None: the launcher is not changed."""
    handles_signals: bool = True
    """True if the program stops with a checkpoint at SIGUSR2; otherwise, the signal would kill it,
    so the script does not request it."""


# Options of each scheduler. {} is replaced by checked text only.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "slurm": {"account": "--account={}", "partition": "--partition={}", "qos": "--qos={}"},
    "pbs": {"account": "-A {}", "partition": "-q {}", "qos": "-l qos={}"},
    "flux": {"account": "--bank={}", "partition": "--queue={}", "qos": "--setattr=system.qos={}"},
}
PREFIX = {"slurm": "#SBATCH", "pbs": "#PBS", "flux": "#flux:"}


def sites() -> dict[str, Path]:
    """Return the files of all sites, by the name of the site.

    The package has site files, and so may the folder that the environment variable
    `MPIGOSSIP_SITES` names. If both have a file of the same name, the one in the folder is used.

    :raises JobError: if that folder can't be read, or if the package's site files are missing
    """
    paths = sorted(find("sites").glob("*.toml"))
    if centre := os.environ.get(SITES_VARIABLE):
        try:
            own = [path for path in Path(centre).iterdir() if path.suffix == ".toml"]
        except OSError as error:
            raise JobError(
                f'{SITES_VARIABLE} = "{centre}": this folder of site files can\'t be read '
                f"({error.strerror}); correct the variable, or unset it"
            ) from None
        paths += sorted(own)
    return {path.stem: path for path in paths}


def read_site(name: str) -> Site:
    """Read the file of a site.

    :param name: name of one of the :func:`sites`, or path of a TOML file
    :raises JobError: if the site is unknown, or if its file can't be read or contains errors
    """
    is_path = name.endswith(".toml")
    known = {} if is_path else sites()
    path = Path(name) if is_path else known.get(name)
    if path is None:
        centre = os.environ.get(SITES_VARIABLE)
        searched = f" in the package and in {SITES_VARIABLE} = {centre}" if centre else ""
        remedy = near(name, known)
        if centre:
            # The names of the centre's own files come first.
            names = sorted(known, key=lambda each: (known[each].parent != Path(centre), each))
            all_names = ", ".join(names)
            if remedy.startswith("did you mean"):
                remedy += f" (all names: {all_names})"
            else:
                remedy = f"known here: {all_names}"
        raise JobError(
            f'site "{name}" is unknown{searched}: {remedy}, or give the path of a .toml file'
        )
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise JobError(
            f'site "{path}": this file can\'t be read ({error.strerror}); correct the path or the '
            "file's permissions"
        ) from None
    except ValueError as error:
        raise JobError(
            f'site "{path}": this file is not TOML ({error}); correct the file'
        ) from None
    try:
        site = structure(raw, Site)
    except JobError as error:
        raise JobError([f'site "{path}": {text}' for text in error.messages]) from None
    tables = (site.environment, *(workaround.environment for workaround in site.workarounds))
    problems = [
        f'site "{path}": environment: {key!r} = {value!r}: must be a name of letters, digits and '
        "_, and one line of text in quotes"
        for key, value in (pair for table in tables for pair in table.items())
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key)
        or not (isinstance(value, str) and value.isprintable())
    ]
    if problems:
        raise JobError(problems)
    return site


def seconds_of(text: str) -> int:
    """Return the seconds of a time limit such as "90" (minutes), "2h", "30m" or "1-12:00:00".

    :raises JobError: if the text has no such form, or is below a minute or above 366 days
    """
    if match := re.fullmatch(r"(\d{1,6})([smhd]?)", text, re.ASCII):
        seconds = int(match[1]) * {"s": 1, "": 60, "m": 60, "h": 3600, "d": 86400}[match[2]]
    elif match := re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d):(\d\d)", text, re.ASCII):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        raise JobError(
            f'--time "{text}": must be a number of minutes, such as 90, or have a form such as '
            "30m, 2h, 4:00:00 or 1-12:00:00"
        )
    if not 60 <= seconds <= 366 * 86400:
        raise JobError(f'--time "{text}": must be at least one minute and at most 366 days (366d)')
    return seconds


def script(site: Site, job: str, settings: Sequence[str], run: Path, request: BatchRequest) -> str:
    """Return the batch script that trains a job on a site.

    :param site: the site
    :param job: path of the job file
    :param settings: settings that override the job file, as on the command line
    :param run: run directory of the job, in which the script looks for new checkpoints
    :param request: the user's request
    :raises JobError: if an argument is not valid or does not fit the site, or if a template is
        missing
    """
    texts = [job, *settings]
    job = f"./{job}" if job.startswith("-") else job
    return _fill(site, f"mpigossip train {shlex.join([job, *settings])}", texts, run, request)


def program_script(site: Site, program: str, run: Path | None, request: BatchRequest) -> str:
    """Return the batch script that starts a custom program on a site.

    :param site: the site
    :param program: command of each rank, such as "python train.py"; `$NAME` stands for an
        environment variable, and all other characters are quoted
    :param run: run directory of the program, in which the script looks for new checkpoints; None:
        the script never queues the job again
    :param request: the user's request
    :raises JobError: as for :func:`script`, or if the program is empty or can't be split into words
    """
    words = _split_command(program, "--program")
    if not words:
        raise JobError("--program: must be a command, such as 'python train.py', but it is empty")
    return _fill(site, " ".join(map(_quote_word, words)), [program], run, request)


def _fill(
    site: Site, command: str, texts: Sequence[str], run: Path | None, request: BatchRequest
) -> str:
    """Return the filled template of a site's scheduler.

    :param site: the site
    :param command: quoted command of each rank
    :param texts: texts of the user in that command
    :param run: run directory; None: the script does not queue the job again
    :param request: the user's request
    :raises JobError: as for :func:`script`
    """
    texts = [*texts, str(run or ""), request.venv or "", request.launcher or ""]
    if problems := _find_problems(site, texts, request):
        raise JobError(problems)
    hours, rest = divmod(request.seconds, 3600)
    values = {
        "title": site.title,
        "tried": f"tested on {site.tested}"
        if site.tested
        else "never tested on the machine itself",
        "name": re.sub(r"[^A-Za-z0-9_.+-]", "_", request.name)[:40].lstrip("-.") or "mpigossip",
        "nodes": str(request.nodes),
        "clock": f"{hours:02d}:{rest // 60:02d}:{rest % 60:02d}",
        "seconds": str(request.seconds),
        "chunk": f":ncpus={site.cores}" * (site.cores > 0)
        + f":ngpus={site.gpus}" * (site.gpus > 0),
        "directives": "\n".join(_directives(site, request)),
        "environment": "\n".join(_environment(site, request)),
        "ranks": str(request.ranks),
        "shape": _shape(site, request),
        "launcher": _launch_command(site, request),
        "command": command,
        "run": shlex.quote(str(run)),
        "wrong": str(WRONG),
        "stopped": str(STOPPED),
    }
    template = find("templates") / f"{site.scheduler}.sh"
    end = "common.sh" if run else "once.sh"
    common = (find("templates") / end).read_text("utf-8")
    text = template.read_text("utf-8").replace("@common@\n", common)
    # Use a single pass, so that inserted text is not substituted again.
    filled = re.sub(r"@([a-z]+)@", lambda match: values[match[1]], text)
    return re.sub(r"\n{3,}", "\n\n", filled)


def assigns_gpus(site: Site) -> bool:
    """Return whether a job on this site may get GPUs.

    Slurm assigns none, unless the site's file states a number of GPUs or has a directive that names
    them. With other schedulers, a job may always get GPUs.
    """
    return site.scheduler != "slurm" or site.gpus > 0 or _names_gpus(site)


def _names_gpus(site: Site) -> bool:
    return any("gpu" in directive for directive in site.directives)


def _launcher(site: Site, ranks: int) -> str:
    """Return the site's command that starts ``ranks`` ranks on each host."""
    if ranks == 1:
        return site.launcher
    return (site.launcher_gpu if ranks == site.gpus else "") or site.launcher_multi


def _launch_command(site: Site, request: BatchRequest) -> str:
    """Return the quoted command that starts the ranks, with srun's option --mpi if requested.

    :raises JobError: if this command can't be split into words, or if --mpi is requested, but the
        command does not begin with srun
    """
    command = request.launcher or _launcher(site, request.ranks)
    words = _split_command(command)
    if request.mpi is not None:
        program, *options = words or [""]
        if Path(program).name != "srun":
            raise JobError(
                f'--mpi "{request.mpi}": the launcher begins with "{program}", and only srun has '
                "this option; omit --mpi, or give --launcher"
            )
        words = [program, f"--mpi={request.mpi}", *_without_mpi(options)]
    return " ".join(map(_quote_word, words))


def _without_mpi(options: Sequence[str]) -> list[str]:
    """Return options of srun without --mpi, which is written as "--mpi=X" or as two words."""
    return [
        word
        for index, word in enumerate(options)
        if not word.startswith("--mpi=") and "--mpi" not in options[max(0, index - 1) : index + 1]
    ]


def _shape(site: Site, request: BatchRequest) -> str:
    """Return the script's comment on the ranks that it starts on each host, and on their GPUs.

    If the script starts one rank per host, but the computing centre's own examples start one per
    GPU, the comment says so.
    """
    text = "One rank per host, which sees all its GPUs."
    if request.ranks > 1:
        text = f"{request.ranks} ranks per host; each sees all GPUs of the host and uses its own."
        if request.ranks_per_node is not None:
            text += f" Each node of the graph has {pluralize(request.ranks_per_node, 'rank')}."
    differs = site.examples_use == "gpu" and request.ranks == 1
    return f"{text} The centre's own examples start one per GPU." if differs else text


def _find_problems(site: Site, texts: Iterable[str], request: BatchRequest) -> list[str]:
    problems = [
        f"{text!r}: must not contain control characters or line breaks; remove them"
        for text in texts
        if not text.isprintable()
    ]
    if request.ranks > 1 and not (site.launcher_multi or request.launcher):
        problems.append(
            f"{site.title} has no launch command for several ranks per host: add `launcher_multi` "
            "to its file, or give --launcher"
        )
    if request.mpi is not None and not re.fullmatch(MPI_PLUGIN, request.mpi):
        problems.append(
            f'--mpi "{request.mpi}": must be a plugin of Slurm, such as pmix (Open MPI), pmi2 '
            "(MPICH) or cray_shasta (Cray MPICH); `srun --mpi=list` prints their names"
        )
    if request.nodes < 1:
        problems.append(f"--nodes {request.nodes}: must be at least 1")
    for option in ("account", "partition", "qos"):
        value = getattr(request, option)
        if value is None and option in site.needs:
            problems.append(f"--{option}: {site.title} requires this option; add --{option} NAME")
        elif value is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*", value):
            problems.append(
                f"--{option} {value!r}: must consist of letters, digits and any of _ . , + -, and "
                "begin with a letter, a digit or _"
            )
    return problems


def _directives(site: Site, request: BatchRequest) -> list[str]:
    prefix = PREFIX[site.scheduler]
    lines = [f"{prefix} {text}" for text in site.directives]
    for option, form in OPTIONS[site.scheduler].items():
        if (value := getattr(request, option)) is not None:
            lines.append(f"{prefix} {form.format(value)}")
    if site.scheduler == "slurm" and site.gpus and not _names_gpus(site):
        lines.append(f"{prefix} --gpus-per-node={site.gpus}")
    if site.scheduler == "slurm" and request.seconds >= EARLY_FROM_S and request.handles_signals:
        lines.append(f"{prefix} --signal=USR2@{EARLY_S}")
    return lines


def _environment(site: Site, request: BatchRequest) -> list[str]:
    lines = [f"# {note}" for note in site.notes]
    lines += [f"module load {shlex.join(site.modules)}"] if site.modules else []
    lines += [f"source {shlex.quote(request.venv + '/bin/activate')}"] if request.venv else []
    lines += [f"export {name}={_quote_word(value)}" for name, value in site.environment.items()]
    launcher = request.launcher or _launcher(site, request.ranks)
    if request.ranks > 1 or re.search(r"\$(RANKS|TASKS|CORES)\b", launcher):
        # nproc prints the value of OMP_NUM_THREADS, which the script has set to 1.
        core_count = "env -u OMP_NUM_THREADS nproc"
        cores_per_rank = site.cores // request.ranks or f'"$(($({core_count}) / {request.ranks}))"'
        lines += [
            f"RANKS={request.ranks} TASKS={request.nodes * request.ranks} CORES={cores_per_rank}"
        ]
    for workaround in site.workarounds:
        if request.ranks > 1 and not workaround.several:
            continue
        lines += [f"# {workaround.what} (since {workaround.since}: {workaround.link})"]
        lines += [
            f"export {name}={_quote_word(value)}" for name, value in workaround.environment.items()
        ]
    return lines


def _split_command(command: str, name: str = "launcher") -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise JobError(
            f"{name} {command!r}: this command can't be split into words ({error}); correct its "
            "quotes"
        ) from None


def _quote_word(text: str) -> str:
    """Quote one word, but leave `$NAME` in it for the shell to expand."""
    pieces = re.split(r"(\$[A-Z_][A-Z0-9_]*)", text)
    quoted = [
        f'"{piece}"' if index % 2 else shlex.quote(piece)
        for index, piece in enumerate(pieces)
        if piece or len(pieces) == 1
    ]
    return "".join(quoted)
