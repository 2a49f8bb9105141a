"""Limits that the assembly of a job sets."""

import os

import pytest

from mpigossip.training import assemble as assembly


@pytest.mark.parametrize(("timeout_s", "limit"), [(8.0, "60"), (120.5, "121")])
def test_the_limit_of_the_compiler_lock_follows_the_time_limit(monkeypatch, timeout_s, limit):
    name = "TORCHINDUCTOR_FILE_LOCK_TIMEOUT"
    monkeypatch.delenv(name, raising=False)
    assembly._limit_compiler_lock(timeout_s)
    assert os.environ[name] == limit
    assembly._limit_compiler_lock(999.0)
    assert os.environ[name] == limit, "a value that is set already stays"
