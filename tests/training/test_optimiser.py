"""The decay rule and the learning rate of each step."""

from __future__ import annotations

import math

import pytest
import torch
import training_stand_in
from torch import nn

from compactattn.training.config import TrainingConfig
from compactattn.training.optimiser import build_optimiser, rate_at, set_rate


def test_only_tensors_of_two_or_more_dimensions_decay():
    model = training_stand_in.Tiny()
    model.scalar = nn.Parameter(torch.ones(()))
    optimiser = build_optimiser(model, TrainingConfig(steps=10, batch=1, decay=0.5, rate=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()  # with no gradient, all that moves is what decays
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim >= 2 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


def test_frozen_parameters_are_left_out():
    model = training_stand_in.Tiny()
    model.embedding.requires_grad_(False)
    held = [p for group in build_optimiser(model, TrainingConfig(5, 1)).param_groups for p in group["params"]]
    assert all(parameter is not model.embedding.weight for parameter in held)
    assert len(held) == len(list(model.parameters())) - 1
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimiser(model, TrainingConfig(5, 1))


def test_the_rate_meets_its_exact_points():
    config = TrainingConfig(steps=110, batch=1, warmup=10, rate=1e-3, final_rate=5e-5)
    assert rate_at(1, config) == 1e-4
    assert rate_at(5, config) == 5e-4
    assert rate_at(10, config) == 1e-3
    assert math.isclose(rate_at(60, config), (1e-3 + 5e-5) / 2, rel_tol=1e-15)
    assert rate_at(110, config) == 5e-5
    falling = [rate_at(step, config) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


def test_one_step_without_warm_up_is_the_last_step():
    assert rate_at(1, TrainingConfig(steps=1, batch=1)) == 5e-5


def test_every_group_gets_the_rate():
    optimiser = build_optimiser(training_stand_in.Tiny(), TrainingConfig(5, 1))
    set_rate(optimiser, 0.25)
    assert [group["lr"] for group in optimiser.param_groups] == [0.25, 0.25]


def test_the_cosine_ends_at_its_horizon_and_the_rate_stays():
    config = TrainingConfig(steps=200, batch=1, warmup=10, rate=1e-3, final_rate=5e-5, horizon=110)
    assert math.isclose(rate_at(60, config), (1e-3 + 5e-5) / 2, rel_tol=1e-15)
    assert rate_at(110, config) == rate_at(111, config) == rate_at(200, config) == 5e-5
    reverse = TrainingConfig(steps=117_187, batch=1, warmup=40_000, horizon=156_250)  # a horizon that is never reached
    assert rate_at(117_187, reverse) == pytest.approx(2.9e-4, rel=0.01)


class StateSpace(nn.Module):
    SSM = ("pole",)

    def __init__(self):
        super().__init__()
        self.pole, self.readout = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


def settings(**changes):
    """Weight decay and rate of each parameter of a model with an embedding and a state space, after `set_rate`."""
    model = training_stand_in.Tiny()
    model.EMBEDDING, model.ssm = ("embedding.weight",), StateSpace()
    optimiser = build_optimiser(model, TrainingConfig(5, 1, decay=0.5, **changes))
    set_rate(optimiser, 0.01)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimiser.param_groups
    return {names[p]: (group["weight_decay"], group["lr"]) for group in groups for p in group["params"]}


def test_all_parameters_decay_where_the_recipe_says_so():
    assert {decay for decay, _ in settings(decay_all=True).values()} == {0.5}
    assert settings()["norm.bias"] == (0.0, 0.01)


def test_the_embedding_has_a_rate_of_its_own():
    found = settings(embedding_rate=4.0)
    assert found.pop("embedding.weight") == (0.125, 0.04)  # AdamW shrinks by their product, which stays
    assert {rate for _, rate in found.values()} == {0.01}


def test_state_space_parameters_learn_at_a_bounded_rate_and_do_not_decay():
    found = settings(rate=0.01, ssm_rate=1e-3, decay_all=True)
    assert found.pop("ssm.pole") == (0.0, pytest.approx(1e-3))
    assert set(found.values()) == {(0.5, 0.01)}
    assert settings(rate=5e-4, ssm_rate=1e-3, decay_all=True)["ssm.pole"] == (0.0, 0.01)  # the bound is above the rate


def test_no_parameter_is_in_two_groups_or_in_none():
    assert len(settings(rate=0.01, ssm_rate=1e-3, embedding_rate=2.0)) == len(list(training_stand_in.Tiny().parameters())) + 2
