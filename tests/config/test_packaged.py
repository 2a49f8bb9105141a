"""Examples of the package: found by name, copied, and contained in the wheel."""

import shutil
import sys
from pathlib import Path

import pytest

from mpigossip import cli
from mpigossip.cluster import batch
from mpigossip.config import JobError, packaged, reading
from tests.cases import naming, on_each

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Return the folder share/mpigossip of an environment with the files that pip installs."""
    share = tmp_path / "share" / "mpigossip"
    for folder in ("", "own", "loops", "loops/recipes", "sites", "templates"):
        (share / folder).mkdir(parents=True, exist_ok=True)
        for path in (JOBS / folder).glob("*.*"):
            shutil.copyfile(path, share / folder / path.name)
    lib = tmp_path / "lib" / "mpigossip" / "__init__.py"
    monkeypatch.setattr(packaged.mpigossip, "__file__", str(lib))
    monkeypatch.setattr(packaged.sysconfig, "get_path", lambda *_: str(tmp_path))
    return share


def test_examples_sites_and_templates_are_found_where_pip_puts_them(installed, monkeypatch):
    assert packaged.examples()["gpt"] == installed / "loops" / "gpt.py"
    assert packaged.examples()["gan"] == installed / "loops" / "recipes" / "gan.py"
    assert packaged.given("digits") == installed / "digits.toml"
    assert "perlmutter" in batch.sites() and packaged.find("templates/slurm.sh").exists()
    monkeypatch.setattr(packaged.sysconfig, "get_path", lambda *_: "/none")
    with pytest.raises(JobError, match=naming("reinstall")):
        packaged.find("sites")
    assert packaged.given("digits") == Path("digits")


def test_a_name_means_the_packaged_job_unless_a_file_has_this_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a folder, for example with data, is not a job
    assert reading.read("digits") == reading.read(JOBS / "digits.toml")
    Path("digits").rmdir()
    Path("digits").write_text("[run]\nname = 'mine'")
    assert reading.read("digits") == {"run": {"name": "mine"}}
    with pytest.raises(JobError, match=naming('"digit"', '"digits"', "`mpigossip examples`")):
        reading.read("digit")
    with pytest.raises(JobError, match=naming('"jobs/digits"', "no such file")):
        reading.read("jobs/digits")


def test_every_example_has_a_line_that_fits_a_terminal(capsys):
    assert cli.main(["examples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = {line.split()[0] for line in lines if line and line[0] not in "`g"} | {"gpt"}
    assert {"digits", "study", "oscillator", "classify", "loop"} <= names
    assert all(len(line) <= 80 for line in lines) and len(lines) > 20


def test_an_example_is_copied_with_its_module_and_never_over_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["examples", "copy", "oscillator", "--to", "mine"]) == 0
    assert sorted(p.name for p in Path("mine").iterdir()) == ["oscillator.py", "oscillator.toml"]
    assert cli.main(["examples", "copy", "oscillator", "--to", "mine"]) == 2
    assert cli.main(["examples", "copy", "osc"]) == 2
    assert cli.main(["examples", "copy", "fsdp", "--to", "other"]) == 0
    assert sorted(p.name for p in Path("other").iterdir()) == ["fsdp.py", "gpt.py"]
    Path("third").mkdir()
    Path("third/gpt.py").write_text("# mine")  # copied before
    assert cli.main(["examples", "copy", "fsdp", "--to", "third"]) == 0
    assert Path("third/gpt.py").read_text() == "# mine"
    assert 'did you mean "oscillator"?' in capsys.readouterr().err


@on_each("name", [path.name for path in packaged.examples().values()])
def test_the_wheel_contains_every_example(name):
    import tomllib

    project = tomllib.loads((JOBS.parent / "pyproject.toml").read_text())
    patterns = [p for table in project["tool"]["setuptools"]["data-files"].values() for p in table]
    names = {path.name for pattern in patterns for path in JOBS.parent.glob(pattern)}
    assert name in names


@pytest.mark.every
def test_a_wheel_trains_without_a_clone(tmp_path, mpirun):
    """Build a wheel, install it with `pip install --target`, and run it without a clone."""
    import subprocess

    into = ["install", "--target", "site", "--no-index", "-f", "dist", "mpigossip"]
    for words in (["wheel", "-w", "dist", str(JOBS.parent)], into):
        words.insert(1, "--no-deps")
        done = subprocess.run(
            [sys.executable, "-m", "pip", *words], cwd=tmp_path, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
    program = (
        "import sys; sys.path.insert(0, 'site'); from mpigossip import cli; sys.exit(cli.main())"
    )
    words = [sys.executable, "-P", "-c", program, "train", "digits", "run.epochs=1"]
    done = subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0 and "digest" in done.stdout, done.stderr
