"""Trains in forked children, kills them at random moments, resumes them, and compares with a run left in peace.

Run as a program of its own: it imports torch once, and never runs a backward pass before it forks.
    python kill_host.py FOLDER KILLS SEED        prints what it found as JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import training_stand_in

from compactattn.training import checkpoint as checkpoints
from compactattn.training.loop import train

CONFIG = training_stand_in.config(steps=40, warmup=5, log_every=3, checkpoint_every=2, validate_every=7, accumulation=2)
KILLS_IN_A_RUN, STRIDE = 7, 12


def measure(model):
    return {"draw": float(torch.rand(())), "weight": float(model.norm.weight.sum())}


def child(folder):
    """A process that starts the run or goes on with it."""
    started = os.fork()
    if started:
        return started
    code = 1
    try:
        resume = (folder / "config.json").exists()
        train(
            CONFIG,
            training_stand_in.Tiny(),
            training_stand_in.Numbers(),
            folder,
            resume=resume,
            validate=measure,
            show_progress=False,
        )
        code = 0
    finally:
        os._exit(code)


def at(folder):
    """Step of the checkpoint; 0 where there is none."""
    try:
        return int((folder / "checkpoint.json").read_text().split("step-")[1][:8])
    except FileNotFoundError:
        return 0


def writing(folder):
    return any(name.endswith(".tmp") for name in os.listdir(folder))


def wait(process, until=lambda: False):
    """Exit code once the process has ended; None if it was killed as soon as `until` was true."""
    while not until():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0001)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def moment(folder, chosen, in_writing):
    """A random moment: some time after the checkpoint of a random step, or in the middle of the next one."""
    step = min(at(folder) + chosen.randrange(STRIDE), CONFIG.training.steps)
    pause, reached = chosen.uniform(0, 0.05), []

    def until():
        if not reached and at(folder) >= step:
            reached.append(time.monotonic())
        return bool(reached) and (writing(folder) if in_writing else time.monotonic() > reached[0] + pause)

    return until


def left(folder):
    """All that must not depend on how often the run was killed; the pointer holds the hash of the whole checkpoint."""
    return [(folder / name).read_bytes() for name in ("checkpoint.json", "metrics.jsonl", "config.json")]


def main(folder, kills, seed):
    torch.set_num_threads(1)
    chosen = random.Random(seed)
    assert wait(child(folder / "peace")) == 0
    expected = left(folder / "peace")
    found = {"kills": 0, "runs": 0, "different": 0, "failed": 0, "steps": [], "in_writing": 0}
    while found["kills"] < kills:
        run = folder / f"run-{found['runs']}"
        run.mkdir()
        code, killed = None, 0
        while code is None:
            process = child(run)
            code = wait(process, moment(run, chosen, killed % 2 == 1)) if killed < KILLS_IN_A_RUN else wait(process)
            if code is None:
                killed += 1
                found["steps"].append(checkpoints.load(run).step if checkpoints.exists(run) else 0)
                found["in_writing"] += writing(run)
        found["runs"] += 1
        found["kills"] += killed
        found["failed"] += code != 0
        found["different"] += code == 0 and left(run) != expected
        checkpoints.load(run)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
