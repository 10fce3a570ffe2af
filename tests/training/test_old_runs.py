"""A run folder that an earlier version made is resumed, evaluated and read as what it was."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.runs import open_run
from compactattn.models.generation import generate
from compactattn.training import checkpoint
from compactattn.training.records import read_metrics

OLD = Path(__file__).parent / "old_run"  # commit 843c676, stopped after step 5 of 10; and the metrics it would have had


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def test_an_old_config_has_the_old_start_the_old_dropout_and_the_old_words(folder):
    config = checkpoint.load_config(folder)
    assert (config.model.start, config.model.attention_dropout, config.model.persistent_dropout) == ("former", 0.1, 0.0)
    assert length_gen.Data.of(config).make_task().layout == "shared"


def test_an_old_run_goes_on_as_it_would_have(folder):
    config = checkpoint.load_config(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as it was made: sums differ in their last bits with the number of threads
    try:
        length_gen.run(config, folder, resume=True, show_progress=False)
    finally:
        torch.set_num_threads(threads)
    expected = [json.loads(line) for line in (OLD / "metrics-to-the-end.jsonl").read_text().splitlines()]
    found = read_metrics(folder)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for mine, theirs in zip(found, expected, strict=True):  # bit-identical where it was made; other CPUs sum in other orders
        assert mine.keys() == theirs.keys()
        for name in {"loss", "norm"} & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4)


def test_an_old_run_generates_and_is_evaluated(folder):
    trained = open_run(folder, "cpu")
    assert trained.step == 5
    assert len(list(generate(trained.model, torch.tensor([[11, 3, 4]]), 4))) == 4
    (match,) = length_gen.evaluate_run(folder, [20], samples=8, device="cpu")
    assert match.samples == 8
