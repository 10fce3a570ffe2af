"""The benchmark of training times the update that training makes."""

import pytest
import torch
from benchmarks import mixers

from compactattn.bench import attention, decode, training
from compactattn.bench.results import read
from compactattn.models.zoo import Size
from compactattn.training.config import RunError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(training, "SIZE", Size(1, 16, 2, 50, "a test"))
    monkeypatch.setattr(training, "LENGTH", 8)
    monkeypatch.setattr(training, "BATCH", 2)
    monkeypatch.setattr(training, "require_gpu", lambda: CPU)
    monkeypatch.setattr(training.measure, "__defaults__", (lambda step: (step(), [4.0, 4.0, 4.0])[1],))


def test_rows_give_tokens_per_second_of_every_model(tmp_path, capsys):
    training.run("sparsemax,norm_relu", "2,1", "none", False, True, 1.0, tmp_path / "training.csv")
    rows = read(tmp_path / "training.csv")
    names = [(row["layers"], row["architecture"], row["kernel"]) for row in rows]
    each = [("transformer", "gaussian"), ("mosaic", "sparsemax"), ("mosaic", "norm_relu")]
    assert names == [(depth, *model) for depth in ("2", "1") for model in each]
    assert {row["tokens_per_second"] for row in rows} == {str(2 * 8 * 250)}
    assert {row["status"] for row in rows} == {"ok"}
    assert all(3 < float(row["loss"]) < 8 for row in rows)  # log 50 = 3.9
    assert "4 k tokens/s" in capsys.readouterr().out


def test_an_update_moves_the_weights():
    config = training.plan(["biweight"], [1], "none", False)[1]
    step = training.make_step(config, CPU)
    losses = [float(step()[0]) for _ in range(40)]
    assert losses[-1] < losses[0] - 0.01


def test_a_model_that_fails_has_a_row(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(training, "make_step", fail)
    row = training.measure(training.plan(["biweight"], [1], "none", False)[1], CPU)
    assert row["status"] == "failed: RuntimeError: out of memory"
    assert row["tokens_per_second"] == ""


@pytest.mark.parametrize("command", [attention, training, decode], ids=lambda command: command.__name__.rpartition(".")[2])
def test_a_wrong_kernel_is_told_before_a_gpu_is_looked_for(command, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "require_gpu", lambda: pytest.fail("looked for a GPU"))
    with pytest.raises(RunError, match="unknown kernel 'sparsemx'; did you mean 'sparsemax'"):
        command.run("sparsemx", out=tmp_path / "rows.csv")


def test_a_mistake_in_the_options_is_told_in_a_sentence(tmp_path):
    with pytest.raises(RunError) as error:
        training.run(compile="half", out=tmp_path / "training.csv")
    assert "compile = 'half' is unknown" in str(error.value)


def test_every_mixer_of_the_benchmark_on_a_cpu_has_its_layers():
    configs = [mixers.configure(variant) for variant in mixers.VARIANTS]
    assert {config.model.layers for config in configs} == {mixers.LAYERS}
    assert len({config.model for config in configs}) == len(mixers.VARIANTS) == 8
