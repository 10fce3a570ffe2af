"""Training on a GPU: a replayed update is the update, a run may be resumed into the graph, compiled parts are the model."""

from dataclasses import replace

import pytest
import torch

from compactattn.data.batches import Batch
from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build
from compactattn.training import checkpoint as checkpoints
from compactattn.training.config import RunConfig, TrainingConfig
from compactattn.training.loop import train
from gpu_tests.settings import DEVICE, GPU, TRIAL, needs_gpu

VOCAB, LENGTH = 23, 12 if TRIAL else 60
MODEL = ModelConfig(vocab=VOCAB, layers=2, width=32 if TRIAL else 128, heads=2, kernel="biweight", slots=48)
TRAINING = TrainingConfig(
    steps=3 if TRIAL else 24, batch=4 if TRIAL else 16, warmup=2, rate=1e-3, final_rate=1e-4, log_every=4,
    checkpoint_every=8, precision="bf16" if GPU else "fp32", device=DEVICE,
)  # fmt: skip


class Counting:
    """Sample i counts up from i in steps of i + 1; drawing beyond sample `last` breaks, as a machine might."""

    vocab = VOCAB

    def __init__(self, last=2**62):
        self.last = last

    def batch(self, first, count):
        if first + count > self.last:
            raise RuntimeError("the machine broke")
        i = torch.arange(first, first + count)[:, None]
        tokens = (i + (i % 7 + 1) * torch.arange(LENGTH + 1)) % VOCAB
        counted = torch.arange(LENGTH) >= i % LENGTH
        return Batch(tokens[:, :-1], tokens[:, 1:], counted, counted)


def weights(folder, stream=None, resume=False, **changes):
    """The weights that a run ends with, as one vector in float64."""
    config = RunConfig("counting", seed=3, model=MODEL, training=replace(TRAINING, **changes))
    train(config, build(MODEL), stream or Counting(), folder, resume=resume, show_progress=False)
    return torch.cat([x.double().flatten() for x in checkpoints.load(folder).weights.values()])


def test_a_run_learns_with_fused_attention(tmp_path):
    before = torch.cat([x.double().flatten() for x in build(MODEL).state_dict().values()])
    after = weights(tmp_path)
    assert after.isfinite().all()
    assert (after.cpu() - before).norm() > 0


@needs_gpu
def test_a_replayed_run_is_the_plain_run_also_when_resumed(tmp_path, record_property):
    """As close as two plain runs are to each other, and a few ulp."""
    plain, again = weights(tmp_path / "plain"), weights(tmp_path / "again")
    replayed = weights(tmp_path / "replayed", graph=True)
    with pytest.raises(RuntimeError, match="the machine broke"):
        weights(tmp_path / "resumed", Counting(last=13 * TRAINING.batch))
    resumed = weights(tmp_path / "resumed", resume=True, graph=True)
    spread, by_replay, by_resuming = (float((x - plain).norm() / plain.norm()) for x in (again, replayed, resumed))
    record_property(
        "note", f"weights differ by {spread:.1e} from run to run, {by_replay:.1e} replayed, {by_resuming:.1e} resumed"
    )
    assert max(by_replay, by_resuming) <= 2 * spread + 2e-7


def test_compiled_parts_err_as_little_as_the_eager_model(record_property):
    """Loss and gradient in bf16 against fp32: compiled at most twice the error of eager."""
    batch = Batch(*(x.to(DEVICE) for x in Counting().batch(0, TRAINING.batch)))

    def gradient(bf16, compiled=False):
        model = build(MODEL).to(DEVICE)
        if compiled:
            model.compile_parts()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
            loss, count = model.loss(batch.inputs, batch.targets, batch.counted)
        gradients = torch.autograd.grad(loss / count, list(model.parameters()))
        return torch.cat([loss.detach().reshape(1).double(), *(x.double().flatten() for x in gradients)])

    exact, eager = gradient(False), gradient(True)
    ours = eager if TRIAL else gradient(True, compiled=True)  # the trial machine need not have a C++ compiler
    errors = [
        float((x - exact)[part].norm() / exact[part].norm()) for x in (eager, ours) for part in (slice(1), slice(1, None))
    ]
    record_property("note", "loss and gradient err by {:.1e}, {:.1e} eager and {:.1e}, {:.1e} compiled".format(*errors))
    assert errors[3] <= 2 * errors[1]
    assert errors[2] <= 2 * errors[0] + errors[1] ** 2 + 1e-4
