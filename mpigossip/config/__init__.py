"""A job: frozen dataclasses read from TOML, with every mistake reported at once."""

from mpigossip.config.reading import JobError
from mpigossip.config.sections import (
    SECTIONS,
    CadenceSection,
    CheckpointSection,
    Data,
    GraphSection,
    Job,
    LogSection,
    NodeSection,
    Schedule,
    as_dict,
    dump,
    load,
)

__all__ = [
    "CadenceSection",
    "CheckpointSection",
    "Data",
    "GraphSection",
    "Job",
    "JobError",
    "LogSection",
    "NodeSection",
    "SECTIONS",
    "Schedule",
    "as_dict",
    "dump",
    "load",
]
