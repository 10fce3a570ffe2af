import json
from dataclasses import asdict, replace

import pytest
import torch

from compactattn.experiments import in_context
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.experiments.sweep import Job, finish
from compactattn.models.language_model import build, count_parameters
from compactattn.training.checks import is_trained
from compactattn.training.config import RunConfig, RunError, vary
from compactattn.training.records import read_metrics

LANGUAGES = {"states": [4, 5], "letters": [4, 6], "strings": [3, 4], "string_length": [1, 6]}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def tiny(model="mosaic", **training):
    config = replace(in_context.cpu_quick(model, 64), data={"examples": 64, "changes": LANGUAGES})
    model = {"layers": 1, "width": 16, "heads": min(2, config.model.heads), "slots": 8, "vocab": 8}
    small = {"steps": 6, "batch": 16, "warmup": 1, "validate_every": 2, "checkpoint_every": 4, "device": "cpu", **training}
    return vary(config, model=model, training=small)


@pytest.mark.parametrize("model", list(in_context.RECIPES))
@pytest.mark.parametrize("preset", list(in_context.PRESETS))
def test_a_preset_is_a_complete_config_that_survives_being_written_down(preset, model):
    config = in_context.PRESETS[preset](model, 1000)
    assert RunConfig.from_json(config.to_json()) == config
    assert in_context.Data.of(config).make_languages().vocab == config.model.vocab


def test_the_paper_preset_is_the_published_recipe():
    mosaic = in_context.paper("mosaic", 2500)
    model, training = mosaic.model, mosaic.training
    assert (model.vocab, model.layers, model.width, model.heads, model.slots_per_head) == (20, 2, 128, 8, 448)
    assert (model.dropout, model.attention_dropout, model.persistent_dropout, model.embedding_dropout) == (0.05, 0.05, 0.05, 0)
    assert model.start == "published"
    assert (training.batch, training.betas, training.clip) == (32, (0.9, 0.999), 1.0)
    assert in_context.epoch_of(mosaic, training.steps) == 200
    assert training.warmup == training.steps // 10
    assert in_context.epoch_of(mosaic, training.validate_every) == pytest.approx(1, abs=0.01)


def test_the_baselines_are_the_benchmarks():
    expected = {  # layers, heads, form, dropout of attention and of the embedding, rate of state-space parameters
        "transformer": (8, 2, "own", 0.1, 0.1, 0.0),
        "retnet": (2, 8, "benchmark", 0.0, 0.1, 0.0),
        "gla": (4, 1, "benchmark", 0.0, 0.1, 0.0),
        "h3": (2, 1, "benchmark", 0.0, 0.1, 1e-3),
        "s4d": (2, 1, "benchmark", 0.0, 0.1, 1e-3),
        "mamba": (1, 1, "benchmark", 0.0, 0.0, 0.0),
    }
    for name, values in expected.items():
        model, training = in_context.paper(name, 2500).model, in_context.paper(name, 2500).training
        found = (model.layers, model.heads, model.form, model.attention_dropout, model.embedding_dropout, training.ssm_rate)
        assert found == values, name
        assert (model.width, model.dropout, training.clip, training.decay_all) == (128, 0, 0, True)
    assert in_context.paper("mamba", 1000).model.start == "unit"
    assert in_context.paper("transformer", 1000).model.positions == "learned"


def test_two_recipes_have_names():
    for name, rate, decay in (("benchmark", 5e-4, 0.1), ("repository", 1e-4, 0.01)):
        training = in_context.choose_rates(in_context.paper("mosaic", 1000), name).training
        assert (training.rate, training.final_rate, training.decay) == (rate, rate / 10, decay)
    assert in_context.choose_rates(in_context.paper("gla", 1000), "benchmark") == in_context.paper("gla", 1000)


@pytest.mark.parametrize("model", in_context.OWN)
def test_our_own_form_of_a_baseline_is_what_it_was(model):
    config = in_context.paper(model, 1000, "own")
    layers, heads = {"retnet": (2, 4), "gla": (4, 1), "mamba": (4, 1)}.get(model, (2, 1))
    assert (config.model.form, config.model.layers, config.model.heads) == ("own", layers, heads)
    training = config.training
    assert (training.clip, training.ssm_rate, training.decay_all, config.model.embedding_dropout) == (1.0, 0.0, False, 0.1)
    assert in_context.match(in_context.paper(model, 1000)).training == training
    assert in_context.paper(model, 1000, "benchmark") == in_context.paper(model, 1000) != config


def test_a_form_is_for_recurrent_models():
    with pytest.raises(ValueError, match="form 'benchmark' is for retnet, gla, h3, s4d, mamba; a mosaic has one form only"):
        in_context.paper("mosaic", 1000, "benchmark")


@pytest.mark.parametrize(("preset", "epochs", "patience"), [("paper", 200, 40), ("gpu-short", 100, 15), ("cpu-quick", 20, 0)])
def test_each_preset_has_its_epochs_and_its_patience(preset, epochs, patience):
    for model in in_context.RECIPES:
        config = in_context.PRESETS[preset](model, 2500)
        assert in_context.epoch_of(config, config.training.steps) == pytest.approx(epochs, abs=0.02)
        assert config.training.patience == patience


def test_the_best_epoch_is_the_one_that_is_tested(tmp_path):
    config = tiny()
    summary = in_context.run(config, tmp_path / "run", show_progress=False)
    validated = {line["step"]: line["validation"] for line in read_metrics(tmp_path / "run") if "validation" in line}
    assert list(validated) == [2, 4, 6]
    assert summary.best_step == min(validated, key=lambda step: validated[step]["loss"])
    found = in_context.evaluate_run(tmp_path / "run", "validation", "cpu")
    assert found.loss == pytest.approx(validated[summary.best_step]["loss"], rel=1e-6)
    in_context.evaluate_run(tmp_path / "run", "test", "cpu")
    rows = {row["split"]: row for row in read_evaluation(tmp_path / "run")}
    assert rows.keys() == {"test", "validation"}
    assert (rows["test"]["examples"], rows["test"]["step"], rows["test"]["samples"]) == (64, summary.best_step, 500)
    assert rows["test"]["epoch"] == round(summary.best_step * 16 / 64)
    assert [reference["accuracy"] > 0.5 for reference in rows["test"]["references"]] == [True] * 3


def test_a_run_that_stopped_early_is_finished(tmp_path):
    config = tiny(rate=1e-12, final_rate=1e-12, warmup=0, patience=1, steps=40)  # so little that no validation differs
    job = Job(config, tmp_path / "run", 0, "cpu")
    finish(job)
    assert open_run(job.folder, "cpu").step < 40
    assert is_trained(job.folder, config)
    written = (job.folder / "evaluation.jsonl").stat().st_mtime_ns
    finish(job)  # changes nothing
    assert (job.folder / "evaluation.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize("model", [name for name in in_context.RECIPES if name != "mosaic"])
def test_every_baseline_trains(model, tmp_path):
    config = tiny(model, steps=2, validate_every=2)
    if model == "transformer":
        config = vary(config, model={"longest": 64})
    summary = in_context.run(config, tmp_path / "run", show_progress=False)
    assert summary.best_step == 2
    first = build(config.model, config.seed)
    moved = [name for name, w in open_run(tmp_path / "run", "cpu").model.named_parameters()
             if not torch.equal(w, dict(first.named_parameters())[name])]  # fmt: skip
    assert len(moved) == len(list(first.parameters()))


@pytest.mark.parametrize("preset", ["paper", "cpu-quick"])
def test_models_that_match_have_about_the_parameters_of_a_mosaic_and_keep_their_recipe(preset):
    own = {model: in_context.PRESETS[preset](model, 1000) for model in in_context.RECIPES}
    matched = {model: in_context.match(config) for model, config in own.items()}
    with torch.device("meta"):
        counts = {model: count_parameters(build(config.model)) for model, config in matched.items()}
    assert counts == pytest.approx(dict.fromkeys(counts, counts["mosaic"]), rel=0.04)
    ours = in_context.PRESETS[preset]("gla", 1000, "own")
    sizes = {name: getattr(ours.model, name) for name in ("layers", "width", "heads", "inner")}
    assert vary(matched["gla"], model=sizes) == ours
    assert (matched["mosaic"] == own["mosaic"]) == (preset == "paper")  # whose mosaic is what the others match


def test_the_search_space_is_the_papers_and_a_recipe_is_reused(tmp_path):
    points = list(in_context.list_grid(in_context.paper("mosaic", 1000)))
    assert len({point.to_json() for point in points}) == len(points) == 2 * 3 * 3 * 4
    chosen = points[17]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(in_context.write_recipe(chosen)))
    other = vary(in_context.paper("mosaic", 5000), model={"kernel": "sparsemax"})
    applied = in_context.apply_recipe(other, path)
    for name in ("layers", "width", "heads"):
        assert asdict(applied.model)[name] == asdict(chosen.model)[name]
    assert (applied.training.decay, applied.model.kernel) == (chosen.training.decay, "sparsemax")
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no recipe"):
        in_context.apply_recipe(other, path)


@pytest.mark.parametrize(
    "change",
    [{"decay": "x"}, {"decay": None}, {"decay": True}, {"layers": "two"}, {"layers": 2.5}, {"layers": None}, {"width": [64]},
     {"heads": True}, {"heads": "4"}],
    ids=str,
)  # fmt: skip
def test_a_recipe_with_values_of_another_type_is_no_recipe(change, tmp_path):
    config, path = in_context.paper("mosaic", 1000), tmp_path / "recipe.json"
    path.write_text(json.dumps(in_context.write_recipe(config) | change))
    with pytest.raises(ValueError, match="is no recipe; a recipe has decay, layers, width, heads"):
        in_context.apply_recipe(config, path)


def test_letters_that_follow_are_judged_by_the_language():
    config = in_context.paper("mosaic", 64)
    for number in (0, 7):
        start = in_context.begin(config, "", number)
        test = in_context.Data.of(config).open().test
        rest = test.tokens[number, len(start.tokens) : test.lengths[number]].tolist()
        assert start.judge(rest) == [True] * len(rest)
        wrong = next(letter for letter in range(18) if start.edges[start.state, letter] < 0)
        assert start.judge([wrong, *rest]) == [False]
        own = int((start.edges[0] >= 0).argmax())  # a letter with which a string may start
        assert start.judge([18, own, 18, 18, own]) == [True, True, True, False]  # a string has a letter at least
        after = start._replace(tokens=[*start.tokens, 18], state=0)
        assert (after.judge([18, own]), after.judge([own, 18])) == ([False], [True, True])
    typed = in_context.begin(config, "ab|ba", 0)
    assert (typed.tokens, typed.judge([1, 2])) == ([0, 1, 18, 1, 0], [])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"examples": 64}, "data.changes is missing"),
        ({"examples": "64", "changes": {}}, "data.examples = '64' must be of type int"),
        ({"examples": 64, "changes": {"colour": 3}}, "colour"),
        ({"examples": 64, "changes": {"edges": [1, 9]}}, "9 edges of a state"),
        ({"examples": 64, "changes": {"states": [3, 3], "letters": [2, 2], "edges": [2, 2]}}, "unique|different|distinct"),
    ],
)
def test_impossible_data_is_named(data, words):
    with pytest.raises(ValueError, match=words):
        in_context.Data.of(replace(tiny(), data=data)).open()


def test_a_model_that_is_not_known_or_too_few_examples_are_refused():
    with pytest.raises(ValueError, match="model 'lstm' is unknown; choose one of mosaic, transformer"):
        in_context.paper("lstm", 1000)
    with pytest.raises(ValueError, match="examples = 3 do not fill a batch of 32"):
        in_context.paper("gla", 3)


def test_a_damaged_cache_is_told_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPACTATTN_CACHE", str(tmp_path / "cache"))
    in_context.run(tiny(), tmp_path / "run", show_progress=False)
    (cache,) = (tmp_path / "cache").glob("**/*.cache")
    cache.write_bytes(cache.read_bytes()[:-1])
    with pytest.raises(RunError, match="cache"):
        in_context.evaluate_run(tmp_path / "run", device="cpu")
