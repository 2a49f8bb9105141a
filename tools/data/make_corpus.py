"""Make a larger text from Debian's package of the kernel's sources.

    python tools/data/make_corpus.py corpus --megabytes 200
    mpigossip data pack --text corpus corpus.h5 --tokenizer bpe --vocabulary 8192

The program needs Debian or a derivative, but not root: `apt-get download` fetches the package
(linux-source-6.1 has about 140 MB), and C files are selected from it. The order of selection is
given by a checksum of the names, so that files come from all directories and a smaller text is part
of a larger one. The kernel is under GPL-2.0; the text stays where you make it.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "linux-source-6.1"
SUFFIXES = (".c", ".h")
LARGEST = 1 << 18
"""Largest size of a file in bytes; larger files are generated tables of registers."""


def chosen(sizes: dict[str, int], limit: int) -> list[str]:
    """Return names in the order of their checksums, up to a total of ``limit`` bytes."""
    names = []
    total = 0
    for name in sorted(sizes, key=lambda name: (zlib.crc32(name.encode()), name)):
        if total >= limit:
            break
        names.append(name)
        total += sizes[name]
    return names


def members(archive: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, str]]:
    """Yield the C files in the kernel's tar archive, and their names below its top folder."""
    with tarfile.open(archive, "r|*") as tar:
        for one in tar:
            name = one.name.partition("/")[2]
            if (
                one.isfile()
                and 0 < one.size <= LARGEST
                and name.endswith(SUFFIXES)
                and ".." not in name
            ):
                yield tar, one, name


def write(archive: Path, folder: Path, most: int) -> tuple[int, int, int]:
    """Write the text below ``folder``; return the numbers of files, bytes and non-UTF-8 files."""
    wanted = set(chosen({name: one.size for _, one, name in members(archive)}, most))
    files = total = odd = 0
    for tar, one, name in members(archive):
        if name not in wanted:
            continue
        content = tar.extractfile(one)
        data = content.read() if content else b""
        try:
            data.decode()
        except UnicodeDecodeError:
            odd += 1
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files = files + 1
        total = total + len(data)
    return files, total, odd


def fetched(package: str, within: Path) -> Path:
    """Download the package to a folder; return the kernel's tar archive in it."""
    try:
        subprocess.run(["apt-get", "download", package], cwd=within, check=True)
        (deb,) = within.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", deb, within / "out"], check=True)
        return next((within / "out" / "usr" / "src").glob("linux-source-*.tar.*"))
    except (OSError, ValueError, StopIteration, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"{package} can't be had ({error}): this needs Debian or its kin, and apt-get update; "
            "--package names another, as of `apt-cache search '^linux-source'`, --archive a "
            "kernel's linux-*.tar.xz that you have"
        ) from None


def main(words: list[str] | None = None) -> None:
    """Write the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a new one")
    parser.add_argument("--megabytes", type=float, default=200.0, help="of text (200)")
    parser.add_argument("--package", default=PACKAGE, help=f"of sources ({PACKAGE})")
    parser.add_argument("--archive", type=Path, help="a kernel's tar, in place of the package")
    options = parser.parse_args(words)
    if options.folder.exists() and any(options.folder.iterdir()):
        raise SystemExit(f"{options.folder} is not empty; name a new folder")
    if options.megabytes <= 0:
        raise SystemExit(f"--megabytes {options.megabytes:g}: give a number above 0")
    if options.archive and not options.archive.is_file():
        raise SystemExit(f"--archive {options.archive}: no such file")
    options.folder.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.resolve().parent) as within:
        archive = options.archive or fetched(options.package, Path(within))
        options.folder.mkdir(exist_ok=True)
        files, total, odd = write(archive, options.folder, round(options.megabytes * 1e6))
    print(f"{options.folder}: {files} files, {total / 1e6:.1f} MB; {odd} were no UTF-8")
    if total < 0.99e6 * options.megabytes:
        print(f"the package has no more than {total / 1e6:.1f} MB of C", file=sys.stderr)


if __name__ == "__main__":
    main()
