"""Batch scripts: their content for each site, and that no name or path becomes a command."""

import os
import re
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch

from mpigossip.cli import main
from mpigossip.cluster import batch
from mpigossip.cluster.batch import BatchRequest, read_site, script, seconds_of, sites
from mpigossip.config import JobError
from mpigossip.config.errors import OK, STOPPED, WRONG
from tests.cases import naming, on_each

REPO = Path(__file__).parents[2]
JOB = str(REPO / "jobs" / "digits.toml")
NAMED = {"account": "m1_g", "partition": "gpu", "qos": "regular"}
SITES = [
    "frontier",
    "generic-flux",
    "generic-pbs",
    "generic-slurm",
    "juwels-booster",
    "leonardo",
    "lumi",
    "perlmutter",
]


def made(site="generic-slurm", job="jobs/digits.toml", settings=(), run="runs/digits", **wish):
    wish = {"nodes": 4, "seconds": 3600, **NAMED} | wish
    return script(read_site(site), job, settings, Path(run), BatchRequest(**wish))


def test_all_sites_exist_and_state_that_they_are_untested_and_their_source():
    assert sorted(sites()) == SITES
    for name in SITES:
        site = read_site(name)
        assert site.tested is False
        assert site.link.startswith("https://")
        assert "page_checked = " in sites()[name].read_text()
        assert site.page_checked is False or re.fullmatch(r"\d{4}-\d\d-\d\d", site.page_checked)
        for workaround in site.workarounds:
            assert re.match(r"\d{4}-\d\d", workaround.since)
            assert workaround.link.startswith("https://")


@on_each("name", [name for name in SITES if name not in ("frontier", "lumi", "perlmutter")])
def test_a_rank_with_several_gpus_uses_the_nearest_card_of_each(name):
    assert "export UCX_SELECT_DISTANCE_MD=''" in made(name)
    assert "UCX_SELECT" not in made(name, ranks=4)


@on_each("name", ["frontier", "lumi", "perlmutter"])
def test_nccl_on_slingshot_must_find_its_plugin(name):
    text = made(name)
    assert "export NCCL_NET='AWS Libfabric'\n" in text
    cache = 'MIOPEN_USER_DB_PATH=/tmp/"$USER"-miopen-"$SLURM_JOB_ID"\n'
    assert (cache in text) == (name != "perlmutter")
    assert "Untested" in sites()[name].read_text().partition("[environment]")[2]


@on_each(
    "name, binding", [("perlmutter", "map_ldom:3,2,1,0"), ("lumi", "mask_cpu:fe000000000000,")]
)
def test_a_rank_per_gpu_runs_on_the_cores_next_to_its_gpu(name, binding):
    gpus = read_site(name).gpus
    assert f"--cpu-bind={binding}" in made(name, ranks=gpus)
    assert "--cpu-bind=none" in made(name, ranks=gpus // 2)
    assert "--cpu-bind=none" in made(name)


def test_slurm_is_asked_for_gpus():
    site = replace(read_site("generic-slurm"), gpus=8)
    text = script(site, JOB, [], Path("run"), BatchRequest(nodes=2, seconds=600))
    assert "#SBATCH --gpus-per-node=8\n" in text
    for name in ("juwels-booster", "perlmutter"):  # their files have a directive
        directives = [line for line in made(name).splitlines() if line.startswith("#SBATCH")]
        assert sum("gpu:" in line or "--gpus" in line for line in directives) == 1


def test_ranks_on_juwels_see_all_gpus_and_share_its_threads():
    text = made("juwels-booster", ranks=4)
    assert "export CUDA_VISIBLE_DEVICES=0,1,2,3" in text and "CORES=24\n" in text


@on_each("name", ["frontier", "lumi"])
def test_the_centres_own_cache_monitor_stays(name):
    assert "export FI_MR_CACHE_MONITOR" not in made(name)


@on_each("name", ["frontier", "leonardo", "perlmutter"])
def test_sites_request_all_memory_of_a_host(name):
    assert "#SBATCH --mem=0\n" in made(name)


@on_each("name", ["frontier", "perlmutter"])
def test_each_rank_takes_the_network_card_of_its_gpu(name):
    assert "export MPICH_OFI_NIC_POLICY=GPU\n" in made(name)
    assert ("export MPICH_SMP_SINGLE_COPY_MODE=NONE" in made(name)) == (name == "frontier")


@on_each("name", SITES)
def test_every_site_gives_a_script_that_bash_can_read(name):
    text = made(name)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert "@" not in re.sub(r"USR2@180", "", text)
    assert "never tested" in text
    assert "mpigossip train jobs/digits.toml || code=$?" in text
    directives = [
        line for line in text.splitlines() if line.startswith(("#SBATCH", "#PBS", "#flux:"))
    ]
    assert any("m1_g" in line for line in directives)
    assert not re.search(r"OMPI_MCA|MPIR_CVAR", text)  # the fast network is enabled


def test_the_slurm_script_line_by_line():
    text = made("perlmutter", settings=["run.epochs=3"], name="a run", venv="/home/u/my env")
    lines = text.splitlines()
    for line in (
        "#!/bin/bash",
        "#SBATCH --job-name=a_run",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --time=01:00:00",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR2@180",
        "#SBATCH --constraint=gpu",
        "#SBATCH --account=m1_g",
        "module load PrgEnv-gnu cray-mpich cudatoolkit craype-accel-nvidia80",
        "source '/home/u/my env/bin/activate'",
        "export MPICH_GPU_SUPPORT_ENABLED=1",
        'again() { scontrol requeue "$SLURM_JOB_ID"; }',
    ):
        assert line in lines
    launch = next(line for line in lines if line.startswith("srun"))
    assert "--gpus-per-node=4 --gpu-bind=none" in launch and "--cpus-per-task=128" in launch
    assert launch.endswith("mpigossip train jobs/digits.toml run.epochs=3 || code=$?")


def test_short_jobs_are_stopped_by_the_clock_alone():
    assert "--signal" not in made(seconds=600)
    assert "${SLURM_JOB_END_TIME:-$(($(date +%s) + 600))}" in made(seconds=600)


def test_pbs_and_flux_request_the_same():
    pbs = made("generic-pbs", seconds=36 * 3600)
    for text in (
        "-l select=4:mpiprocs=1",
        "walltime=36:00:00",
        "-A m1_g",
        "-q gpu",
        'qsub "$0"',
        'mpiexec -n "$NODES" --ppn 1',
    ):
        assert text in pbs
    flux = made("generic-flux")
    for text in (
        "--nodes=4",
        "--time-limit=3600s",
        "--bank=m1_g",
        "--queue=gpu",
        'flux run --nodes="$NODES"',
        'flux --parent batch "$0"',
    ):
        assert text in flux


@on_each("name", SITES)
def test_every_site_can_start_several_ranks_per_node(name):
    one = made(name)
    several = made(name, ranks=4)
    assert "One rank per host" in one and "RANKS=" not in one
    assert "4 ranks per host; " in several
    assert "RANKS=4 TASKS=16 CORES=" in several
    habit = batch.read_site(name).examples_use
    for text, own in ((one, "node"), (several, "gpu")):
        other = own == "node" and habit == "gpu"
        assert ("start one per GPU" in text) == other
    launch = next(line for line in several.splitlines() if " mpigossip train " in line)
    if batch.read_site(name).scheduler == "slurm":
        assert "#SBATCH --ntasks-per-node=4" in several
        assert '--ntasks-per-node="$RANKS" --cpus-per-task="$CORES"' in launch
    else:
        assert '"$TASKS"' in launch
    done = subprocess.run(["bash", "-n"], input=several, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [None, 8])
def test_the_script_of_a_loop_starts_the_requested_ranks_per_host(ranks, tmp_path):
    """Programs in place of Slurm's print their arguments."""
    for name, line in (("squeue", "echo 2030-01-01T00:00:00"), ("srun", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environ |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "96"}
    environ |= {"SLURM_NTASKS_PER_NODE": str(ranks)} if ranks else {}
    loop = REPO / "jobs/loops/loop.sbatch"
    command = ["bash", loop, "fsdp.py", "--bf16"]
    done = subprocess.run(command, env=environ, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    per_host = ranks or 1
    options = f"--ntasks-per-node={per_host} --cpus-per-task={96 // per_host} --cpu-bind=none"
    assert done.stdout == f"{options} python fsdp.py --bf16\n"


@on_each(
    ("settings", "ranks"),
    [
        ((), "8 ranks"),
        (("node.ranks_per_node=host",), "8 ranks"),
        (("node.ranks_per_node=2",), "2 ranks"),
        (("node.ranks_per_node=1",), "1 rank"),
    ],
)
def test_the_script_of_a_job_names_the_ranks_of_a_node(settings, ranks, capsys, tmp_path):
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/activate").write_text("")
    words = ["job", "generic-slurm", JOB, "--nodes", "4", "--gpus", "8", "--time", "1h"]
    words += ["--ranks", "8", "--venv", str(tmp_path), "node.devices=auto", *settings]
    assert main(words) == 0
    comment = f"uses its own. Each node of the graph has {ranks}."
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "uses its own" in line]
    assert line.endswith(comment)


def test_ranks_share_the_available_cores():
    """The script sets OMP_NUM_THREADS, which nproc prints as the number of cores."""
    lines = made("generic-slurm", ranks=2).splitlines()
    some = [line for line in lines if line.startswith(("export OMP_", "RANKS="))]
    assert len(some) == 2
    done = subprocess.run(
        ["bash"], input="\n".join([*some, "echo $CORES"]), text=True, capture_output=True
    )
    assert int(done.stdout) == len(os.sched_getaffinity(0)) // 2


def test_one_rank_gets_all_cores_of_its_host():
    """A site file names the number of cores once, in `cores`."""
    launcher = "srun --ntasks-per-node=$RANKS --cpus-per-task=$CORES"
    site = replace(read_site("generic-slurm"), launcher=launcher, cores=64)
    text = script(site, JOB, [], Path("run"), BatchRequest(nodes=2, seconds=600))
    assert "RANKS=1 TASKS=2 CORES=64\n" in text
    assert 'srun --ntasks-per-node="$RANKS" --cpus-per-task="$CORES" mpigossip train' in text
    site = replace(read_site("generic-slurm"), cores=64)
    text = script(site, JOB, [], Path("run"), BatchRequest(nodes=2, seconds=600))
    assert "CORES" not in text


def test_a_site_without_a_launcher_for_several_ranks_is_rejected():
    site = replace(batch.read_site("generic-slurm"), launcher_multi="")
    with pytest.raises(JobError, match=naming("launcher_multi")):
        made_of = BatchRequest(nodes=2, seconds=600, ranks=2)
        script(site, "a.toml", [], Path("run"), made_of)


@pytest.mark.parametrize(
    "settings, more, says",
    [
        (["node.ranks_per_node=host", "node.devices=auto"], [], "--ntasks-per-node=4"),
        (["node.ranks_per_node=2"], ["--ranks", "8"], "RANKS=8 TASKS=24"),
        (
            ["node.ranks_per_node=2"],
            ["--ranks", "3"],
            "--ranks 3: must be a multiple of node.ranks_per_node = 2",
        ),
        (["node.ranks_per_node=2"], ["--ranks", "0"], '--ranks: "0": must be at least 1'),
        # three hosts of the scheduler with two of our nodes each
        (
            ["node.ranks_per_node=2", "graph.name=one-peer-hypercube"],
            ["--ranks", "4"],
            "two nodes, got 6",
        ),
    ],
)
def test_the_command_counts_ranks_and_nodes(alone, settings, more, says):
    given = ["--nodes", "3", "--time", "2h", "--account", "a", "--qos", "b"]
    done = alone("job", "perlmutter", JOB, *given, *more, *settings)
    assert says in done.stdout + done.stderr


def test_gpus_of_this_machine_are_not_those_of_a_site(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    words = ["--nodes", "3", "--time", "2h", "--account", "a", "--qos", "b", "node.devices=auto"]
    done = alone("job", "perlmutter", JOB, *words)
    assert done.returncode == 0 and "--ntasks-per-node=4" in done.stdout, done.stderr


@on_each(
    "text, seconds",
    [
        ("1", 60),
        ("90", 5400),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1d", 86400),
        ("4:00:00", 14400),
        ("100:00:01", 360001),
        ("1-12:00:00", 129600),
    ],
)
def test_time_limits(text, seconds):
    assert seconds_of(text) == seconds


@on_each("text", ["", "0", "59s", "-1", "1:00", "2w", "1h\n", "1h;id", "٣", "9999d"])
def test_wrong_time_limits(text):
    with pytest.raises(JobError, match=naming("--time")):
        seconds_of(text)


def launch_line(text):
    """Return the words of the line of a batch script that starts training."""
    return next(line for line in text.splitlines() if " mpigossip train " in line)


@on_each("name", ["generic-slurm", "perlmutter"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_mpi_adds_an_option_to_the_launcher_and_keeps_the_others(name, ranks):
    plain = launch_line(made(name, ranks=ranks))
    assert "--cpu-bind=" in plain and "--cpus-per-task=" in plain
    added = launch_line(made(name, ranks=ranks, mpi="pmix"))
    assert added == plain.replace("srun ", "srun --mpi=pmix ", 1)


@on_each(
    "launcher",
    ["srun --mpi=pmi2 -n 4", "srun --mpi pmi2 -n 4", "srun -n 4", "srun -n 4 --mpi pmi2"],
)
def test_mpi_replaces_another_choice_of_the_launcher(launcher):
    assert launch_line(made(launcher=launcher, mpi="pmix_v4")).startswith(
        "srun --mpi=pmix_v4 -n 4 mpigossip train "
    )


def test_mpi_is_an_option_of_srun_only():
    for wish in ({"site": "generic-pbs"}, {"launcher": "mpirun -n 4"}):
        with pytest.raises(JobError, match=naming('--mpi "pmix"', "srun")):
            made(**wish, mpi="pmix")
    for wrong in ("list", "", "a b", "$(id)", "-n"):
        with pytest.raises(JobError, match=naming("--mpi", "plugin of Slurm")):
            made(mpi=wrong)


def test_a_complete_launcher_of_the_comment_is_the_one_of_the_file():
    """A user who copies the launcher in the comment of generic-slurm loses no option."""
    (comment,) = re.findall(
        r"^# *--launcher '(srun [^']*)'$", sites()["generic-slurm"].read_text(), re.M
    )
    of_file = read_site("generic-slurm").launcher_multi
    assert comment.replace(" --mpi=pmix", "", 1) == of_file and comment != of_file


# -- the centre's folder of site files ----------------------------------------------------------


@pytest.fixture
def centre(tmp_path, monkeypatch):
    """Folder of MPIGOSSIP_SITES with a site "ours" and another "perlmutter"."""
    folder = tmp_path / "sites"
    folder.mkdir()
    for name in ("ours", "perlmutter"):
        text = sites()["generic-slurm"].read_text("utf-8")
        title = text.replace("any machine with Slurm", f"our {name}")
        (folder / f"{name}.toml").write_text(title, "utf-8")
    monkeypatch.setenv("MPIGOSSIP_SITES", str(folder))
    return folder


def test_sites_of_a_centre_come_before_those_of_the_package(centre, monkeypatch):
    assert read_site("ours").title == "our ours"
    assert read_site("perlmutter").title == "our perlmutter"
    assert read_site("lumi").title == "LUMI-G (CSC)"
    assert sorted(sites()) == sorted([*SITES, "ours"])
    monkeypatch.setenv("MPIGOSSIP_SITES", "")
    assert sorted(sites()) == SITES and "NERSC" in read_site("perlmutter").title


def test_the_command_finds_a_site_of_the_centre(alone, centre):
    done = alone("job", "ours", JOB, "--gpus", "4", "--nodes", "2", "--time", "10m")
    assert done.returncode == 0 and "# our ours: never tested" in done.stdout, done.stderr


def test_an_unknown_site_names_the_folder_of_the_centre_and_all_names(centre):
    with pytest.raises(JobError) as error:
        read_site("mars")
    text = str(error.value)
    for part in ('site "mars" is unknown', str(centre), "MPIGOSSIP_SITES", "ours", "lumi", ".toml"):
        assert part in text
    assert text.count("generic-slurm") == 1  # no name is printed twice
    assert "ours, perlmutter" in text  # the centre's own names come first
    with pytest.raises(JobError, match=naming('mean "lumi"', "ours, perlmutter")):
        read_site("lumii")
    (centre / "ours.toml").write_text("= broken")
    with pytest.raises(JobError, match=naming(f"{centre}/ours.toml", "TOML")):
        read_site("ours")


def test_a_folder_of_sites_that_is_missing_is_an_error(centre, monkeypatch):
    monkeypatch.setenv("MPIGOSSIP_SITES", str(centre / "none"))
    with pytest.raises(JobError, match=naming("MPIGOSSIP_SITES", f"{centre}/none", "unset")):
        read_site("lumi")
    assert read_site(str(centre / "ours.toml")).title == "our ours"  # a path needs no folder


# -- pages --------------------------------------------------------------------------------------


def key_rows(page, heading):
    """Return the cells of the rows of the table below a heading of a page."""
    text = (REPO / "tools" / "docs" / page).read_text("utf-8")
    section = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def default_text(each):
    """Return the default value of a key, as the table of keys shows it."""
    if each.default_factory is not MISSING:
        return "empty"
    if each.default is MISSING:
        return "required"
    if each.default in ((), ""):
        return "empty"
    return f"`{each.default}`".replace("True", "true").replace("False", "false")


def test_the_table_of_the_keys_of_a_site_file_is_complete():
    rows = key_rows("supercomputer.md", "## Keys of a site file")
    expected = {each.name: default_text(each) for each in fields(batch.Site)}
    nested = {f"workarounds.{each.name}": default_text(each) for each in fields(batch.Workaround)}
    shown = {key: cells[1].replace('"', "") for key, cells in rows.items()}
    assert shown == expected | nested
    assert all(cells[0] and cells[2] for cells in rows.values())  # each has a unit and a meaning


@pytest.mark.parametrize("number", [0, 1])
def test_a_site_file_of_the_page_for_centres_gives_a_script(tmp_path, number):
    text = (REPO / "tools" / "docs" / "centres.md").read_text("utf-8")
    files = re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)
    assert len(files) == 2
    own = tmp_path / "ours.toml"
    own.write_text(files[number])
    site = read_site(str(own))
    assert site.tested is False and site.page_checked is False
    text = made(str(own), ranks=site.gpus)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert '--ntasks-per-node="$RANKS"' in launch_line(text) and "CORES=" in text
    assert "module load mpigossip/0.2.0" in text


def test_the_cray_example_for_centres_agrees_with_perlmutter(tmp_path):
    text = (REPO / "tools" / "docs" / "centres.md").read_text("utf-8")
    own = tmp_path / "cray.toml"
    own.write_text(re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)[1])
    ours, theirs = read_site(str(own)), read_site("perlmutter")
    assert ours.launcher.replace("$CORES", str(ours.cores)) == theirs.launcher
    for name in ("launcher_multi", "launcher_gpu", "gpus", "nics", "cores", "examples_use"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.environment == theirs.environment | {"CC": "gcc"}


# -- nothing becomes a command ----------------------------------------------------------------

EVIL = [
    "$(touch HACKED)",
    "`touch HACKED`",
    "; touch HACKED;",
    "'; touch HACKED; '",
    '"; touch HACKED; "',
    "x || touch HACKED",
    "x & touch HACKED &",
    "> HACKED",
    "${IFS}$(touch${IFS}HACKED)",
    "!touch HACKED",
    "\\'; touch HACKED #",
    "-x --help",
    "a*b?[c] ~ {x,y}",
    "@launcher@ @run@",
    "$HOME",
]
STUBS = ("mpigossip", "srun", "mpiexec", "flux", "scontrol", "qsub", "module")


@pytest.fixture
def execute(tmp_path):
    """Run a script with stubs for all programs; return their arguments."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in STUBS:
        program = stubs / name
        program.write_text(
            f'#!/bin/bash\nprintf "%s\\0" {name} "$@" END >>"$CALLS"\nexit ${{CODE:-0}}\n'
        )
        program.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()

    def run(text, **env):
        calls = tmp_path / "calls"
        calls.write_bytes(b"")
        given = {
            "PATH": f"{stubs}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "HOME": "/home/me",
            "SLURM_CPUS_ON_NODE": "7",
            "SLURM_JOB_ID": "9",
            "PBS_O_WORKDIR": str(work),
        }
        done = subprocess.run(
            ["bash", "-c", text],
            capture_output=True,
            text=True,
            cwd=work,
            env=given | env,
            timeout=30,
        )
        assert not list(tmp_path.rglob("*HACKED*"))
        words = calls.read_bytes().decode().split("\0")
        return done, words

    run.work = work
    return run


@on_each("evil", EVIL)
@pytest.mark.parametrize("site", ["generic-slurm", "generic-pbs", "generic-flux"])
def test_names_and_paths_are_quoted(execute, site, evil):
    job = f"{evil}.toml"
    settings = [f"run.name={evil}", f"data.source={evil}"]
    done, words = execute(made(site, job, settings, run=f"runs/{evil}", name=evil))
    assert done.returncode == 0, done.stderr
    at = words.index("train")
    job = f"./{job}" if job.startswith("-") else job
    assert words[at + 1 : at + 4] == [job, *settings]


@on_each("evil", EVIL)
def test_directives_take_no_foreign_text(evil):
    text = made(name=evil)
    (line,) = [line for line in text.splitlines() if line.startswith("#SBATCH --job-name")]
    assert re.fullmatch(r"#SBATCH --job-name=[A-Za-z0-9_.+-]+", line)
    for what in NAMED:
        with pytest.raises(JobError, match=naming(f"--{what}")):
            made(**{what: evil})


@pytest.mark.parametrize(
    "evil", ["a\nb", "a\n#SBATCH --uid=0", "a\rb", "a\0b", "a\x1b[2Jb", "a\u2028b"]
)
def test_line_breaks_and_control_characters_are_rejected(evil):
    for wrong in (
        {"job": evil},
        {"settings": [f"run.name={evil}"]},
        {"run": evil},
        {"venv": evil},
        {"launcher": evil},
    ):
        with pytest.raises(JobError, match=naming("control characters")):
            made(**wrong)
    assert "\n#SBATCH --uid" not in made(name=evil)


def test_a_launcher_is_words_with_variables_and_no_more(execute):
    text = made(launcher="srun -n $SLURM_JOB_ID 'a b' $(id) ;touch HACKED")
    done, words = execute(text)
    assert done.returncode == 0
    assert words[:7] == ["srun", "-n", "9", "a b", "$(id)", ";touch", "HACKED"]
    with pytest.raises(JobError, match=naming("launcher")):
        made(launcher="srun 'open")


@pytest.mark.parametrize(
    "line, says",
    [
        ('directives = ["--x=$(id)"]', "directives ="),
        ('directives = ["--x\\n#SBATCH --y"]', "directives ="),
        ('modules = ["gcc; id"]', "modules ="),
        ('notes = ["a\\nid"]', "notes ="),
        ("tested = true", "tested ="),
        ('scheduler = "lsf"', "scheduler ="),
        ("gpus = -1", "gpus ="),
        ('colour = "red"', "colour"),
        ('[environment]\n"A;id" = "1"', "A;id"),
        ('[environment]\nA = "x\\nid"', "environment"),
        ("[environment]\nA = 1", "environment"),
        ("environment = 3", ("environment = 3", "table")),
        ("workarounds = [3]", ("workarounds = 3", "table")),
        ('[[workarounds]]\nwhat = "no date"', "workarounds.since"),
        ("= broken", "TOML"),
    ],
)
def test_a_site_file_is_checked(tmp_path, line, says):
    own = tmp_path / "own.toml"
    lines = {
        "title": '"t"',
        "link": '"l"',
        "scheduler": '"slurm"',
        "tested": "false",
        "launcher": '"srun"',
    }
    lines.pop(line.split(" ")[0], None)
    own.write_text("\n".join(f"{key} = {value}" for key, value in lines.items()) + "\n" + line)
    with pytest.raises(JobError, match=naming(says)):
        read_site(str(own))


def test_a_custom_site_file_is_quoted_too(tmp_path, execute):
    own = tmp_path / "own.toml"
    own.write_text(
        'title = "t"\nlink = "l"\nscheduler = "slurm"\ntested = "2026-11-20"\n'
        "launcher = \"srun '$(touch HACKED)' $HOME/x\"\n"
        '[environment]\nA = "$HOME/`touch HACKED`"\nB = ""\n'
    )
    text = made(str(own))
    assert "tested on 2026-11-20" in text and "export B=''" in text
    done, words = execute(text)
    assert done.returncode == 0, done.stderr
    assert words[1:3] == ["$(touch HACKED)", "/home/me/x"]


def test_unknown_sites_and_missing_options_are_explained(tmp_path):
    with pytest.raises(JobError, match=naming('"perlmutter"')):
        read_site("perlmuter")
    with pytest.raises(JobError, match=naming("No such file")):
        read_site(str(tmp_path / "none.toml"))
    with pytest.raises(JobError) as error:
        script(read_site("lumi"), "j.toml", [], Path("runs/j"), BatchRequest(nodes=0, seconds=600))
    assert [m.split(":")[0] for m in error.value.messages] == [
        "--nodes 0",
        "--account",
        "--partition",
    ]


# -- the life of a script ---------------------------------------------------------------------

LIVES = [
    # exit code, a new checkpoint -> exit code of the script, queued again
    (0, True, 0, False),
    (STOPPED, True, 0, True),
    (STOPPED, False, 1, False),
    (WRONG, True, WRONG, False),
    (1, True, 0, True),
    (1, False, 1, False),
    (137, False, 137, False),
]


@pytest.mark.parametrize("code, progress, ends, again", LIVES)
@pytest.mark.parametrize(
    "site, queue",
    [("generic-slurm", "scontrol"), ("generic-pbs", "qsub"), ("generic-flux", "flux")],
)
def test_what_happens_after_training(execute, site, queue, code, progress, ends, again):
    run = execute.work / "runs" / "a b"
    (run / "checkpoints" / "step-00000009").mkdir(parents=True)
    text = made(site, run="runs/a b", launcher="mystub")
    stub = execute.work.parent / "stubs" / "mystub"
    new = 'mkdir "runs/a b/checkpoints/step-00000010"' if progress else ":"
    stub.write_text(f"#!/bin/bash\n{new}\nexit {code}\n")
    stub.chmod(0o755)
    done, words = execute(text)
    assert (done.returncode, queue in words) == (ends, again), done.stderr


def test_an_error_of_the_queue_is_shown(execute):
    (execute.work / "runs").mkdir()
    stub = execute.work.parent / "stubs" / "mystub"
    new = "runs/digits/checkpoints/step-00000010"
    stub.write_text(f"#!/bin/bash\nmkdir -p {new}\nexit {STOPPED}\n")
    stub.chmod(0o755)
    done, _ = execute(made(launcher="mystub"), CODE="1")
    assert done.returncode == STOPPED


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_a_script_and_checks_the_job_first(alone):
    given = [JOB, "--gpus", "4", "--nodes", "4", "--time", "1m", "run.name=$(id)"]
    done = alone("job", "generic-slurm", *given)
    assert done.returncode == 0, done.stderr
    assert "'run.name=$(id)'" in done.stdout and "run='runs/$(id)'" in done.stdout
    if sys.prefix != sys.base_prefix:
        assert f"source {sys.prefix}/bin/activate" in done.stdout
    given = ["--nodes", "6", "--time", "2h", "--account", "a", "--qos", "b"]
    settings = ["node.devices=cuda:0-7", "graph.name=one-peer-hypercube"]
    wrong = alone("job", "perlmutter", JOB, *given, *settings)
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    for text in ("power of two", "4 GPUs per host", "node.devices=cuda:0-3"):
        assert text in wrong.stderr


def test_a_slurm_without_a_number_of_gpus_is_rejected_unless_the_job_uses_cpus(alone, tmp_path):
    given = [JOB, "--nodes", "2", "--time", "1m"]
    done = alone("job", "generic-slurm", *given)
    assert done.returncode == 2 and "pass --gpus G" in done.stderr
    assert alone("job", "generic-slurm", *given, "node.devices=cpu:1").returncode == 0
    ours = tmp_path / "ours.toml"
    text = sites()["generic-slurm"].read_text("utf-8")
    ours.write_text(text.replace('["--exclusive"]', '["--exclusive", "--gres=gpu:4"]'))
    assert alone("job", ours, *given).returncode == 0
    done = alone("job", "generic-slurm", *given, "--gpus", "4")
    assert "#SBATCH --gpus-per-node=4\n" in done.stdout
    assert "#SBATCH --ntasks-per-node=4\n" in done.stdout


@on_each("steps", [0, 200])
def test_the_command_warns_if_there_is_no_periodic_checkpoint(alone, steps):
    given = ["--gpus", "4", "--nodes", "2", "--time", "10m", f"checkpoint.every_steps={steps}"]
    done = alone("job", "generic-slurm", JOB, *given)
    assert done.returncode == 0 and done.stdout.startswith("#!/bin/bash\n")
    assert ("checkpoint.every_steps = 0" in done.stderr) == (steps == 0)
    assert ("add checkpoint.every_steps=" in done.stderr) == (steps == 0)


def test_the_command_warns_if_the_data_are_not_on_this_host(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["--gpus", "4", "--nodes", "2", "--time", "10m", "data.source=corpus.h5"]
    given += ["data.classes=10", "data.shape=[1, 8, 8]", "data.samples=100"]

    def warnings(*settings):
        assert main(["job", "generic-slurm", str(JOB), *given, *settings]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("#!/bin/bash\n")
        return [line for line in printed.err.splitlines() if "data.source" in line]

    (warning,) = warnings()
    assert '"corpus.h5"' in warning and "mpigossip data pack" in warning
    assert not warnings("data.source=digits") and not warnings("data.source=mine:points")
    (tmp_path / "corpus.h5").touch()
    assert not warnings()


def test_the_command_warns_of_idle_gpus(alone, tmp_path):
    given = ["node.devices=cpu:1", "--nodes", "2", "--time", "2h", "--account", "a", "--qos", "b"]
    done = alone("job", "perlmutter", JOB, *given, "--venv", str(tmp_path))
    assert done.returncode == 2 and "is not a virtual environment" in done.stderr
    assert "leaves the 4 GPUs" in done.stderr


GIVEN = ["--gpus", "4", "--nodes", "2", "--time", "2h"]


def test_a_program_gets_the_script_of_a_job_with_its_own_command(alone):
    words = ["--program", "python train.py --out 'a b' $SCRATCH", "--run", "runs/a b", *GIVEN]
    done = alone("job", "generic-slurm", *words)
    assert done.returncode == 0, done.stderr
    assert '$CORES" --cpu-bind=none python train.py --out \'a b\' "$SCRATCH" ||' in done.stdout
    assert "run='runs/a b'\n" in done.stdout and "scontrol requeue" in done.stdout
    assert "#SBATCH --job-name=train\n" in done.stdout
    assert "#SBATCH --ntasks-per-node=4\n" in done.stdout and "USR2@180" in done.stdout


def test_a_job_may_follow_the_options(alone):
    done = alone("job", "generic-slurm", *GIVEN, JOB, "run.epochs=2")
    assert done.returncode == 0 and "digits.toml run.epochs=2 ||" in done.stdout, done.stderr


@pytest.mark.parametrize("code", [0, 1, STOPPED])
def test_a_program_without_a_run_directory_is_never_queued_again(execute, alone, code):
    done = alone("job", "generic-slurm", "--program", "python train.py", *GIVEN)
    assert done.returncode == 0 and "no run directory" in done.stdout.replace("\n# ", " ")
    # A program that does not handle the signal would be killed by it.
    assert "USR2" not in done.stdout
    text = re.sub("^(module|source) .*", "", done.stdout, flags=re.M)
    ended, words = execute(text, CODE=str(code))
    assert ended.returncode == code and "scontrol" not in words
    assert words[words.index("python") : words.index("END")] == ["python", "train.py"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["train.py"], "--program 'python train.py'"),
        ([], "name a job"),
        (["digits", "--program", "python a.py"], "--program takes no job"),
        (["digits", "--run", "runs/a"], "set run.output=runs/a"),
        (["--program", "python 'a"], "python 'a"),
        (["--program", " "], "such as 'python train.py'"),
    ],
)
def test_a_program_and_a_job_are_not_confused(alone, words, says):
    done = alone("job", "generic-slurm", *words, *GIVEN)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_virtual_environment_that_is_not_here_is_a_warning(alone):
    done = alone("job", "generic-slurm", JOB, *GIVEN, "--venv", "/nowhere/venv")
    assert done.returncode == 0, done.stderr
    assert "source /nowhere/venv/bin/activate" in done.stdout
    assert '--venv "/nowhere/venv" does not exist here' in done.stderr


@pytest.mark.parametrize("name", ["train.sbatch", "sweep.sbatch", "report.sbatch", "run.sh"])
def test_ready_made_scripts_can_be_read(name):
    assert subprocess.run(["bash", "-n", str(REPO / "jobs" / name)]).returncode == 0


SCRIPTS = {
    "train.sbatch": ("digits run.output=runs/a", "runs/a", "9"),
    "sweep.sbatch": ("digits s.txt", "runs/digits-1", "7_1"),
    "loops/loop.sbatch": ("classify.py --out runs/a", "runs/a", "9"),
}
"""Arguments of each script, its run directory, and the job that it queues again."""


@pytest.fixture
def slurm_script(execute):
    """Return `run(name, answer, effect)`, which executes one of the `SCRIPTS`.

    `answer` is the end that squeue prints, and `effect` a command of srun, which ends with code 75.
    The result has the completed process, the value of MPIGOSSIP_END_TIME and the words of scontrol.
    """
    (execute.work / "s.txt").write_text("run.seed=1\n")

    def run(name, answer="2030-01-01T00:00:00", effect=":"):
        stubs = execute.work.parent / "stubs"
        (stubs / "squeue").write_text(f"#!/bin/bash\necho '{answer}'\n")
        (stubs / "srun").write_text(
            f'#!/bin/bash\necho "end=$MPIGOSSIP_END_TIME"\n{effect}\nexit {STOPPED}\n'
        )
        for program in ("squeue", "srun"):
            (stubs / program).chmod(0o755)
        text = f"set -- {SCRIPTS[name][0]}\n{(REPO / 'jobs' / name).read_text()}"
        done, words = execute(text, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1", TZ="UTC")
        return done, re.search("^end=(.*)$", done.stdout, re.M)[1], words[:3]

    return run


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize(
    ("answer", "end", "is_reported"),
    [
        ("2030-01-01T00:00:00", "1893456000", False),
        ("", "", True),
        ("N/A", "", True),
        ("NONE", "", False),  # the job has no time limit (seen with Slurm 22.05)
    ],
)
def test_an_end_that_squeue_does_not_know_is_not_this_morning(
    slurm_script, name, answer, end, is_reported
):
    done, exported, _ = slurm_script(name, answer)
    assert exported == end
    assert ("squeue does not name" in done.stderr) == is_reported
    assert is_reported or not done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_ready_made_scripts_queue_again_only_after_a_new_checkpoint(slurm_script, execute, name):
    _, run, job = SCRIPTS[name]
    again = ["scontrol", "requeue", job]
    done, _, words = slurm_script(name, effect=f"mkdir -p {run}/checkpoints/step-00000100")
    assert (done.returncode, words) == (0, again), done.stderr
    done, _, words = slurm_script(name)  # the attempt leaves the same checkpoint
    assert done.returncode == 1 and "scontrol" not in words
    assert f"without a new checkpoint in {run}" in done.stderr
    done, _, words = slurm_script(name, effect=f"mkdir {run}/checkpoints/step-00000200")
    assert (done.returncode, words) == (0, again), done.stderr


def test_train_sbatch_finds_the_run_directory_of_a_name(slurm_script, monkeypatch):
    monkeypatch.setitem(SCRIPTS, "train.sbatch", ("my/digits.toml run.name=b", "runs/b", "9"))
    slurm_script("train.sbatch", effect="mkdir -p runs/b/checkpoints/step-00000100")
    assert slurm_script("train.sbatch")[0].returncode == 1


def test_a_sweep_takes_its_line_as_words(execute):
    (execute.work / "s.txt").write_text("graph.name=ring\nrun.seed=$(id) a.b=*\n")
    squeue = execute.work.parent / "stubs" / "squeue"
    squeue.write_text('#!/bin/bash\necho "$@" >asked; echo N/A\n')
    squeue.chmod(0o755)
    path = REPO / "jobs" / "sweep.sbatch"
    text = f"set -- jobs/digits.toml s.txt\n{path.read_text()}"
    done, words = execute(text, SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 0, done.stderr
    at = words.index("train")
    assert words[at + 1 : at + 5] == [
        "jobs/digits.toml",
        "run.output=runs/digits-2",
        "run.seed=$(id)",
        "a.b=*",
    ]
    assert execute(text, SLURM_ARRAY_TASK_ID="3")[0].returncode == 2
    # the last task of an array has the array's number: requeueing it would requeue all tasks
    ids = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    words = execute(text, CODE=str(STOPPED), **ids)[1]
    assert words[words.index("scontrol") :][:3] == ["scontrol", "requeue", "7_2"]
    assert "7_2" in (execute.work / "asked").read_text().split()


@pytest.mark.parametrize("code, tries", [(OK, 1), (WRONG, 1), (STOPPED, 1), (1, 3), (137, 3)])
def test_plain_mpirun_is_tried_again_after_a_crash_only(execute, code, tries):
    text = f"set -- 4 j.toml run.seed=1\n{(REPO / 'jobs' / 'run.sh').read_text()}"
    done, words = execute(text, MPIRUN="mpiexec -x", CODE=str(code))
    assert done.returncode == code and words.count("mpiexec") == tries
    assert words[:8] == ["mpiexec", "-x", "-n", "4", "mpigossip", "train", "j.toml", "run.seed=1"]
