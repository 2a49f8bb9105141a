"""Print the settings of a sweep, one line per combination; sweep.sbatch trains each line.

    python sweep.py digits graph.name=ring,exponential run.seed=0,1 >sweep.txt
    sbatch --array=1-4 --nodes=4 --time=2:00:00 sweep.sbatch digits sweep.txt

Separate the values of a setting by commas; each combination must be a valid job. Line k trains in
runs/JOB-k, and `mpigossip report runs/JOB-* --html OUT.html` compares them. Without a scheduler,
use `mpigossip study`.
"""

import argparse
import itertools
import sys
from pathlib import Path

from mpigossip.config import JobError
from mpigossip.config.errors import WRONG
from mpigossip.training import assemble


def main() -> int:
    """Check all combinations, and print their settings; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", type=Path, metavar="JOB.toml")
    parser.add_argument("axes", nargs="+", metavar="section.key=value,value")
    options = parser.parse_args()
    try:
        lines = points(options.axes)
        for line in lines:
            assemble.load(options.job, line)
    except JobError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return WRONG
    for line in lines:
        print(" ".join(line))
    return 0


def points(axes: list[str]) -> list[tuple[str, ...]]:
    """Return all combinations of the values of the axes.

    :param axes: texts of the form "section.key=value,value", one per setting
    :return: for each combination, its settings "section.key=value"
    :raises JobError: if an axis contains no "="
    """
    settings = []
    for axis in axes:
        key, equals, values = axis.partition("=")
        if not equals:
            raise JobError(f'"{axis}" is no axis: write it as section.key=value,value')
        settings.append([f"{key}={value}" for value in values.split(",")])
    return list(itertools.product(*settings))


if __name__ == "__main__":
    sys.exit(main())
