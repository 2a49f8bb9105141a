"""The site: its reference has all of the code, and code blocks of its pages run or resolve."""

import contextlib
import inspect
import io
import itertools
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mpigossip
from mpigossip import cli, config
from mpigossip.analysis.plan import ALL_REDUCE
from mpigossip.analysis.plan.quality import EVIDENCE as EVIDENCE_OF_QUALITY
from mpigossip.commands.arguments import every
from mpigossip.config import errors
from mpigossip.config.sections import SECTIONS
from mpigossip.store import log
from mpigossip.training import assemble, costs
from tests.cases import on_each

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
    names = [*mpigossip.__all__, "graphs.from_matrices"]
    assert all(f"mpigossip.{name}" in REFERENCE["python_page"]() for name in names)
    jobs = [path.relative_to(ROOT) for path in (ROOT / "jobs").glob("*.toml")]
    assert len(jobs) > 6 and all(f"| `{job.stem}` | `{job}` | " in page for job in jobs)
    assert all(key in page for key in ("graph", "bytes", "seconds", "times_limit"))
    files = REFERENCE["files_page"]()
    columns = [*log.COLUMNS, log.VIRTUAL, *log.MEMBER_COLUMNS, *log.EVALUATION_COLUMNS]
    assert all(f"| `{name}` |" in files for name in columns)
    sources = [path.read_text() for path in (ROOT / "mpigossip").rglob("*.py")]
    own = {name for text in sources for name in re.findall(r'"(MPIGOSSIP_[A-Z_]+)"', text)}
    assert own <= REFERENCE["VARIABLES"].keys()


def test_exit_codes_are_explained_in_one_table():
    codes = REFERENCE["exit_codes"]()
    known = (errors.OK, errors.FAILED, errors.WRONG, errors.STOPPED)
    assert list(codes) == [*map(str, known), "others"] and all(codes.values())
    page = REFERENCE["files_page"]()
    assert all(f"| {code} | {meaning} |" in page for code, meaning in codes.items())


def callables():
    """Yield each function, constructor and method of the page Python, by its name."""
    for path, some in REFERENCE["PUBLIC"].items():
        made = pkgutil.resolve_name(f"mpigossip:{path}")
        if not inspect.isclass(made):
            yield path, made
            continue
        if path in mpigossip.__all__:
            yield f"{path}.__init__", made.__init__
        own = [name for name in dir(made) if not name.startswith("_")]
        for name in some.split(", ") if some else own:
            member = getattr(made, name, None)
            where = getattr(member, "__module__", None) or ""
            if inspect.isroutine(member) and where.startswith("mpigossip"):
                yield f"{path}.{name}", member


def test_the_page_python_names_every_argument_and_no_other():
    """Several arguments are described by ``:param`` fields; a single one may be in the text."""
    wrong = []
    seen = set()
    for name, made in callables():
        text = inspect.getdoc(made)
        parameters = inspect.signature(made).parameters.keys() - {"self"}
        needed = parameters - {"progress", "record", "result"}  # Hooks describe these once.
        fields = set(re.findall(r"^:param (\w+):", text, re.MULTILINE))
        words = {word for word in needed if re.search(rf"``{word}\b|\*{word}\b", text)}
        described = fields | words
        if needed - described or fields - parameters or len(needed) > 2 and not fields:
            wrong.append(f"{name}: {sorted(needed - described | fields - parameters)}")
        seen.add(name)
    assert wrong == []
    assert {"graph", "study", "world", "Gossip.__init__", "Averager.__init__"} <= seen
    assert {"Gossip.log", "cluster.mpi_world.MPIWorld.agree", "studies.Study.plot"} <= seen


def test_gossip_takes_the_options_that_the_page_python_lists():
    known = REFERENCE["settings"]()
    parts = {f"{row[0]}.{row[2]}" for row in REFERENCE["options"]()}
    listed = {f"{name}.{key}" for name, key in REFERENCE["loop_options"]()}
    assert {"run.steps", "node.timeout_s", "graph.weights"} <= listed <= known.keys() | parts


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_commands_of_a_page_are_commands(page, monkeypatch, capsys):
    """The commands are parsed, but not run; their extras and copied examples exist."""
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
            assert "jobs/" not in words  # by name: who has the wheel has no such folder
            cli._parse(shlex.split(words, comments=True)[1:])


@pytest.mark.every
def test_tutorials_run_as_pasted(tmp_path, pooled, monkeypatch):
    """Run the loop on four ranks, and resume it; then run the study of algorithm and graph."""
    (program,) = blocks("tutorial-loop", "python")
    for steps in (30, 40):  # the second goes on where the first ended
        (tmp_path / "train.py").write_text(program.replace("BATCH = 600", f"BATCH = {steps}"))
        ran = pooled(4, "train.py", timeout=120)
        assert ran.returncode == 0 and (tmp_path / "model.pt").exists(), ran.stderr
    assert "resuming at step 30" in ran.stdout and "finished at step 40" in ran.stdout
    monkeypatch.chdir(tmp_path)
    for line in [line for line in lines("tutorial-loop") if line.startswith("mpigossip log")]:
        assert cli.main(shlex.split(line)[1:]) == 0
    assert Path("runs/bytes/log.png").exists()


POINT = re.compile(r"^(mine|DmSGD) +(two rings|one-peer) +([\d.]+) ± ([\d.]+) .* ([\d.]+)$", re.M)
"""Row of the table of tutorial 3: method, graph, accuracy with its interval, MB per node."""


@pytest.mark.every
def test_the_study_of_tutorial_3_prints_the_tables_on_its_page(tmp_path, monkeypatch):
    """On another type of processor, accuracies may differ within the intervals."""
    program, study = blocks("tutorial-study", "python")
    (tmp_path / "mine.py").write_text(program)
    (tmp_path / "study.py").write_text(study)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, text=True, capture_output=True
    )
    assert done.returncode == 0 and (tmp_path / "accuracy.png").exists(), done.stderr
    assert "warning" not in done.stdout + done.stderr
    shown = re.search(r"^```\n(method +graph .*?)^```$", PAGES["tutorial-study"], re.S | re.M)[1]
    points = POINT.findall(shown)
    assert len(points) == 4
    for point, expected in zip(POINT.findall(done.stdout), points, strict=True):
        assert point[:2] == expected[:2] and point[4] == expected[4]
        assert float(point[2]) == pytest.approx(float(expected[2]), abs=float(expected[3]))
    printed = re.sub(r"[\d.]+", "", done.stdout)
    assert re.sub(r"[\d.]+", "", shown) in printed, "the lines have another form"


PAPER = re.compile(r"^(A|R|S|O)(.*?)  +([\d.]+) ± ([\d.]+) .* ([\d.]+)$", re.MULTILINE)
"""Row of the first table of tutorial 3: label, accuracy with its interval, MB per node."""


@pytest.mark.every
def test_the_study_from_a_file_prints_the_table_and_writes_the_files_of_tutorial_3(
    tmp_path, monkeypatch, capsys
):
    """On another type of processor, accuracies may differ within the intervals."""
    page = PAGES["tutorial-study"]
    (study,) = blocks("tutorial-study", "toml")
    monkeypatch.chdir(tmp_path)
    Path("paper.toml").write_text(study)
    assert cli.main(["study", "paper.toml"]) == 0
    printed = capsys.readouterr().out
    points = PAPER.findall(re.search(r"^```\n(method +accuracy .*?)^```$", page, re.S | re.M)[1])
    assert len(points) == 4
    for point, expected in zip(PAPER.findall(printed), points, strict=True):
        assert point[:2] == expected[:2] and point[4] == expected[4]
        assert float(point[2]) == pytest.approx(float(expected[2]), abs=float(expected[3]))
    (files,) = re.findall(r"^runs/paper: (table.*)$", page, re.MULTILINE)
    assert f"runs/paper: {files}\n" in printed
    rows = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    assert {*files.split(", ")} == {*re.findall(r"`([\w-]+\.\w+)`", " ".join(rows))}
    assert all(Path("runs/paper", name).exists() for name in files.split(", "))


SHELL = [
    "install",
    "migrate",
    "choose",
    "will-it-help",
    "tutorial-digits",
    "tutorial-loop",
    "tutorial-study",
]
SCRIPTS = [p for p in (ROOT / "jobs").rglob("*") if p.suffix in (".sh", ".sbatch", ".def", ".toml")]


def here(name):
    """Return whether a file that a page names exists, in the reader's folder or the source tree."""
    return Path(name).exists() or (ROOT / name).exists()


def resolve(words):
    """Check a command that a test can't run, or that another one runs: options, files, job."""
    words = words[next(k for k, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]
    program, *rest = words
    if program == "pip":
        with warnings.catch_warnings():
            # setuptools warns if another test has imported distutils, as torch's own tests do
            warnings.simplefilter("ignore")
            from pip._internal.commands import create_command

        return create_command(rest[0]).parse_args(rest[1:])
    if program == "mpigossip":
        options = cli._parse(rest)
        if rest[0] in ("examples", "graph"):
            assert cli.main(rest) == 0
        elif rest[0] in ("train", "simulate"):
            assert cli.main([*rest, "--dry-run"]) == 0
        return options
    if program in ("mpirun", "srun", "sbatch", "apptainer"):  # options of scripts in jobs/
        known = " ".join(path.read_text() for path in SCRIPTS)
        known += " --kill-on-bad-exit"  # of srun: tried with the doctor in the lab of Slurm
        own = list(itertools.takewhile(lambda word: word not in ("mpigossip", "python"), rest))
        for word in own:
            assert word[0] != "-" or re.search(rf"\s{word.split('=')[0]}\b", known), word
            assert not re.search(r"\.(?!sif$)", word) or here(word), word
        return resolve(rest[len(own) :]) if rest[len(own) :] else own
    assert program == "module" and rest[0] == "load" or here(rest[0]), words
    return rest


@pytest.mark.every
@pytest.mark.parametrize("page", SHELL)
def test_each_line_of_shell_of_a_page_runs_or_resolves(page, tmp_path, monkeypatch, capfd):
    """Commands of registries, schedulers and containers are parsed, by their parsers or scripts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = re.findall(r"[Ss]ave\b[^.`]* as `(\w+\.py)`", PAGES[page])
    for name, program in zip(names, blocks(page, "python"), strict=len(names) > 0):
        (tmp_path / name).write_text(program)
    shell_blocks = [block for kind in ("bash", "text") for block in blocks(page, kind)]
    for name in re.findall(r" >(\w+\.sbatch)\b", "\n".join(shell_blocks)):
        (tmp_path / name).touch()  # a script that a line of the page prints
    for block in shell_blocks:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)
    spans = re.findall(r"`((?:mpirun [^`]*|)mpigossip [a-z][^`…]*)`", PAGES[page])
    for line in dict.fromkeys("\n".join([*shell_blocks, *spans]).splitlines()):
        if re.match("python3 -m venv|export", line):
            line = line.replace(" venv ", " venv --without-pip ", 1)  # which takes 20 s
            subprocess.run(["bash", "-ec", line], check=True, env=os.environ | {"HOME": "."})
        elif words := shlex.split(line.replace("…", ""), comments=True):
            resolve(words)
    assert shell_blocks or spans
    sys.modules.pop("mine", None)


@pytest.mark.every
def test_the_loop_that_came_from_ddp_runs(pooled, tmp_path):
    (program,) = blocks("migrate", "python")
    (tmp_path / "after.py").write_text(program)
    done = pooled(2, "after.py")
    assert done.returncode == 0, done.stderr


def test_the_script_of_a_rank_for_each_gpu_is_as_the_page_says(capsys, monkeypatch, tmp_path):
    (line,) = [each for each in lines("supercomputer", ["bash"]) if " job " in each]
    (site,) = blocks("supercomputer", "toml")
    (tmp_path / "ours.toml").write_text(site)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/activate").write_text("")
    assert cli.main([*shlex.split(line)[1:], "--venv", str(tmp_path)]) == 0
    script = capsys.readouterr().out
    for part in (
        "--nodes=8",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "module load openmpi",
        "mpigossip train digits ||",
        "RANKS=4 TASKS=32",
    ):
        assert part in script


@pytest.mark.every
def test_the_table_of_choose_is_what_plan_predicts(capsys):
    """Compare each column with the output of the command on the page at this bandwidth."""
    (line,) = [each for each in lines("choose") if " plan " in each]
    labels = [
        "all-reduce (DDP)",
        "dsgd, one-peer-exponential",
        "dsgd, one-peer-exponential, bf16",
        "diloco, H = 32, 4 fragments",
        "gasloc, one-peer-exponential, H = 32",
    ]
    table = [
        row.strip("| ").split(" | ")
        for row in PAGES["choose"].splitlines()
        if re.search(r"\| [\d,]+ \| \d+ \|$", row)
    ]
    for column, bandwidth in enumerate(("100Mbit", "1Gbit", "10Gbit"), 1):
        command = line.replace("--bandwidth 1Gbit", f"--bandwidth {bandwidth}")
        assert cli.main([*shlex.split(command)[1:], "--json"]) == 0
        proposals = json.loads(capsys.readouterr().out)["16"]["proposals"]
        rows = {row["label"]: row for row in proposals}
        for label, cells in zip(labels, table, strict=True):
            milliseconds = 1e3 * rows[label]["step_s"]
            shown = float(cells[column].replace(",", ""))
            assert shown == pytest.approx(milliseconds, rel=0.01), (label, bandwidth)
            assert float(cells[4]) == pytest.approx(rows[label]["bytes_per_step"] / 1e6, abs=0.6)


SHOWN = re.compile(r"^```bash\n(mpigossip [^\n]*)\n```\n+```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A command, and below it the block with its output. A line … stands for lines that are omitted."""


@on_each("page", ["will-it-help", "gpt-8x8", "commands", "tutorial-study"])
def test_the_output_on_a_page_is_what_its_command_prints(page, tmp_path, monkeypatch):
    shown = SHOWN.findall(PAGES[page])
    if page == "tutorial-study":
        (tmp_path / "mine.py").write_text(blocks(page, "python")[0])
        monkeypatch.syspath_prepend(tmp_path)
    assert shown
    for command, block in shown:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert cli.main(shlex.split(command)[1:]) == 0
        parts = [part.strip("\n") for part in re.split("^…$", block, flags=re.MULTILINE)]
        places = [output.getvalue().find(part) for part in parts]
        assert min(places) >= 0 and places[:-1] == sorted(places[:-1]), command
        assert len(parts) > 1 or parts[0] == output.getvalue().strip("\n"), command


def test_the_page_of_commands_has_an_example_and_the_output_of_each_command():
    """Sections are named after commands; those with subcommands have none of their own."""
    known = dict(every(cli.parser()))
    groups = {words.rpartition(" ")[0] for words in known} - {"examples"}
    sections = re.split(r"^## ", PAGES["commands"], flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert sorted(titles) == sorted(known.keys() - groups)
    for title, section in zip(titles, sections, strict=True):
        (command,) = re.findall(r"^```bash\n(?:mpirun -n 2 )?mpigossip (.*)\n```$", section, re.M)
        cli._parse(shlex.split(command))
        assert command.startswith(title) and section.count("\n```") == 4, title


def numbers(sentences):
    """Return the numbers of a text outside of links and code."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", " ", sentences)
    return re.findall(r"(?<![\w.])\d[\d.,]*(?<![.,])", text)


def check_numbers(name, sentences):
    """Assert that each number of a text occurs in a file that the same text links."""
    links = re.findall(r"\]\(([^)#]+)", sentences)
    sources = " ".join((ROOT / name).parent.joinpath(link).read_text() for link in links)
    missing = [n for n in numbers(sentences) if not re.search(rf"(?<![\d.]){n}(?!\d)", sources)]
    assert numbers(sentences) and missing == [], (sentences, missing)


def test_each_number_of_the_answer_is_in_a_source_that_its_sentence_links():
    """The page "Will it help me?" begins with the answer: six items of a list."""
    answer = PAGES["will-it-help"].partition("\n## ")[0]
    items = answer.split("\n* ")[1:]
    assert len(items) == 6
    for item in items:
        check_numbers("tools/docs/will-it-help.md", item)


def test_each_number_of_the_first_screen_and_of_the_results_of_the_readme_has_a_source():
    readme = (ROOT / "README.md").read_text()
    items = readme.partition("\n**1. ")[0].split("\n* ")[1:5]
    measured = readme.partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [line for line in measured.splitlines() if line.startswith("| ") and "](" in line]
    assert len(items) == 4 and len(rows) == 9
    for text in [*items, *rows]:
        check_numbers("README.md", text)


def test_the_times_of_the_readme_are_what_plan_predicts():
    readme = (ROOT / "README.md").read_text()
    texts = ("takes {} instead of {} ms", "no gain: {} instead of {} ms")
    commands = re.findall(r"^mpigossip (plan --parameters .*)$", readme, re.MULTILINE)
    for command, text in zip(commands, texts, strict=True):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            assert cli.main([*shlex.split(command), "--json"]) == 0
        rows = json.loads(output.getvalue())["rows"]
        one, all_nodes = (
            next(round(1e3 * row["step_s"]) for row in rows if row["graph"] == graph)
            for graph in ("one-peer-exponential", ALL_REDUCE)
        )
        assert text.format(one, all_nodes) in " ".join(readme.split())
    sentence = " ".join(readme.split()).partition("[At 25 Gbit/s")[2]
    sentence = sentence.partition(" [Will it help")[0].partition(", all-reduce")[2]
    check_numbers("README.md", f"{sentence} [page](tools/docs/gpt-8x8.md)")


def test_the_study_of_the_readme_has_the_result_that_tutorial_3_shows():
    """Both trained `dmsgd` on the one-peer graph with equal settings."""
    readme = (ROOT / "README.md").read_text()
    (row,) = re.findall(r"^dmsgd +one-peer-exponential .*$", readme, re.MULTILINE)
    (shown,) = [p for p in POINT.findall(PAGES["tutorial-study"]) if p[:2] == ("DmSGD", "one-peer")]
    assert row.split()[2:5] == [shown[2], "±", shown[3]] and row.split()[-1] == shown[4]


@pytest.mark.parametrize(("column", "compute"), [(2, 600), (3, 300)])
def test_the_times_of_each_style_on_the_page_of_a_gpt_are_what_plan_predicts(
    column, compute, capsys
):
    """The page has a command for each column of times."""
    page = PAGES["gpt-8x8"]
    command = next(line for line in lines("gpt-8x8", ["bash"]) if f"--compute {compute}ms" in line)

    def planned(*more, line=command):
        assert cli.main([*shlex.split(line)[1:], *more, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    def seconds(rows, graph="one-peer-exponential", wire="fp32"):
        chosen = [
            row
            for row in rows
            if (row["graph"], row["cadence"], row["wire"]) == (graph, "always", wire)
        ]
        return chosen[0]["step_s"]

    def milliseconds(rows, **choice):
        return f"{1e3 * seconds(rows, **choice):,.0f}"

    own = planned()["rows"]
    table = page.partition("| method | wire |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("| ").split("|")] for row in table]
    shown = {(row[0], row[1].strip("`")): row[column] for row in cells}
    float32 = planned("--dtype", "fp32")["rows"]
    gradients = "all-reduce (DDP), gradients "
    expected = {
        (f"{gradients}bf16", ""): milliseconds(own, graph=ALL_REDUCE),
        (f"{gradients}float32", ""): milliseconds(float32, graph=ALL_REDUCE),
    }
    for style in ("awc", "atc"):
        rows = planned(f"algorithm.style={style}")["rows"]
        for wire in ("fp32", "bf16"):
            expected[f"`dsgd`, style `{style}`", wire] = milliseconds(rows, wire=wire)
    line = command.replace(f"--compute {compute}ms", f"--compute {4 * compute}ms")
    four = planned("algorithm.accumulate=4", line=line)["rows"]
    (label,) = [row[0] for row in cells if "4 backward passes per step" in row[0]]
    expected[label, ""] = f"{1e3 * seconds(four, graph=ALL_REDUCE) / 4:,.0f}"
    proposals = {row["label"]: row for row in planned("--best")["8"]["proposals"]}
    seldom = 1e3 * proposals["diloco, H = 32"]["step_s"]
    assert shown == expected | {("`diloco`, H = 32", "fp32"): f"{seldom:,.0f}"}
    assert proposals["dsgd, one-peer-exponential"]["style"] == "awc"  # as in the output of plan
    assert proposals["all-reduce (DDP)"]["proposed"]
    assert not any("qsgd" in label or "H = 4" in label for label in proposals)
    if compute == 300:
        gossip = f"{1e3 * seconds(four, wire='bf16') / 4:,.0f} ms with gossip and the wire bf16"
        assert gossip in " ".join(page.split())
    rank_per_gpu = ["--gpu", "h100", "node.devices=gpu:1", "node.ranks_per_node=8"]
    rows = planned(*rank_per_gpu, "node.cuda_graphs=never")["rows"]
    at = f"{milliseconds(rows, wire='bf16')} ms at {'25' if compute == 600 else '100'} Gbit/s"
    assert at in " ".join(page.split())
    assert milliseconds(rows, graph=ALL_REDUCE) in page


def test_the_losses_and_the_memory_on_the_page_of_a_gpt_have_a_source():
    page = PAGES["gpt-8x8"]
    losses = page.partition("\n## Expected loss")[2].partition("\n## ")[0]
    rows = [line for line in losses.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == 7
    for row in rows:
        check_numbers("tools/docs/gpt-8x8.md", row)
    (command,) = [line for line in lines("gpt-8x8", ["bash"]) if " --dry-run " in line]
    settings = [word for word in command.split() if "=" in word]
    what = costs.subject(assemble.load(ROOT / "jobs/gpt-124m.toml", settings))[0]
    memory = costs.memory(what, costs.exchanges(what, 8))
    on_host = {"messages' host", "snapshot for checkpoints"}
    on_gpus = sum(count for name, count in memory.items() if name not in on_host)
    assert on_host < memory.keys() and f"messages: {on_gpus / 8 / 1e9:.3g} GB." in page
    saved = memory["snapshot for checkpoints"] / 1e9
    checkpoints = " ".join(page.partition("\n## Checkpoints\n")[2].split())
    assert f"{saved:.3g} GB per node" in checkpoints and f"{8 * saved:.0f} GB for 8" in checkpoints
    assert f"while it is written: {3 * 8 * saved:.0f} GB" in checkpoints
    assert assemble.load(ROOT / "jobs/gpt-124m.toml", settings).checkpoint.keep == 2


def test_the_estimated_memory_of_a_loop_on_the_page_of_a_gpt_is_that_of_the_benchmark():
    """The bytes per parameter follow from a row of the benchmark: 102.0 M parameters, 4 ranks."""
    page = " ".join(PAGES["gpt-8x8"].split())
    row = re.search(
        r"moments\) / 4 = ([\d.]+),.*according to the mixer ([\d.]+) \|",
        (ROOT / "tools/bench/BENCHMARKS.md").read_text(),
    )
    state, messages = (float(row[k]) * 1e6 * 4 / 102.0e6 for k in (1, 2))
    assert state == pytest.approx(1.15 * 16, rel=0.01) and messages == pytest.approx(12, rel=0.01)
    assert f"about {state + messages:.0f} bytes per parameter" in page
    assert f"on eight ranks take {(state + messages) * 1.3 / 8:.1f} GB" in page
    model_and_moments = 12 * 1.3  # GB
    assert f"{model_and_moments:.0f} GB per rank and {8 * model_and_moments:.0f} GB per" in page


def test_will_it_help_has_the_situations_and_costs_that_were_measured():
    """Compare its tables with the page of claims and with the table of `plan --best`."""
    results = (ROOT / "jobs/claims/RESULTS.md").read_text()
    (table,) = re.findall(r"^\| situation .*?\n\n", results, re.DOTALL | re.MULTILINE)
    assert table in PAGES["will-it-help"]
    costs = PAGES["will-it-help"].partition("| method, graph |")[2].partition("\n\n")[0]
    assert costs.count("\n") == len(EVIDENCE_OF_QUALITY) + 1
    for row in EVIDENCE_OF_QUALITY:
        period = f", H = {row.period}" if row.period > 1 else ""
        interval = f" [{row.interval[0]:g}, {row.interval[1]:g}]" if row.interval else ""
        page = os.path.relpath(ROOT / row.page, HERE)
        style = f", style `{row.style}`" if row.style else ""
        start = f"| `{row.method}`{period}, {row.graph}{style} | {row.model}, {row.nodes} nodes "
        cost = f"| {row.cost:g}{interval} {row.unit} | ["
        assert any(
            line.startswith(start + cost) and line.endswith(f"]({page}) |")
            for line in costs.splitlines()
        ), start


def test_plots_of_the_readme_have_dark_variants_that_were_made_from_them():
    readme = (ROOT / "README.md").read_text()
    variants = runpy.run_path(str(HERE / "dark.py"))
    for name in variants["PLOTS"]:
        made = variants["dark"](Image.open(HERE / f"{name}.png")).convert("RGBA")
        stored = Image.open(HERE / f"{name}-dark.png").convert("RGBA")
        assert np.array_equal(np.asarray(made), np.asarray(stored)), name
        assert np.asarray(stored)[0, 0, 3] < 8, "the background is not transparent"
        assert f'srcset="tools/docs/{name}-dark.png"' in readme
    assert readme.count("<img ") == len(variants["PLOTS"]) and "![" not in readme


@pytest.mark.every
def test_the_site_is_built_without_a_warning():
    pytest.importorskip("furo")
    done = subprocess.run(["bash", "tools/docs.sh"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0 and (ROOT / "build/docs/index.html").exists(), done.stderr


EVIDENCE = json.loads((HERE / "evidence.json").read_text())


@on_each("row", EVIDENCE)
def test_numbers_on_several_pages_are_those_of_the_evidence(row):
    """The JSON of the evidence is the reference for its page and for pages that repeat numbers."""
    source = (ROOT / row["source"]).read_text()
    assert all(re.search(rf"(?<![\d.]){re.escape(n)}", source) for n in row["numbers"])
    shown = row.get("shown", row["numbers"])
    for page in row["also"]:
        text = " ".join((ROOT / page).read_text().split())
        assert [n for n in shown if not re.search(rf"(?<![\d.]){re.escape(n)}", text)] == [], page
    if "part" in row:
        heads = re.findall(r"^#+ (.*)$", source, re.MULTILINE)
        assert row["part"] in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads}


def test_the_table_of_evidence_is_that_of_its_json():
    for row in EVIDENCE:
        target = os.path.relpath(ROOT / row["source"], HERE) + f"#{row.get('part', '')}".rstrip("#")
        (line,) = [
            at for at in PAGES["evidence"].splitlines() if at.startswith(f"| {row['claim']} ")
        ]
        assert line.startswith(f"| {row['claim']} | {row['measured']} | {row['verdict']} | [")
        assert line.endswith(f"]({target}) |")


@pytest.mark.parametrize(
    "page",
    [
        "jobs/claims/RESULTS.md",
        "tools/labs/RELIABILITY.md",
        "tools/bench/BENCHMARKS.md",
        "tools/docs/evidence.md",
    ],
)
def test_a_page_of_evidence_begins_with_a_table_of_ten_rows(page):
    text = (ROOT / page).read_text()
    first = re.search(r"^\|.*?\n\n", text, re.DOTALL | re.MULTILINE)
    assert first.start() < 600 and len(first[0].strip().splitlines()) == 12
    cells = [c.strip() for line in text.splitlines() if line[:2] == "| " for c in line.split("|")]
    if page.endswith("RESULTS.md"):
        assert max(map(len, cells)) <= 120
    assert not re.search(r"\b[0-9a-f]{7,64}\b", text[: first.end()])


def test_the_version_is_that_of_the_package():
    said = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mpigossip.__version__}\n" in said
    wheels = re.findall(
        r"mpigossip-([\d.]+)-py3", (ROOT / "README.md").read_text() + PAGES["install"]
    )
    assert set(wheels) == {mpigossip.__version__}
    assert f"## {mpigossip.__version__}" in PAGES["CHANGES"]
