"""Bugs planted into the text of the fused kernels, one line at a time: a small battery of cases catches every one.

The kernels are copied, one text is replaced, and everything runs on the copy. A plant whose old text is gone is stale and
fails, as does one that raises: a wrong number must be noticed, not a crash.
"""

import importlib
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from plants import PLANTS, Plant

from compactattn import ALiBi, Allowed, Bias, Causal, Packed, Padding, attend, attention, decoding, entmax, fused, operators
from compactattn.decoding import Pages, decode
from compactattn.fused import launch
from compactattn.fused.cut import Blocks, Cut
from compactattn.memory.features import leaky_average, peek_values, unit
from compactattn.memory.operators import fused_keys, fused_values
from compactattn.mixers import selective_scan
from compactattn.models import head

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of log2(0) and inf − inf

SOURCE = Path(launch.__file__).parent
OWN = launch.__package__


class Case(NamedTuple):
    inputs: dict[str, torch.Tensor]
    call: Callable[[dict[str, torch.Tensor], bool], dict[str, torch.Tensor]]  # by the kernels, or by their definition
    gradients: bool = True


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attending(
    kernel, mask, queries=40, keys=40, batch=1, heads=(1, 1), dims=(5, 7), sharp=1.0, tied=False, dtype=torch.float32,
    bias=None, alpha=None, dropout=0.0, spoilt=None, crowded=False,
):  # fmt: skip
    """attend with its readout. `tied` scores are whole numbers, which tie and lie on edges. Bias and alpha are learned.

    Keys from `spoilt` on, which no query may see, are no numbers. `crowded`: the best keys are all of one class.
    """
    (h, hk), (d, dv) = heads, dims
    shapes = (batch, h, queries, d), (batch, hk, keys, d), (batch, hk, keys, dv)
    q, k, v = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    if tied:
        q, k = ((1.2 * x).round().clamp(-2, 2) for x in (q, k))
    if crowded:
        q[..., 0] = k[:, :, ::16, 0] = 4.0
    if spoilt is not None:
        k[:, :, spoilt:] = v[:, :, spoilt:] = torch.nan
    if isinstance(mask, Allowed):
        v[:, :, 4] = torch.nan  # a key that is hidden from all may hold anything
    scale = torch.ones(h) if tied else sharp * torch.linspace(0.5, 1.3, h)

    def call(x, by_kernels):
        torch.manual_seed(0)  # the same weights are dropped each time
        out, readout = attend(
            x["q"], x["k"], x["v"], entmax(x["alpha"]) if alpha is not None else kernel, scale=x["scale"],
            mask=(mask & Bias(x["bias"]) if mask else Bias(x["bias"])) if bias is not None else mask, return_readout=True,
            dropout=dropout, backend="fused" if by_kernels else "reference",
        )  # fmt: skip
        found = {"out": out, "support": readout.support}
        return found if dtype == torch.float16 else found | {"threshold": readout.threshold}

    learned = {name: x for name, x in (("bias", bias), ("alpha", alpha)) if x is not None}
    return Case({"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "scale": scale} | learned, call)


def hiding(*shape):
    """A bias that hides every fifth key or so, and all keys from the fourth query."""
    bias = normal(*shape, seed=5)
    bias = bias.masked_fill(normal(*shape, seed=6) > 0.8, -torch.inf)
    bias[..., 3, :] = -torch.inf
    return bias


def decoding_from(kernel, mask, keys, lengths=None, added=None):
    """decode of two heads that share their keys; with `added`, from pages that know so many of them."""
    q, k, v = normal(1, 2, 2, 16), normal(1, 1, keys, 16, seed=1), normal(1, 1, keys, 7, seed=2)
    k += (
        2 * normal(1, 1, -(-keys // 64), 16, seed=3).repeat_interleave(64, 2)[:, :, :keys]
    )  # a page lies around a point of its own
    k[:, :, -64:], k[:, :, -1] = -q[:, :1, :1], 2 * q[:, 0, :1]  # and the last key is better than its page

    def call(x, by_kernels):
        given = {"scale": x["scale"], "lengths": lengths, "mask": mask}
        if not by_kernels:
            return {"out": decode(x["q"], x["k"], x["v"], kernel, backend="reference", **given)}
        pages = None if added is None else Pages.of(x["k"], [added])
        out = decode(x["q"], x["k"], x["v"], kernel, backend="fused", pages=pages, **given)
        return {"out": out if pages is None else out[0]}

    return Case({"q": q, "k": k, "v": v, "scale": torch.tensor([0.2, 0.4])}, call, gradients=False)


def making_keys(x, by_kernels):
    if by_kernels:
        keys, _, last = fused_keys(x["x"], x["leak"], x["state"])
    else:
        y = leaky_average(torch.cat((x["state"][:, :, None], x["x"]), 2), x["leak"])[:, :, 1:]
        keys, last = unit(y), y[:, :, -1]
    return {"keys": keys, "last": last}


def making_values(x, by_kernels):
    return {"values": (fused_values if by_kernels else peek_values)(x["x"], x["mix"], x["gain"])}


def losing(x, by_kernels):
    targets, counted = torch.tensor([4500, 7, 2]), torch.tensor([True, True, False])
    with pytest.MonkeyPatch.context() as change:
        change.setattr(head, "fused", lambda hidden: by_kernels)
        return {"loss": head.head_loss(x["hidden"], x["weight"], targets, counted, 0.3)}


def scanning(x, by_kernels):
    with pytest.MonkeyPatch.context() as change:
        change.setattr(selective_scan, "fused", lambda *_: by_kernels)
        inputs = [x.requires_grad_() for x in x.values()]
        found = dict(zip(("y", "last"), selective_scan.selective_scan(*inputs), strict=True))
        slopes = [normal(*x.shape, seed=9).to(x.dtype) for x in found.values()]
        gradients = torch.autograd.grad(list(found.values()), inputs, slopes)
    return found | {f"d{name}": x for name, x in zip(x, gradients, strict=True)}


ROWS = {"x": normal(1, 2, 40, 5), "leak": torch.tensor([0.05, 1.3]), "state": normal(1, 2, 5, seed=1)}
BATTERY = {
    "biweight": attending("biweight", Causal(1)),
    "soft biweight": attending("biweight", None, 3, 60, sharp=0.3, dtype=torch.float16),
    "soft triweight": attending("triweight", None, 3, 200, sharp=0.1, dtype=torch.float16),
    "grouped biweight": attending("biweight", Causal(), 20, 20, heads=(4, 2)),
    "half biweight": attending("biweight", Causal(), dtype=torch.float16),
    "copied biweight": attending("biweight", Causal(), batch=2, heads=(4, 2), dims=(16, 8), sharp=0.3, dtype=torch.float16),
    "half softmax": attending("gaussian", Causal(), heads=(4, 2), sharp=0.3, dtype=torch.float16),
    "vanishing softmax": attending("truncated_gaussian(60)", None, 20, 20, sharp=20.0, dtype=torch.float16),
    "half sparsemax": attending("epanechnikov", Causal() & Padding([30], queries=[27]), dtype=torch.float16, spoilt=30),
    "skipping biweight": attending("biweight", None, 2, 100, sharp=1.5),
    "skipping grouped biweight": attending("biweight", None, 2, 100, heads=(2, 1), sharp=3.0),
    "skipping causal biweight": attending("biweight", Causal(), 2, 98, sharp=1.5),
    "skipping relumax": attending("relumax(r=1, b=1)", None, 2, 78),
    "skipping causal relumax": attending("relumax(r=1, b=1)", Causal(), 2, 98),
    "relumax with ALiBi": attending("relumax(r=2, b=2)", Causal(1) & ALiBi(), 18, 35),
    "half relumax": attending("relumax(r=2, b=2)", Causal(), 20, 20, heads=(4, 2), sharp=0.7, dtype=torch.float16),
    "tied relumax": attending("relumax(r=1, b=2)", Causal(), 20, 20, tied=True),
    "rectified": attending("rectified(r=1, b=0.1)", Causal() & Padding([9, 40], queries=[12, 40]), batch=2),
    "rectified(r=1.5)": attending("rectified(r=1.5, b=0.1)", Packed([4] * 10)),
    "padded sparsemax": attending("epanechnikov", Padding([20], queries=[9]), 20, 20),
    "triweight": attending("triweight", Packed([23, 17]) & ALiBi()),
    "entmax(1.7)": attending("entmax(1.7)", Causal(-2), 17, 20),
    "gaussian": attending("gaussian", Causal(-1)),
    "topk": attending("topk_epanechnikov(20)", Causal(), 20, 60, tied=True),
    "crowded topk": attending("topk_softmax(14)", None, 3, 320, crowded=True),
    "topk_softmax": attending("topk_softmax(5)", None, 18, 20, tied=True),
    "half topk": attending("topk_softmax(5)", Causal(), 20, 20, dtype=torch.float16),
    "biased biweight": attending("biweight", Causal(), 20, 20, heads=(2, 1), bias=hiding(1, 2, 20, 20)),
    "biased relumax": attending("relumax(r=2, b=2)", None, 20, 20, bias=hiding(1, 1, 20, 20)),
    "biased rectified": attending("rectified(r=1, b=0.1)", None, 20, 20, bias=hiding(1, 1, 20, 20)),
    "shared bias": attending("biweight", Causal(), batch=2, heads=(2, 1), bias=normal(1, 1, 1, 40, seed=5)),
    "allowed biweight": attending("biweight", Allowed((normal(20, 20, seed=7) > 0) & (torch.arange(20) != 4)), 20, 20),
    "allowed topk": attending("topk_softmax(9)", Allowed((normal(20, 20, seed=7) > 1) & (torch.arange(20) != 4)), 20, 20),
    "dropped biweight": attending("biweight", Causal(), 20, 20, heads=(2, 1), dropout=0.4),
    "half dropped biweight": attending("biweight", Causal(), 20, 20, dtype=torch.float16, dropout=0.4),
    "thinned bias": attending("relumax(r=2, b=2)", None, 20, 20, bias=hiding(1, 1, 20, 20), dropout=0.4),
    "alpha": attending(None, Causal(), heads=(2, 1), alpha=torch.tensor([1.2, 1.6])),
    "decode": decoding_from("biweight", ALiBi(), 200, [170]),
    "paged decode": decoding_from("triweight", None, 34 * 64, added=34 * 64 - 40),
    "softmax decode": decoding_from("gaussian", ALiBi(), 34 * 64, [34 * 64 - 9]),
    "fixed decode": decoding_from("rectified(r=2, b=1)", ALiBi(), 34 * 64, [34 * 64 - 9]),
    "paged fixed decode": decoding_from("rectified(r=1, b=0.1)", None, 36 * 64, added=36 * 64),
    "window": decoding_from("topk_softmax(5)", Packed([70, 130], queries=[1, 1]), 200),
    "keys": Case(ROWS, making_keys),
    "values": Case({"x": ROWS["x"], "mix": torch.tensor([0.3, 0.8]), "gain": torch.tensor([0.5, 1.7])}, making_values),
    "scan": Case(
        {
            "u": normal(1, 14, 20),
            "step": normal(1, 14, 20, seed=1).exp(),
            "rates": -normal(3, 20, seed=2).exp(),
            "b": normal(1, 14, 3, seed=3),
            "c": normal(1, 14, 3, seed=4),
            "state": normal(1, 3, 20, seed=5),
        },
        scanning,
        gradients=False,
    ),
    "loss": Case({"hidden": normal(3, 8), "weight": normal(5000, 8, seed=1)}, losing),
}


def run(case, inputs, by_kernels):
    """{name: result or gradient} in float64."""
    inputs = {name: x.detach().clone().requires_grad_(case.gradients) for name, x in inputs.items()}
    found = case.call(inputs, by_kernels)
    if case.gradients:
        leaving = [x for x in found.values() if x.requires_grad]
        slopes = [normal(*x.shape, seed=9).half().to(x.dtype) for x in leaving]
        gradients = torch.autograd.grad(leaving, list(inputs.values()), slopes)
        found |= {f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}
    return {name: x.detach().double() for name, x in found.items()}


@cache
def prepare(name):
    """The exact results of a case, and what each may err: three times as much as plain PyTorch, and a few ulp."""
    case = BATTERY[name]
    exact = run(case, {name: x.double() for name, x in case.inputs.items()}, by_kernels=False)
    plain = run(case, case.inputs, by_kernels=False)
    first, x = next(iter(case.inputs.items()))
    eps, allowed = torch.finfo(x.dtype).eps, {}
    for key, want in exact.items():
        finite = want.isfinite()
        error, size = (plain[key] - want)[finite].norm(), want[finite].norm()
        if want.ndim <= 1:  # a sum over everything, in which plain PyTorch can be right by luck
            whole = exact[f"d{first}"]
            size = whole.norm() * x.double().norm()
            error = max(error, (plain[f"d{first}"] - whole).norm() / whole.norm() * size)
        allowed[key] = 3 * error + 4 * eps * size
    return exact, allowed


def find_fault(name):
    """The first result of a case that is wrong; empty if all are right."""
    exact, allowed = prepare(name)
    found = run(BATTERY[name], BATTERY[name].inputs, by_kernels=True)
    for key, want in exact.items():
        same = found[key] == want  # infinite thresholds
        if not (found[key] - want).masked_fill(same, 0.0).norm() <= allowed[key]:
            return f"{key} of {name}"
    return ""


def use_copy(folder, plant, monkeypatch):
    """Has everything use a copy of the fused kernels with the plant in it, in tiles as small as can be."""
    package = folder / f"planted_{abs(hash(folder.name))}"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        text = path.read_text()
        if plant is not None and plant.file == path.name:
            assert plant.old in text, f"the plant is stale: {plant.file} no longer holds {plant.old!r}"
            text = text.replace(plant.old, plant.new)
        path.write_text(re.sub(rf"\b{re.escape(OWN)}\b", package.name, text))
    monkeypatch.syspath_prepend(folder)
    names = ("launch", "decode_launch", "leaky", "cross_entropy", "selective_scan")
    copied = {name: importlib.import_module(f"{package.name}.{name}") for name in names}
    for owner, name in zip((operators, decoding, fused, fused, fused), names, strict=True):
        monkeypatch.setattr(owner, name, copied[name], raising=False)
    monkeypatch.setattr(attention, "launch", copied["launch"])
    cut = Cut(*[Blocks(32, 16, 4, 1)] * 4)
    monkeypatch.setattr(copied["launch"], "choose_cut", lambda *_: cut)
    monkeypatch.setattr(copied["launch"], "TRACK_FROM", 64)
    tolerances = copied["launch"].TOLERANCES  # in fp16 nearly as in bf16, which the interpreter lacks
    monkeypatch.setitem(tolerances, torch.float16, tolerances[torch.float16] | {False: (2.0**-8, 2.0**-7)})
    monkeypatch.setattr(copied["decode_launch"], "SCORES_AT_ONCE", 128)
    monkeypatch.setattr(copied["decode_launch"], "PAGES_AT_ONCE", 16)


@pytest.fixture(autouse=True)
def _forget_copies():
    yield
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]


def test_the_battery_finds_nothing_in_the_kernels_as_they_are(tmp_path, monkeypatch):
    use_copy(tmp_path, None, monkeypatch)
    assert not [fault for name in BATTERY if (fault := find_fault(name))]


@pytest.mark.parametrize("name", PLANTS)
def test_the_battery_catches(name, tmp_path, monkeypatch):
    use_copy(tmp_path, PLANTS[name], monkeypatch)
    if not any(find_fault(case) for case in sorted(BATTERY, key=lambda case: not case.startswith(PLANTS[name].case))):
        pytest.fail(f"no case of the battery noticed that {name}")


def test_a_stale_plant_says_so(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=r"the plant is stale: tiles\.py no longer holds 'gone'"):
        use_copy(tmp_path, Plant("tiles.py", "gone", ""), monkeypatch)


def test_there_are_enough_plants():
    assert len(PLANTS) >= 30
    kernels = {
        "threshold",
        "tiles",
        "profiles",
        "weights",
        "forward",
        "backward",
        "backward_bias",
        "drops",
        "lists",
        "leaky",
        "cross_entropy",
        "selective_scan",
        "decode",
        "decode_threshold",
    }
    assert {plant.file.removesuffix(".py") for plant in PLANTS.values()} >= kernels
