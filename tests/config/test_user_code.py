"""Line of user code in an error message."""

import pytest

import mpigossip
from mpigossip.config.user_code import user_frame


def fails(path):
    """Return the exception of failing code in the file ``path``."""
    try:
        exec(compile("1 / 0", str(path), "exec"))
    except ZeroDivisionError as error:
        return error.with_traceback(error.__traceback__.tb_next)


@pytest.mark.parametrize("name", ["_mine", "-fork", ".old"])
def test_a_folder_whose_name_begins_like_the_package_is_user_code(name):
    package = mpigossip.__path__[0]
    path = f"{package}{name}/net.py"
    assert user_frame(fails(path)).filename == path


@pytest.mark.parametrize("path", ["engine/step.py", "mine/net.py"])
def test_files_of_the_package_are_not_user_code(path):
    assert user_frame(fails(f"{mpigossip.__path__[0]}/{path}")) is None
