"""The loop: what it learns does not depend on how it is cut up, shared out or interrupted."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch
import training_stand_in
from torch import nn
from training_stand_in import Failing, Numbers, Tiny, lines, result, run

from compactattn.training import checkpoint as checkpoints
from compactattn.training import loop, records
from compactattn.training.config import RunError
from compactattn.training.feed import Feed, Span, check_shares, seed_of, spans
from compactattn.training.loop import train

# -- what a run is -------------------------------------------------------------------------------


def test_a_run_learns_and_leaves_its_folder(tmp_path):
    summary = run(tmp_path, steps=40, validate=lambda model: {"training": float(model.training)}, validate_every=15)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "timing.jsonl", "checkpoint.json", "step-00000040.safetensors",
    }  # fmt: skip
    written = lines(tmp_path)
    losses = [line for line in written if "loss" in line]
    assert [line["step"] for line in losses] == list(range(2, 41, 2))
    assert losses[-1]["loss"] < losses[0]["loss"] / 2
    assert losses[-1]["rate"] == 1e-3
    assert (losses[0]["samples"], losses[0]["tokens"]) == (16, 16 * training_stand_in.LENGTH)
    assert [line for line in written if "validation" in line] == [
        {"step": step, "validation": {"training": 0.0}} for step in (15, 30, 40)
    ]
    assert (summary.step, summary.loss, summary.validation) == (40, losses[-1]["loss"], {"training": 0.0})
    timing = lines(tmp_path, "timing.jsonl")
    assert [line["step"] for line in timing] == list(range(2, 41, 2))
    assert [line["time"] for line in timing] == sorted({line["time"] for line in timing})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert {"python", "torch", "numpy", "device", "commit", "started"} <= environment.keys()
    assert checkpoints.load_config(tmp_path) == training_stand_in.config(steps=40, validate_every=15)


def test_the_loss_is_the_mean_over_the_counted_positions_of_the_whole_batch(tmp_path):
    model = Tiny(dropout=0)
    batch = Numbers().batch(0, 8)
    with torch.no_grad():
        total, count = model.loss(batch.inputs, batch.targets, batch.counted)
    run(tmp_path, model, steps=1, warmup=0)
    assert lines(tmp_path)[0]["loss"] == pytest.approx(float(total / count), rel=1e-6)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_equals_one_big_batch(tmp_path, parts):
    for name, accumulation in (("whole", 1), ("parts", parts)):
        run(tmp_path / name, Tiny(dropout=0, dtype=torch.float64), accumulation=accumulation, log_every=1)
    for whole, cut in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert cut["loss"] == pytest.approx(whole["loss"], rel=1e-14)  # measured: 4e-16
        assert cut["norm"] == pytest.approx(whole["norm"], rel=1e-14)
    whole, cut = (checkpoints.load(tmp_path / name).weights for name in ("whole", "parts"))
    for name in whole:  # measured: 3e-16
        torch.testing.assert_close(cut[name], whole[name], rtol=0, atol=1e-14)


def test_the_gradient_is_clipped_to_the_norm_that_was_asked_for(tmp_path):
    seen = []

    class Watched(Tiny):
        def loss(self, *batch):
            total, count = super().loss(*batch)
            return total * 1000, count

    model = Watched()
    original = nn.utils.clip_grad_norm_

    def clip(parameters, largest):
        norm = original(parameters, largest)
        seen.append(float(torch.stack([p.grad.norm() for p in parameters]).norm()))
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.utils, "clip_grad_norm_", clip)
        run(tmp_path, model, steps=3, clip=0.5, log_every=1)
    assert seen == pytest.approx([0.5] * 3, rel=1e-4)
    assert all(line["norm"] > 10 for line in lines(tmp_path))


def test_what_validation_draws_or_switches_does_not_reach_the_training(tmp_path):
    run(tmp_path / "without")
    run(tmp_path / "with", validate=lambda model: {"draw": float(torch.rand(()))}, validate_every=1)
    without, validated = (checkpoints.load(tmp_path / name).weights for name in ("without", "with"))
    assert all(torch.equal(without[name], validated[name]) for name in without)


def test_every_micro_batch_has_its_own_random_numbers():
    training = training_stand_in.config(batch=16, accumulation=2).training
    shares = [span for step in (1, 2) for rank in (0, 1) for span in spans(training, step, rank, 2)]
    assert len({seed_of(seed, span) for span in shares for seed in (0, 1)}) == 2 * len(shares)


def test_reading_a_step_late_as_on_a_gpu_changes_nothing(tmp_path, monkeypatch):
    run(tmp_path / "cpu", validate=lambda model: {}, validate_every=5)
    monkeypatch.setattr(loop, "lag", lambda device: 1)
    run(tmp_path / "late", validate=lambda model: {}, validate_every=5)
    assert result(tmp_path / "late") == result(tmp_path / "cpu")


def test_bf16_and_compile_are_taken(tmp_path, monkeypatch):
    seen, compiled = [], []

    class Watched(Tiny):
        def hidden(self, tokens):
            seen.append(self.blocks[0](self.embedding(tokens)).dtype)
            return super().hidden(tokens)

    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(options) or function)
    run(tmp_path, Watched(), precision="bf16", steps=3, compile="whole")
    assert set(seen) == {torch.bfloat16}
    assert compiled == [{"dynamic": False}]
    assert checkpoints.load(tmp_path).weights["embedding.weight"].dtype is torch.float32


def test_a_batch_without_a_counted_position_changes_nothing_but_decay(tmp_path):
    class Mute(Numbers):
        def batch(self, first, count):
            return super().batch(first, count)._replace(counted=torch.zeros(count, training_stand_in.LENGTH, dtype=torch.bool))

    model = Tiny()
    before = model.norm.weight.detach().clone()
    assert run(tmp_path, model, Mute(), steps=3).loss == 0
    assert torch.equal(model.norm.weight, before)


# -- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_and_micro_batches_share_out_the_same_samples(processes, accumulation):
    training = training_stand_in.config(batch=16, accumulation=accumulation).training
    for step in (1, 2, 5):
        shares = [span for rank in range(processes) for span in spans(training, step, rank, processes)]
        samples = [first + i for first, size in shares for i in range(size)]
        assert samples == list(range((step - 1) * 16, step * 16))


def test_looking_ahead_cannot_change_the_order_and_looks_one_batch_ahead():
    drawn, asked = [], threading.Event()

    class Slow(Numbers):
        def batch(self, first, count):
            drawn.append(first)
            asked.set()
            return super().batch(first, count)

    with Feed(Slow(), iter([Span(i, 2) for i in range(0, 20, 2)]), torch.device("cpu")) as feed:
        for number, (span, batch) in enumerate(feed):
            assert span.first == 2 * number
            assert torch.equal(batch.inputs, Numbers().batch(span.first, 2).inputs)
            assert len(drawn) <= number + 2
    assert drawn == list(range(0, 20, 2))


def test_an_error_of_the_stream_reaches_the_caller(tmp_path):
    with pytest.raises(RuntimeError, match="the machine broke"):
        run(tmp_path, stream=Failing(5 * 8))
    assert checkpoints.load(tmp_path).step == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_a_batch_that_cannot_be_shared_out_is_refused():
    with pytest.raises(ValueError, match="choose a multiple of 16"):
        training_stand_in.config(accumulation=16)
    with pytest.raises(ValueError, match="does not divide into 3 processes of 2 micro-batches; choose a multiple of 6"):
        check_shares(training_stand_in.config(accumulation=2).training, 3)


def test_a_model_too_small_for_the_tokens_is_refused(tmp_path):
    config = training_stand_in.config()
    with pytest.raises(ValueError, match=r"model.vocab = 5 is less than the 11 tokens of the data"):
        train(replace(config, model=replace(config.model, vocab=5)), Tiny(), Numbers(), tmp_path)
    assert not list(tmp_path.iterdir())


# -- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [1, 3, 4, 7, 11])
def test_a_resumed_run_is_bit_identical(tmp_path, last):
    run(tmp_path / "peace")
    with pytest.raises(RuntimeError):
        run(tmp_path / "broken", stream=Failing(last * 8))
    torch.rand(5)
    run(tmp_path / "broken", Tiny(seed=0), resume=True)
    assert result(tmp_path / "broken") == result(tmp_path / "peace")
    assert [line["step"] for line in lines(tmp_path / "broken", "timing.jsonl")] == list(range(2, 13, 2))


def test_a_torn_last_line_is_dropped(tmp_path):
    run(tmp_path / "peace")
    with pytest.raises(RuntimeError):
        run(tmp_path / "torn", stream=Failing(8 * 8))
    for name in ("metrics.jsonl", "timing.jsonl"):
        with (tmp_path / "torn" / name).open("ab") as file:
            file.write(b'{"step": 8, "lo')
    assert [line["step"] for line in records.read_metrics(tmp_path / "torn")] == [2, 4, 6, 8]
    run(tmp_path / "torn", resume=True)
    assert result(tmp_path / "torn") == result(tmp_path / "peace")


def test_metrics_that_lost_lines_are_refused(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, stream=Failing(8 * 8))
    (tmp_path / "metrics.jsonl").write_bytes(b"")
    with pytest.raises(RunError, match=r"metrics.jsonl is shorter than the \d+ bytes its checkpoint saw"):
        run(tmp_path, resume=True)


def test_resuming_a_finished_run_trains_nothing(tmp_path):
    first = run(tmp_path)
    before = result(tmp_path)
    again = run(tmp_path, resume=True, stream=Failing(0))
    assert (again.step, again.loss) == (first.step, first.loss)
    assert result(tmp_path) == before


def test_each_resumption_is_written_down(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, stream=Failing(8 * 8))
    run(tmp_path, resume=True)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert [entry["step"] for entry in environment["resumed"]] == [6]


def test_a_changed_config_is_refused_by_field_but_for_the_device(tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path, stream=Failing(8 * 8))
    with pytest.raises(RunError) as caught:
        run(tmp_path, resume=True, rate=0.02, steps=20)
    assert "(training.steps: 12 → 20; training.rate: 0.01 → 0.02); resume with the same one" in str(caught.value)
    run(tmp_path, resume=True, device="auto")


def test_a_new_run_never_overwrites_another(tmp_path):
    run(tmp_path)
    before = result(tmp_path)
    complete = "which is complete; choose another folder with --out$"
    with pytest.raises(RunError, match=f"already holds a run, {complete}"):
        run(tmp_path)
    with pytest.raises(RunError, match=rf"already holds a run of another config \(training.steps: 12 → 20\), {complete}"):
        run(tmp_path, steps=20)
    assert result(tmp_path) == before
    with pytest.raises(RuntimeError):
        run(tmp_path / "broken", stream=Failing(8 * 8))
    with pytest.raises(RunError, match=r"already holds a run; go on with that one: compactattn resume .* another folder with"):
        run(tmp_path / "broken")
    with pytest.raises(RunError, match="holds no run"):
        run(tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_run_that_another_process_trains_is_left_alone(tmp_path):
    run(tmp_path)
    other = records.Records(tmp_path, 12, (tmp_path / "metrics.jsonl").stat().st_size)
    with pytest.raises(RunError, match="another process is training in"):
        run(tmp_path, resume=True)
    other.close()
    run(tmp_path, resume=True)
