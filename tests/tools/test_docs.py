"""The site: its reference has all of the code, and code blocks of its pages run or resolve."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mpigossip
from mpigossip import cli, config
from mpigossip.commands.arguments import every
from mpigossip.config.sections import SECTIONS
from mpigossip.store import log

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tools/docs"
PAGES = {path.stem: path.read_text() for path in HERE.glob("*.md")}
REFERENCE = runpy.run_path(str(HERE / "reference.py"))


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def lines(page, kinds=("bash", "text")):
    joined = "\n".join(block for kind in kinds for block in blocks(page, kind))
    return [line.partition(" >")[0].strip() for line in joined.splitlines()]


def test_the_reference_has_every_setting_with_an_example_that_a_job_takes():
    known = REFERENCE["settings"]()
    job = config.as_dict(config.load({}))
    assert known.keys() == {f"{name}.{key}" for name in SECTIONS for key in job[name]}
    page = REFERENCE["settings_page"]()
    for path, (words, _, meaning, example) in known.items():
        config.load({}, [example])
        assert f"| `{path}` | " in page and words and meaning
    assert all(f"`{section}.{option}`" in page for section, _, option, *_ in REFERENCE["options"]())


def test_the_reference_has_every_command_option_name_column_code_and_variable():
    page = REFERENCE["commands_page"]()
    for words, parser in every(cli.parser()):
        shown = [option for action in parser._actions for option in action.option_strings]
        assert f" mpigossip {words}\n" in page if words else True
        assert all(option in page for option in shown if words)
    assert all(f"mpigossip.{name}" in REFERENCE["python_page"]() for name in mpigossip.__all__)
    files = REFERENCE["files_page"]()
    columns = [*log.COLUMNS, log.VIRTUAL, *log.EVALUATION_COLUMNS]
    assert all(f"| `{name}` |" in files for name in columns)
    sources = [path.read_text() for path in (ROOT / "mpigossip").rglob("*.py")]
    own = {name for text in sources for name in re.findall(r'"(MPIGOSSIP_[A-Z_]+)"', text)}
    assert own <= REFERENCE["VARIABLES"].keys()


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_commands_of_a_page_are_commands(page, monkeypatch, capsys):
    """Parsed, not run; extras and copied examples exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"pip install.*\[([\w,-]+)\]", PAGES[page]):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    for line in lines(page):
        words = re.sub(r"^(srun|mpirun)\b.*? (?=mpigossip )", "", line)
        if (
            words.startswith("mpigossip ")
            and not words.startswith("mpigossip.")
            and "…" not in words
        ):
            cli._parse(shlex.split(words, comments=True)[1:])


@pytest.mark.every
def test_tutorials_run_as_pasted(tmp_path, mpirun, monkeypatch):
    """The loop on four ranks, stopped and resumed; the algorithm and graph in a study."""
    (program,) = blocks("tutorial-loop", "python")
    (tmp_path / "train.py").write_text(program.replace("BATCH = 600", "BATCH = 30"))
    first = mpirun(4, [sys.executable, "train.py"], timeout=120, cwd=tmp_path)
    assert first.returncode == 0 and (tmp_path / "model.pt").exists(), first.stderr
    mine, study = blocks("tutorial-study", "python")
    (tmp_path / "mine.py").write_text(mine)
    (tmp_path / "study.py").write_text(
        study.replace("run.epochs=4", "run.steps=4").replace("seeds=3", "seeds=1")
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, text=True, capture_output=True
    )
    assert done.returncode == 0 and (tmp_path / "accuracy.png").exists(), done.stderr
    assert "two rings" in done.stdout


def test_the_loop_that_came_from_ddp_runs(monkeypatch, mpirun, tmp_path):
    (program,) = blocks("migrate", "python")
    (tmp_path / "after.py").write_text(program)
    done = mpirun(2, [sys.executable, "after.py"], timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_script_of_a_rank_for_each_gpu_is_as_the_page_says(capsys, monkeypatch, tmp_path):
    (line,) = [each for each in lines("supercomputer", ["bash"]) if " job " in each]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text("")
    assert cli.main([*shlex.split(line)[1:], "--venv", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    for part in ("--nodes=8", "--ntasks-per-node=4", "node.ranks_per_node=host"):
        assert part in script


@pytest.mark.every
def test_the_site_is_built_without_a_warning():
    pytest.importorskip("furo")
    done = subprocess.run(["bash", "tools/docs.sh"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and (ROOT / "build/docs/index.html").exists(), done.stderr


@pytest.mark.parametrize(
    "number", ["0.6252", "0.6309", "326 ms", "540 ms", "84 cells", "267 kills"]
)
def test_numbers_on_several_pages_are_those_of_their_source(number):
    sources = ["jobs/README.md", "jobs/claims/RESULTS.md", "tools/bench/BENCHMARKS.md",
               "tools/labs/RELIABILITY.md"]  # fmt: skip
    figure = number.split()[0]
    assert number in (ROOT / "README.md").read_text() and number in PAGES["evidence"]
    assert any(re.search(rf"\b{re.escape(figure)}\b", (ROOT / s).read_text()) for s in sources)
