"""Configs: what they refuse, what they say, and that they survive being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import training_stand_in

from compactattn.models.config import ModelConfig
from compactattn.training.config import RunConfig, TrainingConfig, differences


def make(**data):
    return replace(training_stand_in.config(), data=data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps = 0 must be"),
        ({"steps": 2.5}, "steps = 2.5 must be a whole number"),
        ({"batch": -1}, "batch = -1 must be"),
        ({"rate": float("nan")}, "rate = nan must be"),
        ({"rate": 0.0, "final_rate": 0.0}, "choose a positive rate"),
        ({"final_rate": 1.0}, "lower final_rate"),
        ({"warmup": 10}, "choose fewer than 10"),
        ({"betas": (0.9, 1.0)}, "betas = (0.9, 1.0)"),
        ({"precision": "fp16"}, "'fp32', 'bf16'"),
        ({"accumulation": 3}, "choose a multiple of 3"),
        ({"device": "tpu"}, "device = 'tpu' is unknown"),
    ],
)
def test_a_wrong_setting_is_refused_in_words_that_help(change, words):
    with pytest.raises(ValueError) as caught:
        TrainingConfig(**{"steps": 10, "batch": 8, **change})
    assert words in str(caught.value)
    assert next(iter(change)) in str(caught.value)


def test_a_config_equals_itself_read_back():
    config = make(task="sort", lengths=(32, 64), nested={"density": 0.8, "none": None})
    assert RunConfig.from_json(config.to_json()) == config
    assert config.data["lengths"] == [32, 64]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("training.steps", "many", 'training.steps = "many" must be a whole number'),
        ("training.steps", True, "training.steps = true must be a whole number"),
        ("training.compile", "some", 'training.compile = "some" is unknown; choose one of "none", "parts", "whole"'),
        ("training.betas", [0.9], "training.betas = [0.9] must be a list of 2 values"),
        ("training.betas", [0.9, "x"], 'training.betas[1] = "x" must be a number'),
        ("training.precision", "fp8", 'training.precision = "fp8" is unknown; choose one of "fp32", "bf16"'),
        ("training.stepz", 3, "training.stepz is unknown"),
        ("training", 3, "training must be a dictionary of fields, not 3"),
        ("training.steps", 0, "training: steps = 0 must be"),
        ("model.heads", 3, "model: width 8 does not divide into 3 heads"),
        ("model.kernel", None, "model.kernel = null must be text in quotes"),
        ("seed", -1, "seed = -1 must be at least 0"),
        ("colour", "red", "colour is unknown"),
        ("data", [], "data = [] must be a dictionary"),
    ],
)
def test_reading_names_the_field_that_is_wrong(path, value, words):
    values = json.loads(make().to_json())
    *outer, name = path.split(".")
    inner = values
    for key in outer:
        inner = inner[key]
    inner[name] = value
    with pytest.raises(ValueError) as caught:
        RunConfig.from_json(json.dumps(values))
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["training", "training.steps", "model.vocab", "seed"])
def test_reading_names_the_field_that_is_missing(path):
    values = json.loads(make().to_json())
    *outer, name = path.split(".")
    del (values[outer[0]] if outer else values)[name]
    with pytest.raises(ValueError, match=f"{path} is missing"):
        RunConfig.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"run"'])
def test_what_is_no_config_is_refused(text):
    with pytest.raises(ValueError, match=r"not JSON|must be a dictionary"):
        RunConfig.from_json(text)


def test_a_field_with_a_default_may_be_left_out():
    assert RunConfig.from_json(
        '{"experiment": "e", "seed": 1, "model": {"vocab": 9, "start": "published"},'
        ' "training": {"steps": 5, "batch": 2, "rate": 1}}'
    ) == RunConfig("e", 1, ModelConfig(9), TrainingConfig(5, 2, rate=1.0))


def test_data_that_json_cannot_hold_is_refused():
    for bad in (float("nan"), {1, 2}):
        with pytest.raises(ValueError, match="data holds something JSON cannot"):
            make(bad=bad)


def test_differences_name_every_field_that_changed_with_both_values():
    old = make(task="sort", nested={"density": 0.8})
    new = replace(old, seed=4, training=replace(old.training, rate=0.02, device="auto"), data={"task": "sort", "more": 1})
    assert differences(old, new, ignore=("training.device",)) == [
        "seed: 3 → 4",
        "training.rate: 0.01 → 0.02",
        "data.nested.density: 0.8 → absent",
        "data.more: absent → 1",
    ]
    assert differences(old, old) == []
