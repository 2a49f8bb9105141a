"""Time that a round of a member spends on the folder."""

import time

from mpigossip.members.folder_rate import describe_slow_folder, seconds_per_round
from mpigossip.members.records import RecordStore
from tests.members.storm import begin


class Slow(RecordStore):
    """Folder whose operations take 2 ms each."""

    def path(self, name):
        time.sleep(0.002)
        return super().path(name)


def test_a_slow_folder_is_measured_and_left_as_it_was(tmp_path):
    begin(root := tmp_path / "run")
    assert seconds_per_round(Slow(root)) > 0.016
    assert list((root / "tmp").iterdir()) == []


def test_the_smallest_period_spends_a_tenth_of_a_round_on_the_folder():
    assert describe_slow_folder(0.01, 0.1, 4) == describe_slow_folder(0.01, -1e-4, 4) == ""
    # 4 steps of 10 ms, and 60 ms for the folder: 54 steps take 0.54 s, nine times as long
    assert "takes 1,234 s, of which 234 s" in describe_slow_folder(234.0, 1234.0, 4)
    text = describe_slow_folder(0.06, 0.1, 4)
    assert "takes 0.1 s" in text and "0.06 s are operations" in text
    assert text.startswith("hint (training continues)")
    assert "cadence.period = 54 or more instead of 4" in text
    slow = describe_slow_folder(123.4, 1233.6, 4)
    assert "1,234 s" in slow and "123 s" in slow


def test_a_program_divides_its_data_into_chunks_itself():
    text = describe_slow_folder(0.06, 0.1)
    assert "14 times" in text and "cadence" not in text


def test_hints_are_empty_files_without_fsync(tmp_path, monkeypatch):
    begin(root := tmp_path / "run")
    monkeypatch.setattr("os.fsync", None)
    disk = RecordStore(root, shared=True)
    disk.mark("ledger/0000/000000.done")
    disk.mark("ledger/0000/000000.done")
    assert disk.names("ledger/0000") == ["000000.done"]
    assert disk.names("tmp") == []
