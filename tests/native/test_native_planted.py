# ruff: noqa: E501
"""Bugs planted into the text of attend.c, one at a time: a few cases of the battery catch every one.

A plant whose old text is gone is stale and fails, as does one that does not compile.
"""

import ctypes
import os
import shlex

import battery
import pytest
import torch

from compactattn import Causal, attend
from compactattn.native import build, launch

QUICK = [
    *(("biweight", shape, mask, drop) for shape in ("square", "long") for mask, drop in (("strict", 0.0), ("bias", 0.3))),
    *(
        ("entmax(1.7)", "square", "causal", 0.0),
        ("triweight", "short", "padding", 0.0),
        ("sparsemax", "long", "alibi, both ways", 0.0),
    ),
    *(("gaussian", "square", "boolean", 0.0), ("relumax", "square", "packed", 0.3), ("relumax(r=3, b=2)", "long", "none", 0.0)),
    *(("norm_relu", "square", "causal", 0.3), ("ball", "short", "none", 0.0), ("margin", "square", "alibi", 0.0)),
    *(
        ("topk_softmax(3)", "long", "boolean", 0.0),
        ("topk_biweight(4)", "square", "causal", 0.0),
        ("gaussian", "wide", "none", 0.0),
    ),
    *(("gaussian", "square", "bias of a sample", 0.0), ("sparsemax", "square", "boolean of a head", 0.0)),
    *(("truncated_gaussian(1.5)", "long", "strict", 0.0), ("rectified(r=2)", "square", "packed", 0.0)),
]

PLANTS = {
    "a term of e^x is wrong": ("p = p * f + 1.0f / 24", "p = p * f + 1.0f / 23"),
    "e^x ends early": ("x < -104.0f ? -104.0f", "x < -4.0f ? -4.0f"),
    "the logarithm lacks a term": ("p = p * t2 + 0.2f", "p = p * t2 + 0.3f"),
    "the slope of any r is the weight": ("exp2_of((r - 1.0f) * log2_1p(z))", "exp2_of(r * log2_1p(z))"),
    "the slope of r = 3 is that of 2": ("kind == TWO ? y : y * y", "kind == TWO ? y : y"),
    "powers are in units of 1": ("free ? x + reach : 1.0f + x / reach", "free ? x + reach : reach + x"),
    "Newton stops early": ("4 * FLT_EPSILON * reach", "0.01 * reach"),
    "Newton solves Σ w = r": ("r * root(mass, r)) / slopes", "root(mass, r)) / slopes"),
    "one neighbour too many": ("k = k < legal ? k : legal;", "k = k < legal ? k + 1 : legal;"),
    "all keys of a tie are near": ("s[j] == theta && j < end", "s[j] == theta && j < n"),
    "the first key of a tie is its edge": ("*edge = end - 1; s[*edge] != theta;) --*edge", "*edge = 0; s[*edge] != theta;) ++*edge"),
    "the margin is halved": ("row.reach = k->value;", "row.reach = 0.5f * k->value;"),
    "a fixed bandwidth measures from 0": ("float theta = perfect - k->value;", "float theta = -k->value;"),
    "nothing in reach weighs nothing": ("kind = STEP; /* nothing", "kind = ONE; /* nothing"),
    "the margin of a step has no end": ("s[j] = s[j] > -row.reach ? s[j]", "s[j] = s[j] > -9e9f ? s[j]"),
    "the slope of a margin lacks r": ("1.0f : k->r / norm", "1.0f : 1.0f / norm"),
    "the centre is weighed by w": ("k->rule == NORMALISING ? a : w;", "w;"),
    "the key that sets θ receives nothing": ("dw[row->edge] -= (float)moved", "dw[row->edge] -= 0.0f"),
    "the best key receives nothing": ("dw[j] -= w[j] == best ? share", "dw[j] -= w[j] == best ? 0.0f"),
    "θ has no part in dscale": ("gift.dscale += dtheta;", "gift.dscale += 0.0 * dtheta;"),
    "dropout looks at the key's place in the row": ("(uint32_t)(first + j) *", "(uint32_t)(j) *"),
    "dropout forgets its second word": ("* FIRST ^ between", "* FIRST"),
    "what is kept is not boosted": (">= limit ? boost", ">= limit ? 1.0f"),
    "dw is not dropped": ("thin(c, d, n, fate, lo);", ""),
    "dv is not dropped": ("thin(c, w, n, fate, lo);", ""),
    "a tile is left out": ("for (int64_t t = 0; t < b->held; t++) {\n        const", "for (int64_t t = 1; t < b->held; t++) {\n        const"),
    "light tiles are left out": ("if (sum != 0.0f ||", "if (sum > 0.01f ||"),
    "a flush forgets": ("total[i][n] += sum[i][n], sum", "total[i][n] = sum[i][n], sum"),
    "the mask is off by one": ("hi = real ? c->hi[place] : 0;", "hi = real ? c->hi[place] - (c->hi[place] > 1) : 0;"),
    "every sample sees what the first sees": ("(c->samples_seen > 1 ? sample * c->queries : 0) + q + i, real", "q + i, real"),
    "ALiBi looks one way": ("at > j ? at - j : j - at", "at - j"),
    "a bias is read by its own rows": ("(q + i) * by[2];\n            for (int64_t j = lo; j < hi; j++) s[j] += ", "i * by[2];\n            for (int64_t j = lo; j < hi; j++) s[j] += "),
    "every sample has the first one's bias": ("c->bias + sample * by[0]", "c->bias + 0 * by[0]"),
    "every head is allowed what the first is": ("c->allowed + sample * by[0] + head * by[1]", "c->allowed + sample * by[0]"),
    "unseen keys keep what a product left": ("clear_unseen(b, i, s);", ""),
    "heads share the first keys": ("int64_t group = head / (c->heads / c->key_heads), keys", "int64_t group = 0, keys"),
    "dq lacks the scale": ("dq[n] *= c->scale[head];", ""),
    "dk lacks the scale": ("scaled[n] = x[n] * c->scale[head];", "scaled[n] = x[n];"),
    "a part of the queries is left out of dk": ("pieces = (c->rows + LONG_RUN - 1) / LONG_RUN * share", "pieces = c->rows / LONG_RUN * share"),
    "what a piece gave is given again": ("x[i] += y[i], y[i] = 0.0f", "x[i] += y[i]"),
    "pieces of a wave join in part": ("(j % STRIPES + 1) / STRIPES", "(j % STRIPES) / STRIPES"),
    "a wave leaves its last piece to nobody": ("i < count * places; i++", "i < (count - 1) * places; i++"),
    "the readout counts what was dropped": ("held += w[j] > 0.0f", "held += w[j] >= 0.0f"),
    "θ is the reach": ("found->peak - found->reach;", "found->reach;"),
}  # fmt: skip


@pytest.fixture
def plant(monkeypatch, tmp_path):
    def compile_with(old, new):
        text = build.SOURCE.read_text()
        assert text.count(old) == 1, f"stale: {old!r} stands {text.count(old)} times in attend.c"
        (tmp_path / "attend.c").write_text(text.replace(old, new))
        path = tmp_path / "planted.so"
        monkeypatch.setattr(build, "FLAGS", ("-O1", *build.FLAGS[1:]))
        build.compile_source(shlex.split(os.environ.get("CC", "cc")), tmp_path / "attend.c", path)
        library = ctypes.CDLL(str(path))
        monkeypatch.setattr(launch, "library", lambda: library)
        monkeypatch.setattr(launch, "PIECES_FOR_EACH_THREAD", 4)  # several at once, with one thread too

    return compile_with


def worst():
    """The largest excess of the quick cases, and of ties."""
    torch.manual_seed(0)
    for case in QUICK:
        yield battery.check(*case)[0]
    tied = battery.draw((20, 20, 2, 2, 3, 4))
    tied = tied._replace(q=(2 * tied.q).round(), k=(2 * tied.k).round(), scale=torch.ones(2))
    for kernel in ("topk_biweight(4)", "topk_softmax(3)", "relumax"):
        yield battery.worst_excess(tied, kernel, Causal())[0]


def test_without_a_plant_nothing_is_caught(plant):
    plant("#define LONG_RUN 128", "#define LONG_RUN 32")
    assert max(worst()) <= 1


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(plant, name):
    plant(*PLANTS[name])
    assert any(not excess <= 1 for excess in worst()), name


def test_a_planted_library_is_the_one_that_runs(plant):
    plant("void attend(const Call *c) {", "void attend(const Call *c) { return;")
    q = torch.full((1, 1, 2, 2), 3.0)
    assert not torch.equal(attend(q, q, q, backend="native"), attend(q, q, q, backend="reference"))
