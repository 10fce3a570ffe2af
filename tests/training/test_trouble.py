"""What goes wrong in a run is said in a sentence, and harms no checkpoint."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading

import pytest
import torch
from training_stand_in import Numbers, Tiny, lines, result, run

from compactattn import attend
from compactattn.attention import ScaleError
from compactattn.training import checkpoint as checkpoints
from compactattn.training import files, loop, records
from compactattn.training.checkpoint import CheckpointError
from compactattn.training.config import RunError
from compactattn.training.divergence import Diverged
from compactattn.training.interrupt import Interrupted


class Poisoned(Numbers):
    """Token 0 stands in sample 40 alone, the first of step 6."""

    def batch(self, first, count):
        batch = super().batch(first, count)
        inputs = batch.inputs.clamp(min=1)
        inputs[(torch.arange(first, first + count) == 40)] = 0
        return batch._replace(inputs=inputs)


class Fragile(Tiny):
    """Its block or its gradient breaks where token 0 stands."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def loss(self, inputs, targets, counted):
        hit = (inputs == 0).any().float()
        handle = None
        if self.where == "output":
            handle = self.blocks[1].register_forward_pre_hook(
                lambda module, args: args[0] * torch.where(hit > 0, torch.inf, 1.0)
            )
        total, count = super().loss(inputs, targets, counted)
        if handle:
            handle.remove()
        if self.where == "loss":
            total = total * torch.where(hit > 0, torch.nan, 1.0)
        if self.where == "gradient":
            spike = (self.norm.bias.sum() * 0 + 1 - hit).sqrt()  # finite, with an infinite slope at 0
            total = total + spike * 0 + (spike if hit else 0)
        return total, count


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("output", "first in the output of blocks.1;"),
        ("loss", "first in the loss itself, after every layer's output was finite;"),
        ("gradient", "first in the gradient of norm.bias;"),
    ],
)
def test_a_loss_that_is_no_number_stops_the_run_names_step_and_layer_and_keeps_the_checkpoint(tmp_path, where, words):
    with pytest.raises(Diverged) as caught:
        run(tmp_path, Fragile(where), Poisoned(), log_every=1, accumulation=2)
    assert "step 6 is not finite" in str(caught.value)
    assert words in str(caught.value)
    assert "the checkpoint of step 3 is intact" in str(caught.value)
    assert checkpoints.load(tmp_path).step == 3
    *good, last = lines(tmp_path)
    assert [line["step"] for line in good] == [1, 2, 3, 4, 5]
    assert last["step"] == 6
    shown = r"[\d.]+ and gradient norm (nan|inf)" if where == "gradient" else "(nan|inf)"
    assert re.fullmatch(f"diverged at step 6, loss {shown}", last["failed"])


def test_a_parameter_that_is_no_number_is_named(tmp_path):
    model = Tiny()
    with torch.no_grad():
        model.blocks[1].bias[3] = torch.nan
    with pytest.raises(
        Diverged, match=r"step 1 is not finite, first in parameter blocks.1.bias; no checkpoint had been written yet"
    ):
        run(tmp_path, model)
    assert not checkpoints.exists(tmp_path)


@pytest.mark.parametrize("late", [0, 1])
def test_a_bad_step_leaves_the_weights_as_they_were(tmp_path, monkeypatch, late):
    monkeypatch.setattr(loop, "lag", lambda device: late)
    model = Fragile("loss")
    with pytest.raises(Diverged, match="step 6 is not finite, first in the loss itself"):
        run(tmp_path / "bad", model, Poisoned(), checkpoint_every=5)
    good = checkpoints.load(tmp_path / "bad").weights  # of step 5
    assert all(torch.equal(good[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False], ids=["in a step", "in a validation"])
def test_a_scale_that_weights_have_ruined_is_a_divergence(tmp_path, training):
    class Ruined(Tiny):
        def loss(self, inputs, targets, counted):
            if training and (inputs == 0).any():
                raise ScaleError("scale must be positive and finite, got [0.0]")
            return super().loss(inputs, targets, counted)

    def validate(model):
        attend(*torch.ones(3, 1, 1, 1, 1), scale=torch.zeros(1))

    with pytest.raises(Diverged, match="step 6 is not finite") as caught:
        run(tmp_path, Ruined(), Poisoned(), log_every=1, validate=validate, validate_every=0 if training else 6)
    assert ("first in a scale of attention; the checkpoint of step 3 is intact" in str(caught.value)) == training
    *_, last = lines(tmp_path)
    assert last == {"step": 6, "failed": "diverged at step 6, a scale of attention is 0 or not finite"}


class FullDisk:
    """The `os` that files.py writes with, on a disk that takes no more from its nth write on."""

    def __init__(self, left):
        self.left = left

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, handle, content):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(handle, content)


def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files, "os", FullDisk(4))  # config, environment, and the checkpoint of step 3
        with pytest.raises(CheckpointError) as caught:
            run(tmp_path / "full")
    assert "cannot write the checkpoint of step 6" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert checkpoints.load(tmp_path / "full").step == 3
    run(tmp_path / "full", resume=True)
    run(tmp_path / "peace")
    assert result(tmp_path / "full") == result(tmp_path / "peace")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_metrics_that_cannot_be_written_stop_the_run_and_keep_the_checkpoint(tmp_path, monkeypatch):
    def fill(model):
        os.dup2(full, metrics[0])  # from now on the disk is full
        return {}

    metrics, full = [], os.open("/dev/full", os.O_WRONLY)
    original = records._open_at
    monkeypatch.setattr(records, "_open_at", lambda path, length: metrics.append((f := original(path, length)).fileno()) or f)
    with pytest.raises(
        RunError, match=r"cannot write to .*metrics.jsonl: No space left on device; the last checkpoint is intact"
    ):
        run(tmp_path, validate=fill, validate_every=4)
    os.close(full)
    assert checkpoints.load(tmp_path).step == 3


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot write to '.*/file/run' \(.*/file is a file\); choose another directory"):
        run(tmp_path / "file" / "run")
    with pytest.raises(RunError, match=r"cannot write to '.*/file' \(it is a file\); choose another directory with --out"):
        run(tmp_path / "file")


class Signalling(Numbers):
    """Sends this process signals when the given sample is asked for."""

    def __init__(self, sample, *numbers):
        self.sample, self.numbers = sample, numbers

    def batch(self, first, count):
        if first == self.sample:
            for number in self.numbers:
                os.kill(os.getpid(), number)
        return super().batch(first, count)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted) as caught:
        run(tmp_path / "a stop", stream=Signalling(7 * 8, number))
    stopped = checkpoints.load(tmp_path / "a stop").step
    assert stopped in (7, 8)  # the batch of step 8 is drawn during step 7
    assert (
        str(caught.value)
        == f"stopped after step {stopped} of 12 and saved; `compactattn resume '{tmp_path / 'a stop'}'` goes on from there"
    )
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    run(tmp_path / "a stop", resume=True)
    run(tmp_path / "peace")
    assert result(tmp_path / "a stop") == result(tmp_path / "peace")


@pytest.mark.parametrize("validating", [False, True])
def test_a_signal_stops_the_run_after_the_step_that_it_falls_in(tmp_path, validating):
    signals = iter([signal.SIGTERM])

    def disturb(_=None):
        for number in signals:
            os.kill(os.getpid(), number)
        return {}

    class Disturbed(Tiny):
        def loss(self, *batch):
            if not validating:
                disturb()
            return super().loss(*batch)

    with pytest.raises(Interrupted, match="stopped after step 1 of 12") as caught:
        run(tmp_path, Disturbed(), validate=disturb, validate_every=1)
    assert caught.value.number == signal.SIGTERM


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    class Twice(Tiny):
        def loss(self, *batch):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return super().loss(*batch)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Twice())
    assert signal.getsignal(signal.SIGINT) is before
    assert not checkpoints.exists(tmp_path)


def test_a_run_works_in_a_thread_that_may_set_no_handlers(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tmp_path, steps=3)))
    thread.start()
    thread.join()
    assert results[0].step == 3


def test_a_cuda_graph_is_refused_where_there_is_no_gpu(tmp_path):
    with pytest.raises(RunError) as error:
        run(tmp_path, graph=True, device="cpu")
    assert "graph = true needs a GPU" in str(error.value)
