"""What is asked before a run begins. An answer that stops it is a sentence to act on, and nothing has been written by then."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from compactattn.training import checkpoint
from compactattn.training.config import FREE, RunConfig, RunError, TrainingConfig, differences
from compactattn.training.distributed import Group
from compactattn.training.feed import check_shares
from compactattn.training.progress import require_tensorboard
from compactattn.training.records import read_metrics
from compactattn.training.selection import Selection


def check_machine(training: TrainingConfig, group: Group, tensorboard: bool) -> None:
    """Whether the processes can do what is asked of them."""
    check_shares(training, group.size)
    if training.graph and (group.device.type != "cuda" or group.size > 1 or training.accumulation > 1):
        given = f"{group.device.type}, {group.size} processes and {training.accumulation} micro-batches"
        raise RunError(f"graph = true needs a GPU, one process and one micro-batch, not {given}; set it to false")
    if tensorboard:
        require_tensorboard()


def check_folder(config: RunConfig, folder: Path) -> None:
    """Whether the folder is free for a new run, and can be made where there is none."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "it is a file" if folder.is_file() else "Permission denied" if there.is_dir() else f"{there} is a file"
        raise RunError(f"cannot write to {str(folder)!r} ({reason}); choose another directory with --out")
    known = (folder / "config.json").exists()
    if not known and not checkpoint.exists(folder):
        return
    old = checkpoint.load_config(folder) if known else None
    changed = differences(old, config, ignore=FREE) if old else []
    held = f"{folder} already holds a run" + (f" of another config ({'; '.join(changed)})" if changed else "")
    if old and is_trained(folder, old):
        raise RunError(f"{held}, which is complete; choose another folder with --out")
    raise RunError(
        f"{held}; go on with that one: compactattn resume {shlex.quote(str(folder))}; or choose another folder with --out"
    )


def is_trained(folder: Path, config: RunConfig) -> bool:
    """Whether a run has done all its steps, or has stopped for want of a better validation."""
    if not checkpoint.exists(folder):
        return False
    step = checkpoint.step_of(folder)
    return step == config.training.steps or Selection.of(read_metrics(folder), config.training.patience, step).exhausted
