"""Modules that stood elsewhere in 0.1: an import by the old name works, and says the new one."""

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "mpigossip.training.data": "mpigossip.data.sources",
    "mpigossip.training.hooks": "mpigossip.runs.hooks",
}
"""Old names that documentation told users to import from."""


class Moved(MetaPathFinder, Loader):
    """Finds the old names; what is loaded is the very module of the new name."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        """A spec for a name of `MOVED`."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module by its new name, with one line to whoever imports."""
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}: import from there", FutureWarning, stacklevel=2)
        return importlib.import_module(new)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it was run under its own name."""


sys.meta_path.append(Moved())
