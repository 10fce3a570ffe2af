"""What a person sees of a run."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys

import pytest
import training_stand_in

from compactattn.training import progress
from compactattn.training.config import RunError
from compactattn.training.loop import train


def test_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    display = progress.open_display(steps=12, start=3, show=True)
    for step in range(4, 13):
        display.update(step, 1.0, 1.0)
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["step 4 of 12", "step 12 of 12"]
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    train(training_stand_in.config(), training_stand_in.Tiny(), training_stand_in.Numbers(), tmp_path)
    shown = capsys.readouterr()
    assert shown.out == ""
    written = shown.err.splitlines()
    assert len(written) == 12
    assert written[-1].startswith("step 12 of 12  loss ")
    assert written[-1].endswith(" tokens/s  0:00 left")


def test_a_bar_in_a_terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    display = progress.open_display(steps=1000, start=100, show=True)
    assert isinstance(display, progress.Bar)
    first, *_ = (line for line in terminal.getvalue().splitlines() if "100/1000" in line)
    assert "loss –" in first
    assert "– tokens/s" in first
    assert "nan" not in first
    display.update(550, 1.23456, 98765.4)
    display.tell("a [word]")
    display.close()
    for words in ("550/1000", "loss 1.2346", "98,765 tokens/s", "a [word]"):
        assert words in terminal.getvalue()


def test_lines_where_rich_is_missing(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert isinstance(progress.open_display(10, 0, True), progress.Lines)
    assert isinstance(progress.open_display(10, 0, False), progress.Silence)


def test_time_left_reads_like_a_clock():
    assert [progress._span(seconds) for seconds in (0, 59.6, 61, 3599, 3600, 90061)] == [
        "0:00", "1:00", "1:01", "59:59", "1:00:00", "25:01:01",
    ]  # fmt: skip


def test_tensorboard_that_is_missing_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'compactattn\[track\]'"):
        train(
            training_stand_in.config(),
            training_stand_in.Tiny(),
            training_stand_in.Numbers(),
            tmp_path / "run",
            tensorboard=True,
        )
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_told_every_logged_number(tmp_path, monkeypatch):
    told = []

    class Board:
        def add_scalar(self, name, value, step):
            told.append((name, step))

        def close(self):
            told.append("closed")

    from compactattn.training import checks, loop

    monkeypatch.setattr(checks, "require_tensorboard", lambda: None)
    monkeypatch.setattr(loop, "open_tensorboard", lambda folder, step: Board())
    config = training_stand_in.config(validate_every=6)
    train(
        config, training_stand_in.Tiny(), training_stand_in.Numbers(), tmp_path,
        validate=lambda model: {"exact": 0.5}, show_progress=False, tensorboard=True,
    )  # fmt: skip
    assert [step for name, step in told[:-1] if name == "loss"] == [2, 4, 6, 8, 10, 12]
    assert [step for name, step in told[:-1] if name == "validation/exact"] == [6, 12]
    assert told[-1] == "closed"


def test_training_needs_torch_numpy_and_safetensors_only():
    code = "import sys, compactattn.training.loop; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    for optional in ("rich", "tyro", "matplotlib", "tensorboard"):
        assert optional not in modules
