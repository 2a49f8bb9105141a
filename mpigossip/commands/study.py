"""`mpigossip study`: run a grid of settings, nodes and seeds from a file; tables and plots."""

from __future__ import annotations

from pathlib import Path

from mpigossip.commands.arguments import command, tell

EXAMPLES = "mpigossip study jobs/study.toml --out runs/study"


def add(commands) -> None:
    """Add it to the parser."""
    study = command(
        commands, "study", run,
        "simulate a grid of settings, nodes and seeds; what is there isn't repeated", EXAMPLES,
    )  # fmt: skip
    study.add_argument("file", type=Path, metavar="FILE.toml", help="its keys are those of study()")
    study.add_argument(
        "--out", type=Path, metavar="DIR", help="where logs, tables and curves go (default: output)"
    )
    study.add_argument("--dry-run", action="store_true", help="print the missing runs' commands")


def run(options) -> None:
    """Do what is missing; write table.csv, table.tex and a picture of each figure."""
    from mpigossip.store.hdf5 import replacing
    from mpigossip.studies import study
    from mpigossip.studies.grid import arguments
    from mpigossip.studies.running import Missing

    given = arguments(options.file, study)
    if options.out is not None:
        given["output"] = options.out
    if options.dry_run:
        try:
            tell(study(**given | {"processes": 0}))
        except Missing as missing:
            tell(missing)
        return
    found = study(**given)
    tell(found)
    for name, text in (("table.csv", found.table("csv")), ("table.tex", found.table("latex"))):
        with replacing(found.folder / name) as beside:
            beside.write_text(text, encoding="utf-8")
    for y in found.figures:
        found.plot(y, out=found.folder / f"{y}.png")
    for name, why in found.left_out.items():
        tell(f"left out: {name}: {why}")
    best, ties = found.best(), len(found.ties())
    word = ", ".join(str(best[axis]) for axis in found.axes) or "the job"
    tell(f"best by {found.judge}: {word}" + (f"; {ties} can't be told from it" if ties else ""))
    tell(f"{found.folder}: table.csv, table.tex, {', '.join(f'{y}.png' for y in found.figures)}")
