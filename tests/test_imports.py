"""The shape of the package: imports go one way, and nothing heavy loads before it is needed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpigossip
from tests.cases import naming, on_each

PACKAGE = Path(mpigossip.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
# A subpackage imports only from subpackages to its left; three neighbours don't import each other.
ROOMS = [
    "config",
    "store",
    "graphs",
    "members",
    "cluster",
    "mixing",
    "groups",
    "algorithms",
    "engine",
    "data",
    "models",
    "training",
    "runs",
    "optim",
    "studies",
    "analysis",
    "commands",
    "cli",
]
SIDEWAYS = {"mixing", "groups", "algorithms"}
# ExchangeKind, MessageLayout and the sum, which the three have in common
SHARED = {"mpigossip.mixing.base", "mpigossip.mixing.combine"}
MPI_ROOMS = {"cluster", "mixing", "groups", "analysis"}
CUPY_ROOMS = {"groups", "mixing"}
HELP = ["-m", "mpigossip", "--help"]
SHOW = ["-m", "mpigossip", "graph", "show", "one-peer-exponential", "--nodes", "8"]


def room(module: str) -> str:
    """Return the subpackage of a module: `mixing` for `mpigossip.mixing.base`."""
    return module.split(".")[1] if "." in module else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str) -> list[tuple[str, int]]:
    """Return every module imported anywhere in the file (inside functions, too), with its line."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: imports are absolute here"
            if node.module == "mpigossip":
                modules += [(f"mpigossip.{alias.name}", node.lineno) for alias in node.names]
            else:
                modules.append((node.module, node.lineno))
    return modules


def back_edges(module: str, tree: ast.Module) -> list[str]:
    here = room(module)
    wrong = []
    for name, line in imports(tree, module):
        if name in ("mpigossip", "mpigossip.__version__") or name in SHARED and here in SIDEWAYS:
            continue
        there = room(name) if name.startswith("mpigossip.") else None
        if there not in (None, here) and (
            ROOMS.index(there) > ROOMS.index(here) or {here, there} <= SIDEWAYS
        ):
            wrong.append(f"{module}:{line}: {here} must not import {name}")
        if name.split(".")[0] == "mpi4py" and here not in MPI_ROOMS:
            wrong.append(f"{module}:{line}: MPI has no place in {here}")
        if name.split(".")[0] in ("tests", "tools"):
            wrong.append(f"{module}:{line}: the package imports neither tests nor tools")
        if name.split(".")[0] == "cupy" and here not in CUPY_ROOMS:
            wrong.append(f"{module}:{line}: cupy has no place in {here}")
    return wrong


@on_each("path", MODULES)
def test_imports_go_one_way(path):
    module = module_name(path)
    tree = ast.parse(path.read_text())
    if room(module) in ("__init__", "__main__"):
        outside = [name for name, _ in imports(tree, module) if name.split(".")[0] in HEAVY]
        assert outside == []
    else:
        assert back_edges(module, tree) == []


ROOT = PACKAGE.parent
AROUND = sorted(path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py"))
KNOWN = {module_name(path): path for path in [*MODULES, *AROUND]}


def needed(path: Path) -> set[str]:
    """Return the modules of package, tests and tools that a file imports at any time."""
    needed_modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            needed_modules |= {name if name in KNOWN else node.module for name in below}
        elif isinstance(node, ast.Import):
            needed_modules |= {alias.name for alias in node.names}
    if path in AROUND:  # a program of tools/ imports modules of its folder by their names alone
        folder = module_name(path).rpartition(".")[0]
        needed_modules |= {f"{folder}.{name}" for name in needed_modules}
    return (needed_modules & KNOWN.keys()) - {module_name(path), "mpigossip"}


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other; [] if there are none."""
    done: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        path.append(module)
        result = next((c for below in sorted(edges.get(module, ())) if (c := visit(below))), [])
        path.pop()
        done.add(module)
        return result

    return next((result for module in sorted(edges) if (result := visit(module))), [])


def test_no_modules_import_each_other():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({name: needed(path) for name, path in KNOWN.items()}) == []


def test_tests_import_no_tools_but_those_of_tools():
    tools = [path for path in AROUND if "tools" not in path.relative_to(ROOT).parts]
    imported = {module_name(path): needed(path) for path in tools}
    assert {k: v for k, v in imported.items() if any(name.startswith("tools.") for name in v)} == {}
    assert "tools.bench.peers" in needed(ROOT / "tools/bench/compare_peers.py")
    assert "tests.launch" in needed(ROOT / "tools/labs/kill.py")


def test_folders_have_few_modules():
    """A folder has at most 17 modules: among more, names are hard to find."""
    folders = {path.parent for path in MODULES}
    modules = {one: [p for p in one.glob("*.py") if p.stem != "__init__"] for one in folders}
    assert {one.name: len(inside) for one, inside in modules.items() if len(inside) > 17} == {}


HEAVY = ("torch", "mpi4py", "scipy", "matplotlib", "cupy", "h5py", "networkx", "numpy")
START = """
import runpy, sys
sys.argv = {argv!r}
try:
    runpy.run_module("mpigossip", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sorted({heavy!r} & set(sys.modules)))
"""


def python(*args: str, **env: str) -> subprocess.CompletedProcess:
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | env,
    )


@pytest.mark.parametrize("command", [HELP, SHOW], ids=["help", "graph show"])
def test_light_commands_load_nothing_heavy(command):
    unwanted = {"torch", "mpi4py", "scipy", "matplotlib"}
    done = python("-c", START.format(argv=command[1:], heavy=unwanted))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_importing_the_package_loads_nothing():
    code = f"import sys, mpigossip; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    assert python("-c", code).stdout.strip() == "[]"


def test_public_names_can_be_imported():
    done = python("-c", "import mpigossip as m; print([getattr(m, name) for name in m.__all__])")
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match=naming("'wrold'")):
        _ = mpigossip.wrold
    assert {"Gossip", "graph", "world"} <= set(dir(mpigossip))


BLOCKED = """
import sys
sys.modules["cupy"] = sys.modules["mpi4py"] = None
import importlib, pathlib, torch
for name in {names!r}:
    importlib.import_module(name)
from mpigossip.mixing.device import memory
from mpigossip.mixing.kernels import gpu_sum
one = torch.ones(1, 8)
assert not gpu_sum.combine([0.5, 0.5], [one, one], one)
assert memory.private(16, torch.device("cpu")).numel() == 16
try:
    memory.private(16, torch.device("cuda", 0))
except memory.TransportUnavailable as error:
    assert "cuda:0" in str(error) and "CuPy" in str(error), error
from mpigossip.cli import main
sys.exit(main({command!r}))
"""


def test_simulation_needs_neither_mpi_nor_cupy(tmp_path):
    """Subpackages without MPI import with both blocked, and a 16-bit run trains to its end."""
    names = [module_name(path) for path in MODULES]
    names = [name for name in names if room(name) not in MPI_ROOMS | {"__main__", "moved"}]
    command = ["simulate", str(PACKAGE.parent / "jobs/digits.toml"), "--nodes", "2"]
    command += ["node.devices=cpu:2", "node.shard=false", "node.precision=bf16"]
    command += ["run.steps=2", f"run.output={tmp_path}/run"]
    done = python("-c", BLOCKED.format(names=names, command=command), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
