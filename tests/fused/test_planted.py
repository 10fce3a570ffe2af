"""Bugs planted into the text of the fused kernels, one line at a time: a small battery of cases catches every one.

The kernels are copied, one text is replaced, and `attend` runs on the copy. A plant whose old text is gone is stale and fails.
"""

import importlib
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from compactattn import ALiBi, Causal, Mask, Packed, Padding, attend, attention
from compactattn.fused import launch

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of log2(0) and inf − inf

SOURCE = Path(launch.__file__).parent
OWN = launch.__package__


class Plant(NamedTuple):
    file: str
    old: str
    new: str
    case: str = "biweight"  # which is tried first


LOOP = "for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):\n            o_n = start + tl.arange(0, BLOCK_N)\n"
SHORT = LOOP.replace("last, BLOCK_N):", "last - BLOCK_N, BLOCK_N):")
PLANTS = {
    "mask is off by one": Plant("tiles.py", "o_n[None, :] < b_hi[:, None]", "o_n[None, :] <= b_hi[:, None]"),
    "span lacks its last key": Plant(
        "tiles.py", "tl.max(tl.where(live, b_hi, 0), 0)", "tl.max(tl.where(live, b_hi, 0), 0) - 1"
    ),
    "ALiBi has the wrong sign": Plant("tiles.py", "s = s - slope *", "s = s + slope *", "relumax(r=2"),
    "ALiBi looks one way only": Plant(
        "tiles.py", "tl.abs(b_at[:, None] - o_n[None, :])", "(b_at[:, None] - o_n[None, :])", "triweight"
    ),
    "scores lack the scale": Plant("tiles.py", 'input_precision="ieee") * scale', 'input_precision="ieee")'),
    "padded head dims are read": Plant("tiles.py", "m_rows[:, None] & (o_d < D)[None, :], other", "m_rows[:, None], other"),
    "softmax in base two": Plant("profiles.py", "tl.exp2(x * LOG2E)", "tl.exp2(x)", "gaussian"),
    "wrong slope of the triweight": Plant("profiles.py", "return y * y * y, y * y", "return y * y * y, y", "triweight"),
    "a key at the edge has a slope": Plant("profiles.py", "outside = t <= 0.0", "outside = t < 0.0", "relumax(r=1"),
    "Newton stops early": Plant("threshold.py", "tl.abs(step) > 4 * EPS * reach", "tl.abs(step) > 0.01 * reach"),
    "Newton misses a tile": Plant("threshold.py", "mass += more\n", "mass = more\n"),
    "peak of the last tile only": Plant(
        "threshold.py", "peak = tl.maximum(peak, tl.max(", "peak = tl.maximum(-INF, tl.max(", "relumax(r=2"
    ),
    "one neighbour too few": Plant(
        "threshold.py", "tl.maximum(b_hi - b_lo, 0), nearest)", "tl.maximum(b_hi - b_lo, 0), nearest - 1)", "topk_epan"
    ),
    "the earlier key loses a tie": Plant("threshold.py", "tl.cumsum(tie, 1) <= left", "tl.cumsum(tie, 1) < left", "topk_epan"),
    "forward drops a tile": Plant("estimate.py", f"{LOOP}            s = load_score", f"{SHORT}            s = load_score"),
    "dq drops a tile": Plant(
        "estimate.py", "            acc = tl.dot(ds.to(b_k.dtype), b_k, acc,", "            acc = tl.dot(ds.to(b_k.dtype), b_k,"
    ),
    "dk drops a query": Plant("estimate.py", "tl.where(sees, o_m + 1, 0)", "tl.where(sees, o_m, 0)"),
    "last row is not written": Plant("estimate.py", "arange(0, BLOCK_M) < Q", "arange(0, BLOCK_M) < Q - 1"),
    "wrong head of the keys": Plant("estimate.py", "p_k += b * k_b + h // GROUP * k_h", "p_k += b * k_b + h % GROUP * k_h"),
    "wrong head of the values": Plant("estimate.py", "p_v += b * v_b + h // GROUP * v_h", "p_v += b * v_b"),
    "a group adds one head twice": Plant("estimate.py", "key_head * GROUP + member", "key_head * GROUP"),
    "every sample has the first one's length": Plant("estimate.py", "p_hi + b * hi_b", "p_hi", "rectified"),
    "an empty row divides by zero": Plant("estimate.py", "mass = tl.where(mass == 0.0, 1.0, mass)", "mass = mass + 0.0"),
    "nothing in reach weighs nothing": Plant("estimate.py", "tl.where(s == -INF, 0.0, s - s + 1.0)", "0.0 * s", "rectified"),
    "a tie at the edge is cut short": Plant(
        "estimate.py", "o_n[None, :] <= cut[:, None]", "o_n[None, :] < cut[:, None]", "topk_softmax"
    ),
    "gradient lacks its factor": Plant("estimate.py", "R / (safe * mass)", "1.0 / (safe * mass)"),
    "wrong centre where θ moves": Plant("estimate.py", "moved = RULE == NORMALISING", "moved = RULE == ANCHORED"),
    "θ gets the wrong sign": Plant("estimate.py", "dtheta = -gain", "dtheta = gain", "relumax(r=1"),
    "the best key loses its share": Plant(
        "estimate.py", "tl.where(s == peak[:, None], share[:, None], 0.0)", "tl.zeros_like(ds)", "relumax(r=1"
    ),
    "tied best keys get it twice": Plant("estimate.py", "dtheta / tl.maximum(best, 1.0)", "dtheta", "relumax(r=1"),
    "the k-th key loses its share": Plant(
        "estimate.py", "o_n[None, :] == cut[:, None], share", "o_n[None, :] == cut[:, None] - 1, share", "topk_epan"
    ),
    "dv lacks the normaliser": Plant("estimate.py", "w = k * (1.0 / mass)[:, None]", "w = k"),
    "dq lacks the scale": Plant("estimate.py", "dq_m, acc * scale", "dq_m, acc"),
    "dk lacks the scale": Plant("estimate.py", "dk += acc * scale", "dk += acc"),
    "scale gets nothing from a fixed θ": Plant("estimate.py", "dscale += dtheta", "dscale += 0.0 * dtheta", "rectified"),
    "support counts zeros": Plant("estimate.py", "support += tl.sum((k > 0.0)", "support += tl.sum((k >= 0.0)"),
    "scale adds over half a batch": Plant("launch.py", ".sum((0, 2))", "[:1].sum((0, 2))"),
}


class Case(NamedTuple):
    kernel: str
    mask: Mask | None
    queries: int = 20
    keys: int = 20
    blocks: tuple[int, int] = (16, 16)
    whole: bool = False  # scores are whole numbers, which tie and lie on edges

    batch: int = 1
    heads: tuple[int, int] = (1, 1)

    @property
    def shapes(self):
        b, t, n, (h, hk) = self.batch, self.queries, self.keys, self.heads
        return (b, h, t, 5), (b, hk, n, 5), (b, hk, n, 7), (b, h, t, 7)


BATTERY = [
    Case("biweight", Causal(1), batch=2, heads=(4, 2)),
    Case("relumax(r=2, b=2)", Causal(1) & ALiBi(), 18, 35),
    Case("rectified(r=1, b=0.1)", Causal() & Padding([20, 9], queries=[20, 12]), batch=2),
    Case("topk_epanechnikov(4)", Causal(), whole=True),
    Case("relumax(r=1, b=2)", Causal(), whole=True),
    Case("triweight", Packed([13, 7]) & ALiBi()),
    Case("gaussian", Causal(3), blocks=(32, 32)),
    Case("topk_softmax(5)", None, blocks=(32, 32), whole=True),
    Case("entmax(1.7)", Causal(-2), 17, 20),
]


@cache
def prepare(case):
    """Inputs, do, and for every result the exact one, how far the fp32 reference is off, and what may be off."""
    rng = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(shape, generator=rng) for shape in case.shapes)
    if case.whole:
        q, k = ((1.2 * x).round().clamp(-2, 2) for x in (q, k))
    scale = torch.ones(case.heads[0]) if case.whole else 0.4 + torch.rand(case.heads[0], generator=rng)
    inputs = q, k, v, scale
    exact = run(case, [x.double() for x in inputs], do, "reference")
    plain = run(case, inputs, do, "reference")
    allowed = {}
    for name, want in exact.items():
        size = (exact["dq"].norm() * q.norm()) if name == "dscale" else want[want.isfinite()].norm()
        allowed[name] = 3 * float((plain[name] - want).nan_to_num(0.0).norm()) + 4 * torch.finfo(torch.float32).eps * float(
            size
        )
    return inputs, do, exact, allowed


def run(case, inputs, do, backend):
    """{name: result} in float64."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v, scale = inputs
    out, readout = attend(q, k, v, case.kernel, scale=scale, mask=case.mask, backend=backend, return_readout=True)
    gradients = torch.autograd.grad(out, inputs, do.to(out.dtype))
    names = ("out", "dq", "dk", "dv", "dscale", "threshold", "support")
    found = (out, *gradients, readout.threshold, readout.support)
    return {name: x.detach().double() for name, x in zip(names, found, strict=True)}


def find_fault(case):
    """The first result that is wrong; empty if all are right."""
    inputs, do, exact, allowed = prepare(case)
    found = run(case, inputs, do, "fused")
    for name, want in exact.items():
        same = found[name] == want  # infinite thresholds
        if not (found[name] - want).masked_fill(same, 0.0).norm() <= allowed[name]:
            return f"{name} of {case.kernel}"
    return ""


def copy_kernels(folder, plant, monkeypatch):
    """Has `attend` use a copy of the fused kernels with the plant in it."""
    package = folder / f"planted_{abs(hash(folder.name))}"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in package.glob("*.py"):
        text = path.read_text()
        if plant is not None and plant.file == path.name:
            assert plant.old in text, f"the plant is stale: {plant.file} no longer holds {plant.old!r}"
            text = text.replace(plant.old, plant.new, 1)
        path.write_text(re.sub(rf"\b{re.escape(OWN)}\b", package.name, text))
    monkeypatch.syspath_prepend(folder)
    copied = importlib.import_module(f"{package.name}.launch")
    monkeypatch.setattr(attention, "launch", copied)
    return copied


def cut(copied, case, monkeypatch):
    """Blocks as small as a tile can be, so that a short case has many."""
    m, n = case.blocks

    def blocks(queries, keys, width, dtype):
        return copied.Blocks(m, n, 4, 1, single=keys <= n)

    for name in ("forward_blocks", "backward_query_blocks", "backward_key_blocks"):
        monkeypatch.setattr(copied, name, blocks)


@pytest.fixture(autouse=True)
def _forget_copies():
    yield
    for name in [name for name in sys.modules if name.startswith("planted_")]:
        del sys.modules[name]


def test_the_battery_finds_nothing_in_the_kernels_as_they_are(tmp_path, monkeypatch):
    copied = copy_kernels(tmp_path, None, monkeypatch)
    for case in BATTERY:
        cut(copied, case, monkeypatch)
        assert not find_fault(case), case


@pytest.mark.parametrize("name", PLANTS)
def test_the_battery_catches(name, tmp_path, monkeypatch):
    copied = copy_kernels(tmp_path, PLANTS[name], monkeypatch)
    for case in sorted(BATTERY, key=lambda case: not case.kernel.startswith(PLANTS[name].case)):
        cut(copied, case, monkeypatch)
        if find_fault(case):
            return
    pytest.fail(f"no case of the battery noticed that {name}")


def test_a_stale_plant_says_so(tmp_path, monkeypatch):
    with pytest.raises(AssertionError, match=r"the plant is stale: tiles\.py no longer holds 'gone'"):
        copy_kernels(tmp_path, Plant("tiles.py", "gone", ""), monkeypatch)


def test_there_are_enough_plants():
    assert len(PLANTS) >= 20
    assert len({plant.file for plant in PLANTS.values()}) >= 4
