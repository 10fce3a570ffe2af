import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from compactattn.data.frozen import CHECKSUMS
from compactattn.data.recall import Recall
from compactattn.data.sequences import TASKS
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.length_generalisation import evaluate_run
from compactattn.experiments.runs import open_run
from compactattn.models.language_model import build
from compactattn.training.config import RunConfig, RunError, vary


def tiny(task="mqmtar", **training):
    config = length_gen.cpu_quick(task)
    model = {"layers": 1, "width": 16, "heads": 2, "slots": 8}
    return vary(config, model=model, training={"steps": 4, "batch": 8, "warmup": 1, "device": "cpu", **training})


@pytest.mark.parametrize("task", ["mqmtar", "sort", "reverse", "copy"])
@pytest.mark.parametrize("preset", list(length_gen.PRESETS))
def test_a_preset_is_a_complete_config_that_survives_being_written_down(preset, task):
    config = length_gen.PRESETS[preset](task)
    assert RunConfig.from_json(config.to_json()) == config
    assert length_gen.open_stream(config).vocab == config.model.vocab


def test_the_paper_preset_is_the_published_recipe():
    for task, layers, examples in (("mqmtar", 4, 50e6), ("reverse", 4, 30e6), ("sort", 2, 40e6)):
        config = length_gen.paper(task)
        model, training = config.model, config.training
        assert (model.layers, model.width, model.heads, training.batch) == (layers, 512, 8, 256)
        assert training.steps * training.batch == pytest.approx(examples, rel=1e-5)
        assert (training.rate, training.final_rate, training.warmup, training.decay) == (1e-3, 5e-5, 40_000, 0.1)
        assert (training.betas, training.horizon, model.slots_per_head, model.start) == (
            (0.9, 0.95),
            156_250,
            2688,
            "published",
        )
        assert (model.attention_dropout, model.persistent_dropout, model.dropout) == (0.0, 0.05, 0.05)
        assert config.data.get("layout") == ("published" if task == "mqmtar" else None)
        assert (config.data["shortest"], config.data["longest"], config.data["changes"]) == (32, 64, {})
    assert list(length_gen.default_lengths(length_gen.paper("mqmtar"))) == [64 * 2**i for i in range(7)]
    assert list(length_gen.default_lengths(length_gen.paper("reverse"))) == [64, 96]
    assert list(length_gen.default_lengths(length_gen.paper("sort"))) == [64, 128, 256]


def test_a_variant_changes_only_what_it_names():
    base = length_gen.gpu_short("mqmtar")
    varied = vary(base, seed=3, model={"kernel": "biweight"})
    assert asdict(varied) == {**asdict(base), "seed": 3, "model": {**asdict(base.model), "kernel": "biweight"}}
    short = vary(length_gen.paper("sort"), training={"steps": 1000}).training
    assert (short.warmup, short.horizon) == (100, 0)  # the cosine ends with the run
    assert vary(length_gen.paper("sort"), seed=2, training={"rate": 2e-3}).training.horizon == 156_250


def test_a_run_trains_and_is_evaluated_where_it_was_told_to(tmp_path):
    config = tiny()
    summary = length_gen.run(config, tmp_path / "run", show_progress=False)
    assert summary.step == 4
    trained = open_run(tmp_path / "run", "cpu")
    assert trained.config == config
    assert trained.step == 4
    assert not torch.equal(trained.model.embedding.weight, build(config.model, config.seed).embedding.weight)
    found = evaluate_run(tmp_path / "run", [32, 64], samples=20, device="cpu")
    found += evaluate_run(tmp_path / "run", [32], mode="free-running", samples=10, device="cpu")
    evaluate_run(tmp_path / "run", [64], samples=30, device="cpu")  # takes the place of the older line
    evaluate_run(tmp_path / "run", [64], samples=5, device="cpu")  # a quick look does not
    rows = [json.loads(line) for line in (tmp_path / "run" / "evaluation.jsonl").read_text().splitlines()]
    assert [(row["mode"], row["length"], row["samples"], row["step"]) for row in rows] == [
        ("free-running", 32, 10, 4), ("teacher-forced", 32, 20, 4), ("teacher-forced", 64, 30, 4)
    ]  # fmt: skip


def test_an_impossible_test_is_told_in_one_sentence(tmp_path):
    length_gen.run(tiny(), tmp_path, show_progress=False)
    with pytest.raises(RunError) as error:
        evaluate_run(tmp_path, [2], device="cpu")
    assert "length" in str(error.value)
    with pytest.raises(RunError) as error:
        open_run(tmp_path / "nowhere")
    assert "holds no run" in str(error.value)


OLD = {"task": "mqmtar", "changes": {}, "shortest": 32, "longest": 64}  # the data of a config.json before layouts


def test_a_config_without_a_layout_gives_the_samples_of_older_runs():
    config = replace(length_gen.paper("mqmtar"), data=OLD)
    assert length_gen.open_test_set(config, 64).published == CHECKSUMS["mqmtar, shared words", 64, 1000]
    assert length_gen.open_stream(config).task == Recall(layout="shared")
    assert length_gen.Data("mqmtar", {}).layout == "shared"


def test_the_layout_of_a_config_is_that_of_its_training_validation_and_tests(tmp_path, monkeypatch):
    config = replace(tiny(), data=OLD | {"layout": "published"})
    assert length_gen.open_test_set(config, 64).published == CHECKSUMS["mqmtar", 64, 1000]
    assert length_gen.open_stream(config).task == Recall()
    seen = []

    def evaluate(model, test_set):
        seen.append(test_set.task)
        return SimpleNamespace(exact_match=0.0, token_accuracy=0.0)

    def train(config, model, stream, folder, *, validate, **_):
        seen.append(stream.task)
        validate(model)

    for name, stand_in in {"evaluate": evaluate, "train": train}.items():
        monkeypatch.setattr(length_gen, name, stand_in)
    length_gen.run(config, tmp_path)
    assert seen == [Recall(), Recall()]


def test_only_mqmtar_states_a_layout():
    older = {"task": "sort", "changes": {"symbols": 16}, "shortest": 16, "longest": 32}
    assert length_gen.Data("sort", {"symbols": 16}, 16, 32, "published").to_config() == older
    assert length_gen.Data("mqmtar", {}, layout="published").to_config() == OLD | {"layout": "published"}
    for layout in ("published", "shared"):
        assert length_gen.Data("sort", {}, layout=layout).make_task() == TASKS["sort"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"task": "mqmtar"}, "data.changes is missing"),
        ({"task": "sing", "changes": {}}, "'sing' is unknown"),
        ({"task": "sort", "changes": {"colour": 3}}, "no setting 'colour'"),
        ({"task": "sort", "changes": {}, "longest": "64"}, "data.longest"),
        ({"task": "sort", "changes": {}, "mood": 1}, "data.mood is unknown"),
        ({"task": "mqmtar", "changes": {}, "layout": "fresh"}, "layout = 'fresh' is unknown; choose published or shared"),
        ({"task": "sort", "changes": {}, "layout": "fresh"}, "layout = 'fresh' is unknown"),
        ({"task": "mqmtar", "changes": {}, "layout": 1}, "data.layout = 1 must be of type str"),
        ({"task": "mqmtar", "changes": {"layout": "shared"}}, "data.changes cannot hold a layout; write it as data.layout"),
    ],
)
def test_malformed_data_is_named(data, words):
    with pytest.raises(ValueError) as error:
        length_gen.open_stream(replace(tiny(), data=data))
    assert words in str(error.value)
