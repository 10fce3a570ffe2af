import pytest

from compactattn.native import build


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    if why := build.lack_library():
        pytest.skip(why)
