"""A program on a GPU for desktops has 99 KiB of shared memory: what the kernels need there, compiled without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 99 * 1024


@pytest.mark.parametrize("capability", ["89", "120"])
def test_wide_heads_and_masks_that_are_tensors_fit_gpus_for_desktops(capability, tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_for.py")
    done = subprocess.run(
        [sys.executable, str(script), capability],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    needs = [line.split() for line in done.stdout.splitlines()]
    assert len(needs) == 5
    for call, *kernels in needs:
        shared = dict(zip(kernels[::2], map(int, kernels[1::2]), strict=True))
        assert MOST / 4 < max(shared.values()) <= MOST, (call, shared)
