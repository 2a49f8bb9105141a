"""Commands for files: `mpigossip data`, `log`, `report` and `checkpoint`."""

from pathlib import Path

from mpigossip.commands.arguments import command, family, many, print_safe, run_named, size_in_bytes
from mpigossip.config.errors import OK, WRONG
from mpigossip.config.readable import print_note

PACK = """
mpigossip data pack imagenet imagenet.h5 --image-size 256
mpigossip data pack cifar10 cifar10.h5 --decoded
mpigossip data pack books books.h5 --text
mpigossip data pack books books.h5 --text --tokenizer bpe --vocabulary 8192
"""


def add(commands) -> None:
    """Add the commands of this module to the parser."""
    _add_data(commands)
    _add_log(commands)
    _add_checkpoint(commands)


def _add_data(commands) -> None:
    data = family(commands, "data", "pack|show", "convert image folders and text to HDF5", PACK)
    pack = command(
        data, "pack", _pack, "pack train/CLASS/*.jpg and test/CLASS/*.jpg into HDF5", PACK
    )
    pack.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder; of text, also a single file"
    )
    pack.add_argument("out", type=Path, metavar="OUT.h5")
    pack.add_argument(
        "--image-size", type=many, help="resize the shorter side to this number of pixels"
    )
    pack.add_argument(
        "--decoded",
        action="store_true",
        help="store pixels, so that no run decodes images; for small images of equal size",
    )
    pack.add_argument("--text", action="store_true", help="pack text files for a language model")
    pack.add_argument(
        "--tokenizer",
        default="byte",
        help="byte (default), or bpe: byte-pair encoding learned from the text; needs tokenizers",
    )
    pack.add_argument(
        "--vocabulary", type=int, default=4096, help="entries of bpe, 257 to 65536; default: 4096"
    )
    show = command(
        data, "show", _show_data, "describe a packed file", "mpigossip data show imagenet.h5"
    )
    show.add_argument("file", type=Path, metavar="FILE.h5")


def _pack(options) -> None:
    from mpigossip.store.dataset import describe, pack

    pack(
        options.folder,
        options.out,
        image_size=options.image_size,
        decoded=options.decoded,
        text=options.text,
        tokenizer=options.tokenizer,
        vocabulary=options.vocabulary,
    )
    print_safe(describe(options.out))


def _show_data(options) -> None:
    from mpigossip.store.dataset import describe

    print_safe(describe(options.file))


PLOT = """
mpigossip log plot runs/digits
mpigossip log plot runs/ring runs/digits --out compare.png
"""
EXPORT = """
mpigossip log export runs/digits --csv digits.csv
mpigossip log export runs/digits --tensorboard events
"""
REPORT = """
mpigossip report runs/digits
mpigossip report runs/ring runs/digits --html report.html
"""


def _add_log(commands) -> None:
    log = family(commands, "log", "show|export|plot", "show, export and plot logs", PLOT, EXPORT)
    summary = "print the evaluations and the summary of a run"
    show = command(log, "show", _show_log, summary, "mpigossip log show runs/digits")
    show.add_argument("run_folder", type=Path, metavar="RUN", help="run directory, or log file")
    export = command(
        log, "export", _export_log, "convert the log of a run for other programs", EXPORT
    )
    export.add_argument("run_folder", type=Path, metavar="RUN", help="run directory, or log file")
    to = export.add_mutually_exclusive_group(required=True)
    to.add_argument(
        "--csv", type=Path, metavar="FILE", help="such as run.csv; also writes run-evaluations.csv"
    )
    to.add_argument("--tensorboard", type=Path, metavar="DIR", help="folder for event files")
    plot = command(log, "plot", _plot, "plot one or several runs into a PNG file", PLOT)
    plot.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories, or log files"
    )
    plot.add_argument("--out", type=Path, metavar="OUT.png", help="default: RUN/log.png")
    summary = "write an HTML page about one or several runs"
    report = command(commands, "report", _report, summary, REPORT)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    report.add_argument("--html", type=Path, metavar="OUT.html", help="default: RUN/report.html")


def _show_log(options) -> None:
    from mpigossip.analysis.logged_runs import log_of
    from mpigossip.analysis.report import table
    from mpigossip.store.log import read

    print_safe(table(read(log_of(run_named(options.run_folder)))))


def _export_log(options) -> None:
    from mpigossip.analysis.logged_runs import log_of
    from mpigossip.store import log_export
    from mpigossip.store.log import read

    log = read(log_of(run_named(options.run_folder)))
    if options.csv:
        _check_output(options.csv)
        log_export.to_csv(log, options.csv)
    else:
        log_export.to_tensorboard(log, options.tensorboard)
    print_safe(options.csv or options.tensorboard)


def _plot(options) -> None:
    from mpigossip.analysis.plot import plot

    out = options.out or _default_output(options.runs[0], "log.png")
    _check_output(out)
    note = plot([run_named(run) for run in options.runs], out)
    print_safe(out)
    if note:
        print_note(note)


def _report(options) -> None:
    from mpigossip.analysis.report import write

    out = options.html or _default_output(options.runs[0], "report.html")
    _check_output(out)
    write([run_named(run) for run in options.runs], out)
    print_safe(out)


def _check_output(out: Path) -> None:
    """Check that an output file would not replace a log or another HDF5 file.

    :raises StoreError: if ``out`` is an HDF5 file
    """
    import h5py

    from mpigossip.store import StoreError

    try:
        is_hdf5 = out.is_file() and h5py.is_hdf5(out)
    except PermissionError:
        return  # The error of reading the run or of writing the output says more.
    if is_hdf5:
        raise StoreError(
            f'"{out}" is an HDF5 file, such as a log, which the output would replace; give another '
            "name"
        )


def _default_output(run: Path, name: str) -> Path:
    return (run if run.is_dir() else run.parent) / name


MODEL = """
mpigossip checkpoint export runs/digits --out model.safetensors
mpigossip checkpoint export runs/digits --out node2.pt --node 2
mpigossip checkpoint export runs/a --out a.safetensors --max-shard-size 5GB
mpigossip checkpoint export runs/a --out a.safetensors --place 3 --round 40
"""


def _add_checkpoint(commands) -> None:
    example = "mpigossip checkpoint {} runs/digits".format
    members = "show|verify|export"
    summary = "inspect checkpoints and export models"
    checkpoint = family(commands, "checkpoint", members, summary, example("verify"), MODEL)
    summary = "print the content of a checkpoint"
    show = command(checkpoint, "show", _show_checkpoint, summary, example("show"))
    summary = "read a whole checkpoint and compare its checksums"
    verify = command(checkpoint, "verify", _verify, summary, example("verify"))
    summary = "export the averaged model for PyTorch"
    export = command(checkpoint, "export", _export_model, summary, MODEL)
    for parser in (show, verify, export):
        parser.add_argument("path", type=Path, metavar="RUN", help="run directory, or checkpoint")
    export.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="model.safetensors or model.pt"
    )
    export.add_argument(
        "--node", type=int, metavar="K", help="model of node K; default: the average of all nodes"
    )
    export.add_argument(
        "--max-shard-size",
        type=size_in_bytes,
        metavar="SIZE",
        help="write a larger model to several .safetensors files with an index, as 5GB",
    )
    export.add_argument(
        "--place", type=int, metavar="P", help="model of a member's place, after a round"
    )
    export.add_argument(
        "--round", type=int, metavar="R", help="round of the place; default: the newest stored one"
    )
    trusted = (
        "import the module:factory that the checkpoint names, to add frozen and tied parameters"
    )
    export.add_argument("--trust-model", action="store_true", help=trusted)


def _checkpoint_of(path: Path) -> Path:
    from mpigossip.store import StoreError, checkpoint

    if (run_named(path) / "checkpoint.h5").exists():
        return path
    newest, damaged = checkpoint.newest(path)
    is_of_members = (path / "places").is_dir()
    if is_of_members and newest is None and not damaged and not (path / "END").exists():
        raise StoreError(
            f'the training in "{path}" has not ended, and members write a checkpoint only at the '
            f"end: wait for it, or export the model of one round by `mpigossip checkpoint export "
            f"{path} --out OUT --place P --round R`"
        )
    if damaged or newest is None:
        problem = (
            f'"{path}" is neither a checkpoint nor a run with one: name RUN or '
            "RUN/checkpoints/step-…"
        )
        problem = (
            f"the newest complete checkpoint is {newest}: name that one" if newest else problem
        )
        raise StoreError("; ".join([*damaged.values(), problem]))
    return newest


def _show_checkpoint(options) -> None:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    manifest = checkpoint.read_manifest(path)
    print_safe(f"{path}: step {manifest.step}, {manifest.n} nodes")
    for entry in manifest.entries:
        print_safe(f"  {entry.file}  {entry.bytes:,} bytes")
    print_safe(f"digest {checkpoint.digest(path)}\n\n{manifest.job}")


def _verify(options) -> int:
    from mpigossip.store import checkpoint

    path = _checkpoint_of(options.path)
    problems = checkpoint.verify(path)
    print_safe("\n".join(problems) or f"{path}: complete")
    return WRONG if problems else OK


def _export_model(options) -> None:
    from mpigossip.runs.model_export import export, export_round
    from mpigossip.store import StoreError

    most = options.max_shard_size
    if options.place is not None:
        if options.node is not None or options.trust_model:
            raise StoreError(
                "--place exports the model of one member, so that there is no node to choose, and "
                "imports no code: omit --node and --trust-model"
            )
        folder = run_named(options.path)
        print_safe(export_round(folder, options.out, options.place, options.round, most))
        return
    if options.round is not None:
        raise StoreError(
            f"--round {options.round} requires --place P, the place that trained this round"
        )
    path = _checkpoint_of(options.path)
    print_safe(export(path, options.out, options.node, options.trust_model, most))
