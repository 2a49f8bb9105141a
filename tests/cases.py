"""Parametrized tests: many cases in one item, or a few by default and all with `pytest --all`."""

import contextlib
import functools
import inspect
import io
import itertools
import random
import re
import runpy
import sys
from collections.abc import Callable, Collection, Iterable

with contextlib.suppress(ImportError):  # tools/gpu_check.sh measures where there is none
    import pytest


def catching(error: type[Exception]) -> tuple[list[str], Callable]:
    """Return a list, and a function that calls another one, whose error it adds to the list."""
    messages: list[str] = []

    def catch(act: Callable, *arguments, **options) -> None:
        with pytest.raises(error) as caught:
            act(*arguments, **options)
        messages.append(str(caught.value))

    return messages, catch


QUOTED = re.compile(r"""\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)|`[^`]*`""")
MAX_PROSE = 4
"""Largest number of words of prose in a pattern of a message."""


def prose(text: str) -> list[str]:
    """Return the words of prose in a text or pattern: they are free to change.

    Quoted texts, names (`data.batch`, `--nodes`, `JobError`), paths, numbers and parts of a pattern
    such as `\\d+` are not prose: users, programs and pages rely on them.
    """
    words = (word.strip(".,:;!?()[]…") for word in QUOTED.sub(" ", text).split())
    return [word for word in words if re.fullmatch(r"[a-z][a-z'’-]+", word)]


def naming(*fragments: object) -> str:
    """Return a pattern of messages that contain all fragments, in any order, as whole words.

    Fragments are the name of a setting, the value, the limit, a name in the remedy, or one to three
    words that distinguish the message from others; the rest of a message may be reworded without a
    change of tests. A fragment 1 is contained neither in 12 nor in 1.5, and "batch" not in
    "data.batch". A tuple stands for its items, so that a column of cases can hold several.
    """
    texts = [
        str(text)
        for fragment in fragments
        for text in (fragment if isinstance(fragment, tuple) else [fragment])
    ]
    assert all(texts) and texts, "a fragment is empty"
    words = [word for text in texts for word in prose(text)]
    assert len(words) <= MAX_PROSE, f"{texts} pins prose: {words}; name the setting and the value"
    return r"(?s)\A" + "".join(
        "(?=.*"
        + (r"(?<![\w-])(?<!\w\.)" if re.match(r"\w", text) else "")
        + re.escape(text)
        + (r"(?![.-]?\w)" if re.search(r"\w\Z", text) else "")
        + ")"
        for text in texts
    )


def on_each(names: str | Iterable[str], values: Iterable, few: Collection = ()) -> Callable:
    """Parametrize like pytest, but with all cases in one item: for cases that take milliseconds.

    A failure ends the item and names its case. The cases share fixtures. ``few``: the cases
    that run by default; the others are a separate item, with `--all`.
    """
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    assert values, "no case"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args, group=values, **fixtures):
            for value in group:
                case = dict(zip(names, [value] if len(names) == 1 else value, strict=True))
                try:
                    test(*args, **fixtures, **case)
                except BaseException as error:
                    shown = ", ".join(f"{k} = {str(v)[:200]}" for k, v in case.items())
                    error.add_note(f"case: {shown}")
                    raise

        wanted = inspect.signature(test).parameters.values()
        left = [p for p in wanted if p.name not in names]
        if few:
            left.append(inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY))
            groups = [[v for v in values if v in few], every([v for v in values if v not in few])]
            run = pytest.mark.parametrize("group", groups, ids=["few", "others"])(run)
        run.__signature__ = inspect.Signature(left)
        return run

    return decorate


def few(cases: Iterable[str]) -> list[str]:
    """Return the settings that contain a word "section.key=value" which no earlier ones contain."""
    seen = set[str]()
    chosen = []
    for case in cases:
        if not seen.issuperset(case.split()):
            chosen.append(case)
        seen.update(case.split())
    return chosen


def covering(
    cases: Iterable[tuple],
    strength: int = 2,
    covered: Iterable[tuple] = (),
    excluded: Collection[int] = (),
) -> list[tuple]:
    """Return few of the cases, in which values of different fields meet as they do in all cases.

    The next case is always one of those that add the most combinations. Among them it is drawn,
    always alike, so that the values of a field occur about equally often.

    :param cases: all cases that are possible, as tuples of equal length with hashable fields
    :param strength: number of fields whose combinations of values have to occur; 2: all pairs
    :param covered: cases that run elsewhere, whose combinations need not occur again
    :param excluded: indices of fields whose combination need not occur; (): all occur
    """

    def combinations(case: tuple) -> set:
        return {
            combination
            for combination in itertools.combinations(enumerate(case), strength)
            if tuple(field for field, _ in combination) != tuple(excluded)
        }

    drawn = list(cases)
    random.Random(0).shuffle(drawn)
    left = {case: combinations(case) for case in drawn}
    missing = set().union(*left.values()).difference(*map(combinations, covered))
    chosen = []
    while missing:
        chosen.append(max(left, key=lambda case: len(missing & left[case])))
        missing -= left[chosen[-1]]
    return chosen


def with_world(function: Callable | None = None, *, per: int | str = 1, **limits) -> Callable:
    """Return a function for pools of ranks that calls `function(world, …)` with a new MPIWorld.

    ``per``: number of ranks of a node; ``limits``: MPIWorld's `timeout_s`.
    """
    if function is None:
        return functools.partial(with_world, per=per, **limits)

    @functools.wraps(function)
    def on_rank(comm, *args, **options):
        from mpigossip.cluster.mpi_world import MPIWorld

        with MPIWorld(comm, **limits) as world:
            world.group_into_nodes(per)
            return function(world, *args, **options)

    return on_rank


def command(comm, folder, words) -> tuple[int, str, str]:
    """Run `mpigossip …`, or a program, in a folder, on a rank of a pool; return code and output.

    The output is a pair of texts: stdout and stderr.
    """
    from mpigossip import cli
    from mpigossip.config import readable

    readable.noted.clear()
    # There is no launcher here that would end the other ranks.
    hush = cli.SILENT_EXIT_S
    cli.SILENT_EXIT_S = 0.0
    out = io.StringIO()
    err = io.StringIO()
    redirected = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    paths = sys.path[:]
    given = sys.argv
    code = 0
    try:
        with contextlib.chdir(folder), redirected[0], redirected[1]:
            if words[0].endswith(".py"):
                sys.argv = words
                runpy.run_path(words[0], run_name="__main__")
            else:
                sys.path.insert(0, folder)
                code = cli.main(words)
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        cli.SILENT_EXIT_S = hush
        sys.path[:] = paths
        sys.argv = given
    return code, out.getvalue(), err.getvalue()


def every(*values):
    """Return a case, of one or several parameters, that only `pytest --all` runs."""
    return pytest.param(*values, marks=pytest.mark.every)


def some(values: Iterable, default: Collection) -> list:
    """Return all values (or tuples) as cases; without `--all`, only ``default`` runs."""
    values = list(values)
    assert all(value in values for value in default), "a default case that isn't there"
    return [v if v in default else every(*v if isinstance(v, tuple) else [v]) for v in values]
