import os
import shlex

import pytest

from compactattn.native import build


@pytest.fixture(scope="session", autouse=True)
def _compiled(tmp_path_factory):
    """Without a compiler there is nothing to test; one that compiles something else must compile attend.c."""
    folder = tmp_path_factory.mktemp("compiler")
    (folder / "empty.c").write_text("int nothing;\n")
    try:
        build.compile_source(shlex.split(os.environ.get("CC", "cc")), folder / "empty.c", folder / "empty.so")
    except (build.CannotBuild, IndexError, ValueError) as why:
        pytest.skip(f"no C compiler with OpenMP: {why}")
    assert not build.lack_library()
