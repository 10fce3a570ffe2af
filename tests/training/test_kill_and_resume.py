"""kill -9 at random moments changes nothing but the time a run takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_a_run_killed_at_fifty_random_points_ends_bit_identical(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("kill_host.py")), str(tmp_path), "50", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= 50
    assert found["failed"] == 0, done.stderr
    assert found["different"] == 0
    assert len(set(found["steps"])) > 10, "the kills did not spread over the run"
    assert found["in_writing"] > 0, "no kill met a checkpoint being written"
