"""A job: frozen dataclasses read from TOML, with every mistake reported at once."""

from mpigossip.config.choices import Part
from mpigossip.config.errors import JobError
from mpigossip.config.reading import as_dict, dump, load
from mpigossip.config.sections import (
    SECTIONS,
    CadenceSection,
    CheckpointSection,
    ClockSection,
    Data,
    GraphSection,
    Job,
    LocalSection,
    LogSection,
    NodeSection,
    Schedule,
    TaskSection,
)

__all__ = [
    "CadenceSection",
    "CheckpointSection",
    "ClockSection",
    "Data",
    "GraphSection",
    "Job",
    "JobError",
    "LocalSection",
    "LogSection",
    "NodeSection",
    "Part",
    "SECTIONS",
    "Schedule",
    "TaskSection",
    "as_dict",
    "dump",
    "load",
]
