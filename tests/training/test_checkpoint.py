"""Checkpoints survive what happens to machines: death in the middle of a write, a full disk, a flipped bit."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
from dataclasses import replace

import pytest
import torch
import training_stand_in
from safetensors.torch import load_file
from torch import nn

from compactattn.training import checkpoint as checkpoints
from compactattn.training import files
from compactattn.training.checkpoint import CheckpointError
from compactattn.training.config import RunError
from compactattn.training.optimiser import build_optimiser

CPU = torch.device("cpu")


def trained(seed=0):
    """A model and an optimiser with something to remember."""
    model = training_stand_in.Tiny(seed=seed)
    optimiser = build_optimiser(model, training_stand_in.config().training)
    for step in range(2):
        batch = training_stand_in.Numbers().batch(step * 4, 4)
        model.loss(batch.inputs, batch.targets, batch.counted)[0].backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, optimiser


def state(step, seed=0):
    return checkpoints.capture(step, training_stand_in.config(), 10 * step, *trained(seed), CPU)


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b)


def same(a, b):
    parts = ("weights", "optimiser", "random")
    return (a.step, a.metrics_bytes, a.config) == (b.step, b.metrics_bytes, b.config) and all(
        equal(getattr(a, part), getattr(b, part)) for part in parts
    )


def test_everything_comes_back(tmp_path):
    saved = state(3)
    checkpoints.save(tmp_path, saved)
    assert same(checkpoints.load(tmp_path), saved)
    assert equal(checkpoints.load(tmp_path).weights, saved.weights)
    model, optimiser = trained(seed=9)
    torch.rand(3)
    checkpoints.restore(checkpoints.load(tmp_path), model, optimiser, CPU)
    assert same(checkpoints.capture(3, training_stand_in.config(), 30, model, optimiser, CPU), saved)


def test_the_file_is_plain_safetensors_and_equal_states_are_equal_files(tmp_path):
    saved = state(3)
    checkpoints.save(tmp_path, saved)
    names = set(load_file(tmp_path / "step-00000003.safetensors"))
    assert {"model.embedding.weight", "optimiser.exp_avg.embedding.weight", "optimiser.step.norm.bias", "random.cpu"} <= names
    assert checkpoints._to_bytes(saved) == (tmp_path / "step-00000003.safetensors").read_bytes()


def test_only_the_newest_stays(tmp_path):
    (tmp_path / "step-00000001.safetensors.tmp").write_bytes(b"left by a writer that was killed")
    for step in (1, 2, 3):
        checkpoints.save(tmp_path, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.json", "step-00000003.safetensors"]


def test_saving_the_same_step_again_leaves_the_files_alone(tmp_path):
    checkpoints.save(tmp_path, state(1))
    before = (tmp_path / "step-00000001.safetensors").stat().st_ino
    checkpoints.save(tmp_path, state(1, seed=5))
    assert (tmp_path / "step-00000001.safetensors").stat().st_ino == before
    assert same(checkpoints.load(tmp_path), state(1)) is True


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    checkpoints.save(tmp_path, state(1))
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    monkeypatch.setattr(torch, "load", None)
    checkpoints.load(tmp_path)


class Killed(BaseException):
    """Stands for the end of the process: no handler of ours catches it."""


class Machine:
    """The `os` that files.py writes with; its operation number `at` fails, half done where that can be."""

    OPERATIONS = ("open", "write", "fsync", "replace", "close")

    def __init__(self, at, error):
        self.at, self.error, self.count = at, error, -1

    def __getattr__(self, name):
        real = getattr(os, name)
        return (lambda *args: self._do(name, real, args)) if name in self.OPERATIONS else real

    def _do(self, name, real, args):
        self.count += 1
        if (self.count == self.at and name != "close") or (isinstance(self.error, Killed) and self.count > self.at >= 0):
            if name == "write" and self.count == self.at:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            raise self.error
        return real(*args)


def operations():
    """A checkpoint takes this many: file, folder, pointer and folder again."""
    return 2 * len(("open", "write", "fsync", "close", "replace", "open", "fsync", "close"))


def test_a_checkpoint_takes_as_many_operations_as_the_tests_below_break(tmp_path, monkeypatch):
    machine = Machine(-1, None)
    monkeypatch.setattr(files, "os", machine)
    checkpoints.save(tmp_path, state(1))
    assert machine.count + 1 == operations()


@pytest.mark.parametrize("at", range(operations()))
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=["killed", "full disk"])
def test_a_writer_that_fails_anywhere_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, at, error):
    old, new = state(1), state(2, seed=5)
    checkpoints.save(tmp_path, old)
    with monkeypatch.context() as broken:
        broken.setattr(files, "os", Machine(at, error))
        with pytest.raises(BaseException) as stopped:  # noqa: PT012
            checkpoints.save(tmp_path, new)
            raise Killed  # closing a file does not fail
    if stopped.type is not Killed:
        assert stopped.type is CheckpointError
        assert "cannot write the checkpoint of step 2" in str(stopped.value)
        assert "No space left on device" in str(stopped.value)
        assert not list(tmp_path.glob("*.tmp"))
    kept = checkpoints.load(tmp_path)
    assert same(kept, old) or same(kept, new)
    checkpoints.save(tmp_path, new)  # the machine is mended
    assert same(checkpoints.load(tmp_path), new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.json", "step-00000002.safetensors"]


def test_one_flipped_bit_is_detected_wherever_it_is(tmp_path):
    checkpoints.save(tmp_path, state(1))
    pointer, file = tmp_path / "checkpoint.json", tmp_path / "step-00000001.safetensors"
    size = file.stat().st_size
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    places = [(pointer, at) for at in range(pointer.stat().st_size)]
    chosen = random.Random(0)
    places += [
        (file, at)
        for at in [*range(8), *chosen.sample(range(8, header), 100), *chosen.sample(range(header, size), 200), size - 1]
    ]
    for path, at in places:
        with path.open("r+b", buffering=0) as opened:
            byte = os.pread(opened.fileno(), 1, at)[0]
            for bit in range(8) if path is pointer else [chosen.randrange(8)]:
                os.pwrite(opened.fileno(), bytes([byte ^ 1 << bit]), at)
                with pytest.raises(CheckpointError):
                    checkpoints.load(tmp_path)
            os.pwrite(opened.fileno(), bytes([byte]), at)
    assert same(checkpoints.load(tmp_path), state(1))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 500, -1])
def test_a_cut_file_is_detected(tmp_path, keep):
    checkpoints.save(tmp_path, state(1))
    for name in ("checkpoint.json", "step-00000001.safetensors"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:keep] if keep < len(content) else content[:-1])
        with pytest.raises(CheckpointError):
            checkpoints.load(tmp_path)
        (tmp_path / name).write_bytes(content)


def forge(folder, content):
    """A file with any content, and a pointer that vouches for it."""
    (folder / "step-00000001.safetensors").write_bytes(content)
    digest = checkpoints.hashlib.sha256(content).hexdigest()
    (folder / "checkpoint.json").write_bytes(checkpoints._pointer("step-00000001.safetensors", digest))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\x02\0\0\0\0\0\0\0{}", b"\xff" * 64, pickle.dumps({"a": 1})])
def test_a_file_that_is_no_checkpoint_is_refused_in_a_sentence(tmp_path, content):
    forge(tmp_path, content)
    with pytest.raises(CheckpointError, match="is no checkpoint of a run"):
        checkpoints.load(tmp_path)


def test_a_pointer_cannot_lead_out_of_the_folder(tmp_path):
    (tmp_path / "checkpoint.json").write_text(
        json.dumps({"file": "../step-00000001.safetensors", "sha256": "0" * 64}, indent=2) + "\n"
    )
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoints.load(tmp_path)


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.load(tmp_path)
    checkpoints.save(tmp_path, state(1))
    (tmp_path / "step-00000001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*step-00000001.safetensors, which checkpoint.json names"):
        checkpoints.load(tmp_path)


def test_another_model_is_refused_by_name_and_shape(tmp_path):
    checkpoints.save(tmp_path, state(1))
    weights = checkpoints.load(tmp_path).weights
    with pytest.raises(CheckpointError, match=r"embedding.weight is \(11, 8\) float32 in the checkpoint and \(11, 4\) float32"):
        checkpoints.restore_weights(training_stand_in.Tiny(width=4), weights)
    larger = training_stand_in.Tiny()
    larger.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"has no extra.weight, extra.bias, which the model needs"):
        checkpoints.restore_weights(larger, weights)
    with pytest.raises(CheckpointError, match="has unheard, which the model lacks"):
        checkpoints.restore_weights(training_stand_in.Tiny(), {**weights, "unheard": torch.ones(1)})


def test_a_weight_with_two_names_is_kept_once(tmp_path):
    def tied():
        model = training_stand_in.Tiny()
        model.head = nn.Linear(8, training_stand_in.VOCAB, bias=False)
        model.head.weight = model.embedding.weight
        return model

    model = tied()
    optimiser = build_optimiser(model, training_stand_in.config().training)
    checkpoints.save(tmp_path, checkpoints.capture(1, training_stand_in.config(), 0, model, optimiser, CPU))
    weights = checkpoints.load(tmp_path).weights
    assert "head.weight" not in weights
    other = tied()
    nn.init.zeros_(other.head.weight)
    checkpoints.restore_weights(other, weights)
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[1]"])
def test_a_malformed_run_folder_is_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RunError, match=r"config.json is malformed"):
        checkpoints.load_config(tmp_path)


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        checkpoints.load_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RunError, match="cannot read"):
        checkpoints.load_config(tmp_path)


def test_an_unknown_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FORMAT", 2)
    checkpoints.save(tmp_path, replace(state(1), step=1))
    monkeypatch.setattr(checkpoints, "FORMAT", 1)
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        checkpoints.load(tmp_path)
