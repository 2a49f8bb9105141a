"""Cases of a test: many in one item, or a few by default and all with `pytest --all`; a World."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable

import pytest


def on_each(names: str | Iterable[str], values: Iterable) -> Callable:
    """As pytest.mark.parametrize, all cases in one item: for cases that take milliseconds.

    A failure ends the item and names its case. Fixtures are shared by the cases.
    """
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    assert values, "no case"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args, **fixtures):
            for value in values:
                case = dict(zip(names, [value] if len(names) == 1 else value, strict=True))
                try:
                    test(*args, **fixtures, **case)
                except BaseException as error:
                    shown = ", ".join(f"{k} = {str(v)[:200]}" for k, v in case.items())
                    error.add_note(f"case: {shown}")
                    raise

        wanted = inspect.signature(test).parameters.values()
        left = [p for p in wanted if p.name not in names]
        run.__signature__ = inspect.Signature(left)
        return run

    return decorate


def with_world(function: Callable) -> Callable:
    """For pools of ranks: `function(world, …)` with a World of their own, closed at its end."""

    @functools.wraps(function)
    def on_rank(comm, *args, **options):
        from mpigossip.cluster.ranks import World

        with World(comm) as world:
            return function(world, *args, **options)

    return on_rank


def every(*values):
    """A case (of several parameters: a tuple's values) that only `pytest --all` runs."""
    return pytest.param(*values, marks=pytest.mark.every)


def some(values: Iterable, default: Collection) -> list:
    """All of the values (of several parameters: tuples); `--all` alone runs the others."""
    values = list(values)
    assert all(value in values for value in default), "a default case that isn't there"
    return [v if v in default else every(*v if isinstance(v, tuple) else [v]) for v in values]
