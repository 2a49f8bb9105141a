"""Records of a training in a folder: small JSON objects with a fixed set of typed fields."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from mpigossip.mixing.members.disk import Unusable

MOST = 1 << 53
"""Whole numbers stay below."""
FILE = r"\d{6}-[0-9a-f]{16}\.h5"
"""Names of model files."""


class Version(NamedTuple):
    """A model: that of a place after a round."""

    place: int
    round: int


@dataclass(frozen=True, kw_only=True)
class Record:
    """What all records have; ``nonce`` makes each content its own."""

    kind: ClassVar[str] = ""
    place: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps({"kind": self.kind, **asdict(self)}).encode()


@dataclass(frozen=True, kw_only=True)
class Start(Record):
    """Round 0 of a chain: the models whose average the member began with (none: the seed)."""

    kind = "start"
    inputs: tuple[Version, ...]
    promise: float
    about: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Round(Record):
    """A published round: averaged with ``peer``, trained ``chunk``, model in ``file``.

    ``age`` is a Lamport clock, ``progress`` the chunks that its history has reached, ``promise``
    the seconds of silence at most until the next record. ``checksum`` is of the file's bytes,
    ``digest`` of its arrays.
    """

    kind = "round"
    round: int
    claim: str
    chunk: int
    peer: tuple[Version, ...]
    age: int
    progress: int
    promise: float
    step: int
    file: str
    bytes: int
    checksum: str
    parameters: int
    digest: str

    @property
    def version(self) -> Version:
        """Its name for others."""
        return Version(self.place, self.round)


@dataclass(frozen=True, kw_only=True)
class Closed(Record):
    """The end of a chain: "left" by itself, or silent for longer than it promised."""

    kind = "closed"
    round: int
    why: str
    by: int


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """Rounds of a place from ``first`` on train the chunks from ``chunk`` to their block's end."""

    kind = "claim"
    first: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class End(Record):
    """All chunks are trained; the result is the average of these versions."""

    kind = "end"
    versions: tuple[Version, ...]


KINDS: dict[str, type[Record]] = {cls.kind: cls for cls in (Start, Round, Closed, Claim, End)}


def parse(content: bytes, name: str, *kinds: type[Record]) -> Any:
    """The record of one of these kinds; raises Unusable."""
    try:
        found = json.loads(content)
        cls = KINDS[found.pop("kind")]
        if cls not in kinds:
            raise ValueError(f'it is of kind "{cls.kind}"')
        types = {one.name: one.type for one in fields(cls)}
        if found.keys() != types.keys():
            raise ValueError("it lacks fields or has others")
        made = cls(**{key: _typed(found[key], str(types[key]), key) for key in types})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"{name} is no record: {str(error)[:100]}") from None
    if isinstance(made, Round) and not re.fullmatch(FILE, made.file, re.ASCII):
        raise Unusable(f"{name} names {made.file[:40]!r} as its model")
    return made


def _typed(value: Any, kind: str, name: str) -> Any:
    """A field's value as its type; ValueError where it is another."""
    if kind == "int" and type(value) is int and 0 <= value < MOST:
        return value
    if kind == "float" and type(value) in (int, float) and 0 <= value < MOST:
        return float(value)
    if kind == "str" and isinstance(value, str) and value.isprintable():
        return value
    if kind.startswith("tuple") and isinstance(value, list) and len(value) <= 1024:
        return tuple(Version(*(_typed(one, "int", name) for one in pair)) for pair in value)
    if kind.startswith("dict") and isinstance(value, dict) and len(value) <= 64:
        return {_typed(k, "str", name): _typed(v, "str", name) for k, v in value.items()}
    raise ValueError(f'"{name}" is {str(value)[:40]!r}')
