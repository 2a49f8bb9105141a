"""JSON Schema of job files: it accepts the jobs of the project and rejects invalid settings."""

import json
import tomllib

import fastjsonschema
import pytest

from mpigossip import cli
from mpigossip.config import JobError, packaged
from mpigossip.config.schema import job_schema
from mpigossip.training import assemble

TOML = [path for path in packaged.examples().values() if path.suffix == ".toml"]
JOBS = [path for path in TOML if path.stem != "study"]  # a study is not a job


@pytest.fixture(scope="module")
def check():
    """Return the compiled check of a job by the schema."""
    return fastjsonschema.compile(job_schema(assemble.tables_of_names()))


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_jobs_of_the_project_fulfil_the_schema(check, path):
    assert JOBS
    check(tomllib.loads(path.read_text()))


INVALID = [
    {"run": {"epochs": -1}},
    {"run": {"epochs": "ten"}},
    {"run": {"epoch": 10}},
    {"runs": {}},
    {"data": {"partition": "sort"}},
    {"data": {"shape": []}},
    {"node": {"devices": "tpu:1"}},
    {"node": {"levels": 128}},
    {"node": {"density": 0}},
    {"graph": {"name": "exponentail"}},
    {"graph": {"placement": "racks"}},
    {"algorithm": {"name": "dsgd", "period": 4}},
    {"algorithm": {"name": "diloco", "period": "often"}},
    {"cadence": {"name": "periodic", "dealy": 1}},
    {"members": {"lease_s": 60}},
]


@pytest.mark.parametrize("job", INVALID, ids=str)
def test_what_the_schema_rejects_the_command_rejects(check, job):
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        check(job)
    with pytest.raises(JobError):
        assemble.load(job, [])


def test_user_code_takes_any_options_and_unset_is_a_word(check):
    check({"algorithm": {"name": "my.module:build", "anything": 3}})
    check({"graph": {"name": "file:graph.json"}})
    check({"algorithm": {"clip_norm": "none"}})


def test_every_setting_is_described():
    for section in job_schema(assemble.tables_of_names())["properties"].values():
        for setting in section["properties"].values():
            assert len(setting["description"]) > 10


def test_the_command_prints_the_schema(capsys):
    assert cli.main(["examples", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(job_schema(assemble.tables_of_names())))
