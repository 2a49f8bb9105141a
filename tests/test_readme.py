"""Every command and program of the READMEs runs as pasted, with fewer epochs."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mpigossip import cli
from mpigossip.commands.arguments import every
from tests.cases import on_each
from tests.store.examples import folder_of_images

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).parents[1]
ROOMS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "mpigossip").rglob("README.md"))
SITE = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tools/docs").glob("*.md"))
FEWER = {
    "train": ["run.steps=6"],
    "simulate": ["run.steps=6"],
    "resume": ["run.steps=8"],
    "join": ["run.steps=6"],
}
# Each runs in a separate process: they start MPI, or adapt to the machine.
APART = {"doctor", "bench", "plan", "train"}
PLACES = {
    "SITE": "generic-slurm --gpus 4",
    "PATH": "images",
    "RUN_DIR": "runs/digits",
    "RUN": "runs/digits",
}


def text(name):
    return (ROOT / name).read_text()


def blocks(name, kind=""):
    """Return the code blocks of a language, without the indentation of a list."""
    code_blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text(name), re.DOTALL | re.MULTILINE)
    kinds = (kind, "bash") if kind == "" else (kind,)
    return [
        re.sub(r"^   (?=\S)", "", block, flags=re.M) for lang, block in code_blocks if lang in kinds
    ]


def commands(name):
    lines = [line.partition("  #")[0].strip() for b in blocks(name) for line in b.splitlines()]
    return [
        line for line in lines if re.match(r"(mpigossip|mpirun|python tools|python sweep)\b", line)
    ]


@pytest.fixture
def shell(mpirun, pooled, tmp_path, monkeypatch, capfd, request):
    """`shell(line)`: run one command line in a folder without jobs/, as a reader does.

    The first mpirun line of the README is launched; later ones run on a pool of ranks.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    launched = {"readme" not in request.node.name}

    def run(line):
        words = shlex.split(line.partition(" >")[0])
        n = 0
        if words[0] == "mpirun":
            n = int(words[2])
            words = words[3:]
        if words[0] == "mpigossip":
            words += FEWER.get(words[1], []) * (not re.search("--dry-run|run.steps", line))
        if words[0] == "python":
            monkeypatch.setattr(sys, "argv", words[1:])
            code = runpy.run_path(words[1])["main"]()
            said = capfd.readouterr()
        elif words[1] not in APART:
            words = [
                "1" if w == "5" and p == "--seconds" else w
                for p, w in zip(["", *words], words, strict=False)
            ]
            code = cli.main(words[1:])
            said = capfd.readouterr()
        elif n and True in launched:
            ran = pooled(n, *words[1:], timeout=120)
            code = ran.returncode
            said = ran
        else:
            launched.add(n > 0)
            ran = mpirun(n, [sys.executable, "-m", *words], timeout=120, cwd=tmp_path)
            code = ran.returncode
            said = ran
        assert code == 0, f"{line}\n{said}"
        return said[0] if isinstance(said, tuple) else said.stdout

    return run


@pytest.mark.every
def test_the_commands_of_the_readme_run_as_pasted(shell, tmp_path):
    said = {line: shell(line) for line in commands("README.md")}
    assert len(said) >= 9 and (tmp_path / "compare.png").exists()
    train, simulate = (
        re.search(r"^digest +(\w{64})$", out, re.MULTILINE)[1]
        for line, out in said.items()
        if re.search(r"(train|simulate) digits (--nodes 4 )?node", line)
    )
    assert train == simulate


@pytest.mark.every
def test_the_commands_of_subpackages_pages_run_as_pasted(shell, tmp_path, monkeypatch):
    sources = [block for page in ROOMS for block in blocks(page, "python")]
    (tmp_path / "mine.py").write_text(next(s for s in sources if "heavy_ball" in s))
    monkeypatch.syspath_prepend(tmp_path)
    for run in ("digits", "digits-simulated"):
        shell(f"mpigossip simulate digits --nodes 2 run.steps=4 run.output=runs/{run}")
    said = {line: shell(line) for page in ROOMS for line in commands(page)}
    assert len(said) >= 7
    assert "spy: " in next(out for line, out in said.items() if "mine:Spy" in line)
    sys.modules.pop("mine", None)


@pytest.mark.every
@pytest.mark.parametrize(
    "page", ["install", "tutorial-digits", "choose", "symptoms", "will-it-help", "gpt-8x8"]
)
def test_the_commands_of_the_site_run_as_pasted(shell, page):
    """They run in order, so that commands that read a run have one."""
    lines = commands(f"tools/docs/{page}.md")
    if not any(" train " in line for line in lines):
        shell("mpigossip simulate digits --nodes 2 run.steps=4 run.output=runs/digits")
    for line in lines:
        shell(line)
    assert lines


EXAMPLE = re.compile(r"^```bash\n([^\n]*)\n```\n+```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A command, and the block with its output. A line … stands for lines that are left out."""
MACHINE = re.compile(r"note: cores")
"""Lines that depend on the cores of the machine."""


def forms(output):
    """Return lines without values (numbers, digests, paths) and spaces that align columns."""
    output = re.sub(r"/\S*(?= |$)", "PATH", output, flags=re.MULTILINE)
    output = re.sub(r"(?<![\w.=-])[+-]?\d[\d.,]*(e[+-]?\d+)?(?!\w)|\b[0-9a-f]{64}\b", "#", output)
    return [" ".join(line.split()) for line in output.splitlines()]


@pytest.mark.every
def test_the_page_of_commands_runs_as_pasted_and_prints_lines_of_the_forms_shown(shell, tmp_path):
    """The commands run in the order of the page, with fewer steps and therefore other values."""
    folder_of_images(tmp_path / "pets", sides=(40, 40), count=4, classes=("cat", "dog"))
    examples = EXAMPLE.findall(text("tools/docs/commands.md"))
    written = [
        line for block in blocks("tools/docs/commands.md", "bash") for line in block.split("\n")
    ]
    assert [command for command, _ in examples] == [line for line in written if line]
    wrong = []
    for command, block in examples:
        printed = iter(forms(shell(command)))
        shown = [line for line in block.splitlines() if not MACHINE.match(line)]
        wrong += [
            f"{command}: {line}"
            for line in forms("\n".join(shown))
            if line not in ("…", "digest …") and line not in printed
        ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.every
def test_the_trial_of_members_prints_lines_of_the_forms_shown(shell):
    """One member trains one chunk, which a replay and a fork repeat; none is killed."""
    trial = text("tools/docs/members.md").partition("\n## Try it in two ")[2].partition("\n## ")[0]
    examples = EXAMPLE.findall(trial)
    assert [command.split()[1] for command, _ in examples] == ["join", "replay", "replay"]
    wrong = []
    for command, block in examples:
        printed = iter(forms(shell(command.replace("--fork 100", "--fork 0"))))
        shown = [line for line in block.splitlines() if not line.startswith("mpigossip: ")]
        wrong += [
            f"{command}: {line}"
            for line in forms(
                "\n".join(shown).replace("rounds", "round").replace("places", "place")
            )
            if line != "…" and line not in printed
        ]
    assert not wrong, "\n".join(wrong)


def test_a_few_lines_load_the_exported_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [ROOT / "jobs/digits.toml", "--nodes", 2, "run.steps=1", "run.output=runs/digits"]
    assert cli.main(["simulate", *map(str, words)]) == 0
    lines = commands("README.md")
    export = next(line for line in lines if line.startswith("mpigossip checkpoint export"))
    assert cli.main(shlex.split(export)[1:]) == 0
    (load,) = [block for block in blocks("README.md") if "load_file" in block]
    exec(load, names := {})
    assert len(load.splitlines()) == 4 and names["model"].state_dict()


def test_the_commands_of_the_jobs_page_run(shell, tmp_path):
    """This runs commands without scheduler and network; PATH, SITE and RUN are replaced."""
    folder_of_images(tmp_path / "images", sides=(32, 32), count=40, suffix="jpg")
    done = []
    for line in commands("jobs/README.md"):
        if line in commands("README.md"):
            continue
        for word, meaning in PLACES.items():
            line = re.sub(rf"\b{word}\b", meaning, line)
        if "cifar10-lenet" in line:
            line = line.replace("-n 4", "-n 2") + " run.steps=2 schedule.milestones=[]"
        said = shell(line)
        done.append(line)
        if "sweep.py" in line:
            first, *_, last = said.splitlines()
            assert (first, last) == tuple(
                f"graph.name={name} schedule.lr={lr}"
                for name, lr in (("ring", 0.1), ("base-2", 0.2))
            )
    assert len(done) >= 6 and (tmp_path / "compare.png").exists()


def test_scheduler_lines_name_existing_files():
    """`sbatch`, `srun` and `pip` lines name scripts, commands, jobs and extras that exist."""
    pages = ("jobs/README.md", "tools/docs/supercomputer.md")
    code = [block for page in pages for kind in ("", "text") for block in blocks(page, kind)]
    lines = [line for block in code for line in block.splitlines()]
    batch = [line for line in lines if "sbatch" in line or line.startswith("srun")]
    known = dict(every(cli.parser()))
    assert len(batch) >= 5
    jobs = ROOT / "jobs"
    named = "".join(map(text, pages))
    for line in batch:
        for path in re.findall(r"(?<= )[a-z]+\.sbatch", line):
            made = f">{path}\n" in named
            assert made or (jobs / path).exists() and f"copy {path[:-7]}\n" in named, line
        for command in re.findall(r"\bmpigossip (\w+)", line):
            assert command in known
    extras = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    named = re.findall(r"(?:whl|\.)\[([\w,-]+)\]", text("jobs/README.md") + text("README.md"))
    assert named and {e for group in named for e in group.split(",")} <= extras.keys()


def test_the_first_command_installs_what_the_others_need():
    """`tools/quickstart.sh` makes the environment of the reader's next commands."""
    (installed,) = re.findall(r"^install_into \.venv (\S+)", text("tools/quickstart.sh"), re.M)
    lines = [line for page in ["README.md", *ROOMS] for line in commands(page)]
    needed = {"--tensorboard": "tensorboard", "mpirun": "mpich"}
    asked = {extra for word, extra in needed.items() if any(word in line for line in lines)}
    assert asked == set(needed.values()) and asked <= set(installed.split(","))


def test_links_and_scripts_lead_somewhere():
    tools = ("tools/bench/BENCHMARKS.md", "tools/labs/RELIABILITY.md")
    for name in ("README.md", "jobs/README.md", "jobs/loops/README.md", *tools, *ROOMS, *SITE):
        folder = (ROOT / name).parent
        for target, part in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text(name)):
            if "://" in target:
                continue
            file = folder / target if target else ROOT / name
            assert file.exists(), target
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if part else []
            if part:
                assert part in {
                    re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
                }
    for script in re.findall(r"bash (tools/\S+\.sh)", text("README.md")):
        assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def test_the_job_file_of_the_readme_is_a_job(tmp_path):
    from mpigossip.training.assemble import load

    (result,) = blocks("README.md", "toml")
    job = load(result)
    assert job.model.name == "lenet" and job.graph.options["order"] == "cyclic"


@on_each("kind", ["graph", "algorithm"])
def test_the_tables_name_existing_parts(kind):
    from mpigossip import algorithms, graphs

    page = text(f"mpigossip/{kind}s/README.md")
    page = re.sub(r"`base-2` … `base-5`", "`base-2` `base-3` `base-4` `base-5`", page)
    own = {"spanning-tree", "ceca"} if kind == "graph" else set()
    names = (graphs if kind == "graph" else algorithms).BUILDERS.keys() - own
    missing = [name for name in names if f"`{name}`" not in page]
    assert not missing
