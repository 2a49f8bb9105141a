"""Reading a job's TOML, and the error that holds all mistakes in it; part of `config`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mpigossip.config.errors import Mistake
from mpigossip.config.toml import near


class JobError(Mistake):
    """Mistakes of the user, all of them: `messages` holds one sentence or paragraph for each."""

    messages: tuple[str, ...]

    def __init__(self, messages: Iterable[str]) -> None:
        messages = (messages,) if isinstance(messages, str) else messages
        self.messages = tuple(m.encode(errors="backslashreplace").decode() for m in messages)
        super().__init__(self.messages)

    def __str__(self) -> str:
        if len(self.messages) == 1:
            return self.messages[0]
        return "\n".join(f"- {message}" for message in self.messages)


def read(source: Path | str | Mapping) -> dict[str, Any]:
    """The raw sections of a job file, a TOML text of several lines or a dict; safe to change."""
    if isinstance(source, Mapping):
        tables = dict(source)
    else:
        where, text = "the job", source
        if isinstance(source, Path) or "\n" not in source:
            where = f'job file "{source}"'
            try:
                text = Path(source).read_text("utf-8-sig")
            except FileNotFoundError:
                raise JobError([f"{where}: no such file; {_beside(Path(source))}"]) from None
            except (OSError, ValueError) as error:
                raise JobError([f"{where} can't be read as text: {error}"]) from None
        try:
            tables = tomllib.loads(str(text))
        except (ValueError, RecursionError) as error:
            hint = "text needs quotes, sections stand in [brackets]"
            raise JobError([f"{where} is not TOML: {error}; {hint}"]) from None
    return {str(n): dict(t) if isinstance(t, Mapping) else t for n, t in tables.items()}


def _beside(path: Path) -> str:  # job files in the folder where `path` was looked for
    try:
        return near(path.name, [file.name for file in path.parent.glob("*.toml")])
    except OSError:
        return "give the path of a TOML file"
