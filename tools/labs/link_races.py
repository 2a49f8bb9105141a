"""Test whether a file system keeps the promises that members which join and leave need.

    python tools/labs/link_races.py FOLDER        # on two hosts at once, or more, on one folder

Each process links 200 names that the others link, too; each name has to belong to exactly one of
them, and every process has to read the same content. Prints a verdict; exit code 1 where one is
broken.
"""

import os
import secrets
import sys
import time
from pathlib import Path

NAMES, WAIT_S = 200, 120


def main() -> int:
    """Race, then compare."""
    root, me = Path(sys.argv[1]), f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
    for folder in ("race", "here", "seen"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    if any((root / "seen").iterdir()):
        print(f"{root} was used before: name a new folder")
        return 2
    (root / "here" / me).touch()
    end = time.monotonic() + WAIT_S
    while len(list((root / "here").iterdir())) < 2:
        if time.monotonic() > end:
            (root / "here" / me).unlink()
            print("nobody else came: start a second process on another host, on the same folder")
            return 1
        time.sleep(0.2)
    own = root / f"{me}.own"
    own.write_text(me)
    with own.open("rb") as file:
        os.fsync(file.fileno())
    won, errors = 0, []
    for k in range(NAMES):
        name = root / "race" / f"{k:04d}"
        try:
            os.link(own, name)
            won += 1
        except FileExistsError:
            won += name.read_text() == me  # the reply of a link that was done may be lost
        except OSError as error:
            errors.append(str(error))
    if errors:
        print(f"BROKEN: {errors[0]}: members must not use this folder")
        return 1
    text = "".join(f"{k} {(root / 'race' / f'{k:04d}').read_text()}\n" for k in range(NAMES))
    beside = root / f"{me}.seen"
    beside.write_text(text)
    os.link(beside, root / "seen" / me)
    everybody = {path.name for path in (root / "here").iterdir()}
    while {path.name for path in (root / "seen").iterdir()} < everybody:
        if time.monotonic() > end:
            print("another process didn't finish")
            return 1
        time.sleep(0.2)
    views = {path.read_text() for path in (root / "seen").iterdir()}
    mine = sum(line.endswith(me) for line in text.splitlines())
    good = len(views) == 1 and mine == won
    verdict = "good" if good else "BROKEN: members must not use this folder"
    print(f"{len(everybody)} processes, {NAMES} names, {won} won here, {len(views)} view(s): "
          f"{verdict}")  # fmt: skip
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
