"""Jobs: frozen dataclasses that are read from TOML, with all user errors reported at once."""

from mpigossip.config.choices import BuilderSpec as BuilderSpec
from mpigossip.config.errors import JobError as JobError
from mpigossip.config.reading import as_dict as as_dict
from mpigossip.config.reading import dump as dump
from mpigossip.config.reading import load as load
from mpigossip.config.sections import SECTIONS as SECTIONS
from mpigossip.config.sections import CadenceSection as CadenceSection
from mpigossip.config.sections import CheckpointSection as CheckpointSection
from mpigossip.config.sections import ClockSection as ClockSection
from mpigossip.config.sections import Data as Data
from mpigossip.config.sections import GraphSection as GraphSection
from mpigossip.config.sections import Job as Job
from mpigossip.config.sections import LocalSection as LocalSection
from mpigossip.config.sections import LogSection as LogSection
from mpigossip.config.sections import NodeSection as NodeSection
from mpigossip.config.sections import Schedule as Schedule
from mpigossip.config.sections import TaskSection as TaskSection
