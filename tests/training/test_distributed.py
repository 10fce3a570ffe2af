"""Several processes learn what one learns."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed_host
import pytest
import torch
from training_stand_in import Numbers, Tiny

from compactattn.training import checkpoint as checkpoints
from compactattn.training.config import RunError
from compactattn.training.distributed import choose_device, join
from compactattn.training.loop import train


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_learn_what_one_learns(tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [sys.executable, *launch, str(Path(__file__).with_name("distributed_host.py")), str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    train(distributed_host.CONFIG, Tiny(0.0, dtype=torch.float64), Numbers(), tmp_path / "one", show_progress=False)
    one, two = (
        [json.loads(line) for line in (tmp_path / n / "metrics.jsonl").read_text().splitlines()] for n in ("one", "two")
    )
    assert [line["step"] for line in two] == list(range(1, 13))
    for single, double in zip(one, two, strict=True):
        assert double["loss"] == pytest.approx(single["loss"], rel=1e-14)  # measured: 3e-16
        assert double["norm"] == pytest.approx(single["norm"], rel=1e-14)
        assert {**double, "loss": 0, "norm": 0} == {**single, "loss": 0, "norm": 0}
    one, two = (checkpoints.load(tmp_path / name) for name in ("one", "two"))
    assert (one.step, one.config) == (two.step, two.config)
    for name in one.weights:  # measured: 2e-16
        torch.testing.assert_close(two.weights[name], one.weights[name], rtol=0, atol=1e-14)
        torch.testing.assert_close(two.optimiser[name], one.optimiser[name], rtol=0, atol=1e-14)


def test_alone_there_is_nothing_to_add_up(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join("cpu") as group:
        value = torch.arange(3.0)
        group.sum_([value])
        group.share_([value])
        assert (group.rank, group.size, group.leads, value.tolist()) == (0, 1, True, [0, 1, 2])


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(RunError, match=r"sees no GPU; use device='cpu' or 'auto'"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device("auto") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(RunError, match="GPU 2 is asked for, but torch sees 2"):
        choose_device("cuda:2")
