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

from compactattn import ALiBi, Allowed, Bias, Causal, Packed, Padding, attend, attention, decoding, entmax, fused
from compactattn.decoding import Pages, decode
from compactattn.fused import launch
from compactattn.memory.features import leaky_average, peek_values, unit
from compactattn.memory.operators import fused_keys, fused_values
from compactattn.mixers import selective_scan
from compactattn.models import head

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of log2(0) and inf − inf

SOURCE = Path(launch.__file__).parent
OWN = launch.__package__


class Plant(NamedTuple):
    file: str
    old: str
    new: str
    case: str = "biweight"  # which is tried first


PLANTS = {
    # threshold.py
    "a class counts its best score twice": Plant("threshold.py", "tl.minimum(best, s,", "tl.maximum(best, s,", "topk"),
    "the best score is that of the last tile": Plant(
        "threshold.py", "best = tl.maximum(best, top[:, None]", "best = tl.maximum(-INF, top[:, None]", "relumax"
    ),
    "the bound is above θ": Plant("threshold.py", "else order))", "else 0.3 * order))", "skipping"),
    "the bound of a margin is above θ": Plant(
        "threshold.py", "(margin if RULE == ANCHORED", "(0.3 * margin if RULE == ANCHORED", "skipping relumax"
    ),
    "the rough bound is above θ": Plant("threshold.py", "peak - rough", "peak - 0.3 * rough", "skipping causal"),
    "masked tiles are not flagged": Plant(
        "threshold.py", "tl.full((WORD,), 1, tl.int32)", "tl.full((WORD,), 0, tl.int32)", "skipping relumax"
    ),
    "a flag is set for the tile before": Plant("threshold.py", "<< (i - group)", "<< (i - group + 1)", "skipping relumax"),
    "Newton solves Σ w = r^r": Plant("threshold.py", "1.0 - R * root(mass, R)", "1.0 - root(mass, R)"),
    "Newton's step for any r lacks r": Plant(
        "threshold.py", "reach - order * any_root(mass, order)", "reach - any_root(mass, order)", "entmax(1.7)"
    ),
    "one neighbour too few": Plant(
        "threshold.py", "wanted = tl.minimum(seen, nearest)", "wanted = tl.minimum(seen, nearest - 1)", "topk"
    ),
    "the earlier key loses a tie": Plant("threshold.py", "tl.cumsum(tie, 1) <= left", "tl.cumsum(tie, 1) < left", "topk"),
    "scores at or above are counted in one tile": Plant(
        "threshold.py", "count += tl.sum((i >= middle", "count = tl.sum((i >= middle", "topk"
    ),
    "a row that sees no key has a best one": Plant(
        "threshold.py", "tl.where(live, largest(best), -INF)", "largest(best)", "padded"
    ),
    # tiles.py and profiles.py
    "a whole tile is dropped": Plant("tiles.py", "whole[4] - whole[3] if WHOLE", "whole[4] - whole[3] - 1 if WHOLE"),
    "mask is off by one": Plant("tiles.py", "(o_n < hi)", "(o_n <= hi)"),
    "masked keys have weights": Plant("tiles.py", "tl.where(legal(o_n, lo, hi), 0.0, -INF)", "0.0 * (o_n + lo)", "half"),
    "a tile on the diagonal counts as whole": Plant("tiles.py", "full_last // BLOCK_N", "tl.cdiv(full_last, BLOCK_N)"),
    "a tile that begins another sample counts as whole": Plant(
        "tiles.py", "tl.cdiv(full_first, BLOCK_N)", "full_first // BLOCK_N", "triweight"
    ),
    "span lacks its last key": Plant("tiles.py", "tl.where(live, b_hi, 0), 0)", "tl.where(live, b_hi, 0), 0) - 1"),
    "ALiBi has the wrong sign": Plant("tiles.py", "s - slope *", "s + slope *", "relumax"),
    "padded head dims are read": Plant("tiles.py", "m_rows[:, None] & (o_d < D)[None, :], other", "m_rows[:, None], other"),
    "a key at the edge has a slope": Plant(
        "profiles.py", "tl.where(t > 0.0, 1.0, 0.0)", "tl.where(t >= 0.0, 1.0, 0.0)", "tied"
    ),
    "wrong power of the slope": Plant("profiles.py", "log2_1p(z) * (r - 1.0)", "log2_1p(z) * r", "entmax(1.7)"),
    "weights sum to r^r": Plant("weights.py", "return r**r if", "return 1.0 if"),
    # forward
    "Newton stops early": Plant("forward.py", "tolerate(order, TOLERANCE, R) * reach", "0.2 * reach", "soft"),
    "the last step of Newton leaves the values alone": Plant(
        "forward.py", "(-lower * factor)[:, None]", "(0.0 * factor)[:, None]", "soft"
    ),
    "the last step of Newton lacks r for the values": Plant(
        "forward.py", "(-lower * factor)[:, None]", "(-step * factor)[:, None]", "soft"
    ),
    "the last step of Newton lacks r for the mass": Plant(
        "forward.py", "growth * mass - lower * slopes", "growth * mass - step * slopes", "soft"
    ),
    "the tilt is that of the last tile": Plant(
        "forward.py", "tilt = add_dot(tilt, steep.to(b_v.dtype), b_v)", "tilt = add_dot(0.0 * tilt, steep.to(b_v.dtype), b_v)"
    ),
    "a rising maximum leaves the sum as it was": Plant("forward.py", "mass = mass * fade", "mass = mass * 1.0", "gaussian"),
    "nothing in reach pulls": Plant("weights.py", "tl.where(alone, 0.0, gain)", "gain", "rectified"),
    "nothing in reach has no weights backward": Plant(
        "weights.py", "tl.where(alone, -factor / TINY, theta)", "theta", "rectified"
    ),
    "nothing in reach weighs nothing": Plant("forward.py", "tl.where(alone[:, None], flatter, acc)", "acc", "rectified"),
    "tied best keys are counted once": Plant("forward.py", "slopes / tl.maximum(best, 1.0)", "slopes", "tied"),
    "a tie at the edge is cut short": Plant("weights.py", "(o_n <= cut)", "(o_n < cut)", "topk_softmax"),
    "light tiles are not handed on": Plant("forward.py", "(more == 0.0)", "(more <= 0.3)", "skipping"),
    "support counts zeros": Plant("forward.py", "tl.sum((k > 0.0)", "tl.sum((k >= 0.0)"),
    "wrong head of the values": Plant("forward.py", "h // GROUP * v_h", "h % GROUP * v_h", "grouped"),
    # a bias, a mask of single keys, a learned alpha
    "a bias is left out": Plant("tiles.py", "s + bias)", "s + 0.0 * bias)", "biased"),
    "a bias does not hide": Plant("tiles.py", "tl.where(bias == -INF, -INF, s + bias)", "s + tl.maximum(bias, -9.0)", "biased"),
    "every head has the bias of the first": Plant("tiles.py", "+ h * bias_h", "+ h * 0", "biased"),
    "a mask of single keys is turned": Plant("tiles.py", "+ o_m * allowed_m", "+ o_m * 0", "allowed"),
    "a key that is not allowed is": Plant("tiles.py", "other=0) != 0, s, -INF)", "other=0) != 2, s, -INF)", "allowed"),
    "hidden keys count among the k": Plant(
        "threshold.py", "seen += tl.sum((s != -INF)", "seen += tl.sum((s == s)", "allowed topk"
    ),
    "hidden keys share what nothing in reach leaves": Plant(
        "forward.py", "(count if hides(BENDS) else b_hi - b_lo)", "(b_hi - b_lo)", "biased rectified"
    ),
    "what is hidden is multiplied by zero": Plant("tiles.py", "[:, None], b, 0.0).to(b.dtype)", "[:, None], b, b)", "allowed"),
    "what is hidden pulls": Plant("tiles.py", "tl.where(s == -INF, 0.0, ds) if hides(BENDS) else ds", "ds", "allowed"),
    "dbias holds the scale": Plant(
        "backward_bias.py",
        "acc += quiet(ds, s, BENDS)",
        "acc += quiet(ds, s, BENDS) * scale",
        "biased",
    ),
    "dbias is that of one sample": Plant("backward_bias.py", "else (0, B)", "else (B - 1, B)", "shared"),
    "dbias is that of one head": Plant("backward_bias.py", "else (0, H)", "else (H - 1, H)", "shared"),
    "dbias is that of one block of queries": Plant(
        "backward_bias.py", "else (0, blocks)", "else (blocks - 1, blocks)", "shared"
    ),
    "dbias of the best key lacks the share of θ": Plant(
        "backward.py", "o_pulled, share", "o_pulled, 0.0 * share", "biased relumax"
    ),
    "a learned alpha is that of the first head": Plant("profiles.py", "p_orders + h", "p_orders", "alpha"),
    "the slope of r lacks its tail": Plant("profiles.py", "log + tl.exp(-log) - 1.0", "log", "alpha"),
    "the gradient of r is not centred": Plant("backward.py", "* (dw - pulls[2])", "* dw", "alpha"),
    # dropout
    "a dropped weight moves its value": Plant(
        "backward.py", "w = thin(w, drop, along(o_m, KEYS_FIRST), o_n)", "w = w", "dropped"
    ),
    "dq lacks 1/(1 − p)": Plant("backward.py", "b_m, o_n[None, :]) * drop[3]", "b_m, o_n[None, :])", "dropped"),
    "dk knows of no dropout": Plant(
        "backward.py", "dw = thin(dw, drop, along(o_m, KEYS_FIRST), o_n)", "dw = dw", "half dropped"
    ),
    "query and key change places in the hash": Plant(
        "drops.py", "thin(x, drop, o_m, o_n)", "thin(x, drop, o_n, o_m)", "dropped"
    ),
    "every head drops as the first": Plant("drops.py", "(h if place else b)", "(0 * h if place else b)", "dropped"),
    "the centre knows of no dropout": Plant(
        "forward.py", "steep = thin(steep, drop, b_m,", "thin(steep, drop, b_m,", "dropped"
    ),
    "dropout thins the mass": Plant(
        "forward.py", "more = tl.sum(k, 1)", "more = tl.sum(thin(k, drop, b_m, o_n[None, :]) if DROPS else k, 1)", "thinned"
    ),
    "dbias knows of no dropout": Plant(
        "backward_bias.py", "dw = thin(dw, drop, o_m[:, None], o_n[None, :])", "dw = dw", "thinned"
    ),
    # backward of the queries
    "the centre in fp32 is no mean": Plant(
        "backward.py", "centre = sums / tl.where(slopes > 0.0, slopes, 1.0)", "centre = sums"
    ),
    "ds is not centred": Plant("backward.py", "(-gain * centre)[:, None]", "(0.0 * centre)[:, None]"),
    "θ gets the wrong sign": Plant("backward.py", "/ kept[2] * lean", "/ -kept[2] * lean", "relumax"),
    "the share of θ lacks r": Plant("backward.py", "-R / tl.where(known", "-1.0 / tl.where(known", "relumax"),
    "the share in half precision lacks the scale": Plant(
        "backward.py", "row[9] if RULE == FIXED else share * scale", "row[9] if RULE == FIXED else share", "half relumax"
    ),
    "an anchored θ is off": Plant(
        "weights.py", "tl.fma(raw - peak, rise, 1.0)", "tl.fma(raw - peak, rise, 0.9)", "half relumax"
    ),
    "dv lacks 1/Z": Plant("backward.py", "w = w * row[8]", "w = w", "relumax"),
    "dv in half precision lacks 1/r": Plant("backward.py", "gain * (1.0 / (R * rise))", "gain * (1.0 / rise)", "half relumax"),
    "a best score is taken for a best q·k": Plant("threshold.py", "tl.where(live, top, LONGEST)", "peak", "half relumax"),
    "the best key loses its share": Plant("backward.py", "tl.where(s == row[3], share, 0.0)", "0.0 * ds", "relumax"),
    "the k-th key loses its share": Plant("backward.py", "o_n == row[6]", "o_n == row[6] - 1", "topk"),
    "dq lacks the scale": Plant("backward.py", "dq_m, acc * scale", "dq_m, acc"),
    "a fixed θ moves the scale the wrong way": Plant("backward.py", "dscale -= drift\n", "dscale += drift\n", "rectified"),
    "dscale is that of half a batch": Plant("launch.py", "-1).sum((0, 2))", "-1)[:1].sum((0, 2))", "rectified"),
    # backward of the keys
    "dk lacks the scale": Plant("backward.py", "slant = (gain * scale)", "slant = gain"),
    "the centre in half precision lacks the scale": Plant("backward.py", "-gain * scale * centre", "-gain * centre", "half"),
    "dk in half precision lacks the scale": Plant("backward.py", "(scale, scale * (R /", "(scale, (R /", "half"),
    "dv lacks r^r": Plant("backward.py", "dv = dv * (1.0 / whole_mass(RULE, R))", "dv = dv * 1.0", "half"),
    "base and centre change places": Plant("backward.py", "base, offset = tl.split", "offset, base = tl.split", "half"),
    "the keys of a head see the centres of the first": Plant(
        "backward.py", "(b * H + h) * padded", "b * H * padded", "half softmax"
    ),
    "keys that no query sees are read": Plant(
        "backward.py", "m_n = (o_n >= tl.load(p_seen + 2)) & (o_n < tl.load(p_seen + 3))", "m_n = o_n < K", "half sparsemax"
    ),
    "copied queries are of the first head": Plant("backward.py", "d_q.load([b, h,", "d_q.load([b, 0 * h,", "copied"),
    "copied gradients are of the first sample": Plant("backward.py", "d_do.load([b, h,", "d_do.load([0 * b, h,", "copied"),
    "a group adds one head twice": Plant("backward.py", "key_head * GROUP + member", "key_head * GROUP", "grouped"),
    "dv is that of the last tile": Plant("backward.py", "dv = add_dot(dv, w", "dv = add_dot(0.0 * dv, w"),
    # lists
    "a block with one key of a tile is not listed": Plant("lists.py", "(last > begin)", "(last > begin + 1)", "gaussian"),
    "a partly seen tile is listed as whole": Plant("lists.py", "(full_last >= end)", "(full_last > begin)"),
    "a flag is that of the tile before": Plant(
        "lists.py", "block * tiles + tile,", "block * tiles + tl.maximum(tile - 1, 0),", "skipping"
    ),
    "a group sees the keys of its first head alone": Plant(
        "lists.py",
        "        seen_first = tl.minimum(",
        "        seen = seen & (tl.load(p_flags + block * tiles + tile, mask=seen & FLAGGED, other=1) != 0)\n"
        "        seen_first = tl.minimum(",
        "skipping grouped",
    ),
    "the last key that is seen passes for hidden": Plant(
        "lists.py", "tl.max(tl.where(seen, last, 0), 0)", "tl.max(tl.where(seen, last, 0), 0) - 1"
    ),
    "a list lacks a whole tile": Plant("lists.py", "+ 1, whole)", "+ 1, tl.maximum(whole - 1, 0))"),
    "every sample has the bounds of the first": Plant("lists.py", "head // H * bounds_b", "head // H * 0", "rectified"),
    "what any query sees passes for what all see": Plant("lists.py", "p_bounds + 3, full_last", "p_bounds + 3, last"),
    # leaky.py
    "a state fades one time too little": Plant("leaky.py", "tl.exp(-leak * (o_t + 1))", "tl.exp(-leak * o_t)", "keys"),
    "a short block hands on no state": Plant("leaky.py", "tl.minimum(BLOCK_T, T - start) - 1", "BLOCK_T - 1", "keys"),
    "the future leaks in": Plant("leaky.py", "tl.where(age >= 0, tl.exp", "tl.where(age >= -1, tl.exp", "keys"),
    "the leak sees keys and not averages": Plant(
        "leaky.py", "b_later * b_key * tl.maximum(b_norm, EPSILON)[:, None]", "b_later * b_key", "keys"
    ),
    "a norm has no gradient": Plant("leaky.py", "b_du - b_inside[:, None] * b_u", "b_du", "values"),
    "the row that peeked is forgotten": Plant("leaky.py", "+ (1 - mix) * b_dbefore", "+ 0.0 * b_dbefore", "values"),
    # cross_entropy.py
    "a block of words forgets the maximum before": Plant(
        "cross_entropy.py", "b_mass * tl.exp(b_peak - b_top)", "b_mass", "loss"
    ),
    "a target in a later block is missed": Plant("cross_entropy.py", "start + o == target", "o == target", "loss"),
    "tokens that do not count have a gradient": Plant("cross_entropy.py", "(counted * scale)", "scale", "loss"),
    # selective_scan.py
    "a scan starts from nothing": Plant("selective_scan.py", "tl.load(p_state", "0.0 * tl.load(p_state", "scan"),
    "positions after the end decay": Plant("selective_scan.py", "(o < SIZE), other=0.0)", "(o < SIZE), other=1.0)", "scan"),
    "a state decays once too often for the rates": Plant(
        "selective_scan.py", "b_dexponent = kept[i] * b_g", "b_dexponent = kept[i] * decays[i] * b_g", "scan"
    ),
    "a chunk goes back with the states of another": Plant(
        "selective_scan.py", "earlier_h = tl.load(p_entering + chunk", "earlier_h = tl.load(p_entering + 0 * chunk", "scan"
    ),
    # decode.py and decode_threshold.py
    "a key beyond the cache is seen": Plant(
        "decode.py", "(o_n[None, :] < hi[:, None])", "(o_n[None, :] <= hi[:, None])", "decode"
    ),
    "every head of a group has the scale of the first": Plant(
        "decode.py", "GROUP + o_m // Q", "GROUP + o_m // Q * 0", "decode"
    ),
    "the mass of a row is that of its last page": Plant("decode.py", "mass += tl.sum(k, 1)", "mass = tl.sum(k, 1)", "decode"),
    "a bound takes the wrong corner of a page": Plant(
        "decode.py", "tl.dot(above, tl.trans(b_high)", "tl.dot(above, tl.trans(b_low)", "paged"
    ),
    "keys that were not added pass for bounded": Plant("decode.py", "(ends <= filled)", "(ends < filled + 64)", "paged"),
    "a split of the pages is left out": Plant("decode.py", "(o < splits)[:, None]", "(o < splits - 1)[:, None]", "paged"),
    "pages that matter are not listed": Plant("decode_threshold.py", "<= -reach) == 0", "<= -0.5 * reach) == 0", "decode"),
    "Newton on a cache stops early": Plant("decode_threshold.py", "4 * EPS, True", "0.1, True", "decode"),
    "the k-th key of a window is counted from its start": Plant("decode_threshold.py", "cut + begin * PAGE", "cut", "window"),
}


class Case(NamedTuple):
    inputs: dict[str, torch.Tensor]
    call: Callable[[dict[str, torch.Tensor], bool], dict[str, torch.Tensor]]  # by the kernels, or by their definition
    gradients: bool = True


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attending(
    kernel, mask, queries=40, keys=40, batch=1, heads=(1, 1), dims=(5, 7), sharp=1.0, tied=False, dtype=torch.float32,
    bias=None, alpha=None, dropout=0.0, spoilt=None,
):  # fmt: skip
    """attend with its readout. `tied` scores are whole numbers, which tie and lie on edges. Bias and alpha are learned.

    Keys from `spoilt` on, which no query may see, are no numbers.
    """
    (h, hk), (d, dv) = heads, dims
    shapes = (batch, h, queries, d), (batch, hk, keys, d), (batch, hk, keys, dv)
    q, k, v = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    if tied:
        q, k = ((1.2 * x).round().clamp(-2, 2) for x in (q, k))
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
    "half sparsemax": attending("epanechnikov", Causal() & Padding([30], queries=[27]), dtype=torch.float16, spoilt=30),
    "skipping biweight": attending("biweight", None, 2, 100, sharp=1.5),
    "skipping grouped biweight": attending("biweight", None, 2, 100, heads=(2, 1), sharp=3.0),
    "skipping causal biweight": attending("biweight", Causal(), 2, 98, sharp=1.5),
    "skipping relumax": attending("relumax(r=1, b=1)", None, 2, 78),
    "relumax with ALiBi": attending("relumax(r=2, b=2)", Causal(1) & ALiBi(), 18, 35),
    "half relumax": attending("relumax(r=2, b=2)", Causal(), 20, 20, sharp=0.7, dtype=torch.float16),
    "tied relumax": attending("relumax(r=1, b=2)", Causal(), 20, 20, tied=True),
    "rectified": attending("rectified(r=1, b=0.1)", Causal() & Padding([9, 40], queries=[12, 40]), batch=2),
    "padded sparsemax": attending("epanechnikov", Padding([20], queries=[9]), 20, 20),
    "triweight": attending("triweight", Packed([23, 17]) & ALiBi()),
    "entmax(1.7)": attending("entmax(1.7)", Causal(-2), 17, 20),
    "gaussian": attending("gaussian", Causal(-1)),
    "topk": attending("topk_epanechnikov(20)", Causal(), 20, 60, tied=True),
    "topk_softmax": attending("topk_softmax(5)", None, 18, 20, tied=True),
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
    for owner, name in zip((attention, decoding, fused, fused, fused), names, strict=True):
        monkeypatch.setattr(owner, name, copied[name], raising=False)
    cut = copied["launch"].Cut(*[copied["launch"].Blocks(32, 16, 4, 1)] * 4)
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
