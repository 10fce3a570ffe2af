"""The benchmark of training data counts the tokens of a batch and times nothing but drawing it, on one thread."""

import pytest
import torch
from benchmarks import training


def test_windows_are_drawn_from_a_file_on_one_thread_and_all_their_tokens_count(monkeypatch):
    drawn, threads = [], []

    def time_once(calls, seconds):
        ((case, call),) = calls.items()
        threads.append(torch.get_num_threads())
        drawn.extend(call() for _ in range(2))
        return {case: [2.0] * 7}

    monkeypatch.setattr(training, "TOKENS", 5000)
    monkeypatch.setattr(training, "time_in_turns", time_once)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        row = training.time_windows()
        threads.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 2]
    assert row["case"] == "lm, 32 windows of 512"
    assert row["tokens_per_second"] == pytest.approx(32 * 512 / 2e-3)
    assert [tuple(batch.inputs.shape) for batch in drawn] == [(32, 512)] * 2
    assert not drawn[0].inputs.equal(drawn[1].inputs)
