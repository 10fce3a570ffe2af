"""Mamba beside an independent implementation, where that is installed: the mixer of transformers."""

import pytest
import torch

from compactattn.mixers.mamba import EXPAND, TAPS, Mamba

published = pytest.importorskip("transformers.models.mamba.modeling_mamba")
WIDTH = 24


def copy(mixer):
    """Its mixer with our weights; where ours keeps states first and the newest tap first, it keeps them last."""
    config = published.MambaConfig(
        hidden_size=WIDTH, state_size=16, expand=EXPAND, conv_kernel=TAPS, num_hidden_layers=1, use_associative_scan=False
    )
    other = published.MambaMixer(config, layer_idx=0).double().eval()
    inner = EXPAND * WIDTH
    weights = {
        "in_proj.weight": mixer.to_inputs.weight,
        "conv1d.weight": mixer.taps.flip(1)[:, None],
        "conv1d.bias": mixer.taps_bias,
        "x_proj.weight": mixer.to_selection.weight,
        "dt_proj.weight": mixer.to_step.weight,
        "dt_proj.bias": mixer.step_bias,
        "A_log": mixer.log_rate.view(16, inner).mT,
        "D": mixer.skip,
        "out_proj.weight": mixer.to_output.weight,
    }
    other.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return other


@pytest.mark.parametrize("time", [1, 70])
def test_outputs_and_the_gradient_of_the_input_are_those_of_transformers(time):
    mixer = Mamba(WIDTH).double()
    with torch.no_grad():  # unlike at the start, where every channel has the same rates and all skips are 1
        for weight in (mixer.log_rate, mixer.skip):
            weight += torch.randn_like(weight) / 4
    x, slope = (torch.randn(2, time, WIDTH, dtype=torch.float64) for _ in range(2))
    found = []
    for model in (mixer, copy(mixer)):
        own = x.clone().requires_grad_()
        y = model(own)
        found.append((y.detach(), *torch.autograd.grad(y, own, slope)))
    torch.testing.assert_close(*found, rtol=0, atol=1e-7)  # measured: 6e-9 of 0.3, since parts of its scan are in fp32
