"""Bugs to plant into the text of the fused kernels: a file, a text of it and what takes its place."""

from typing import NamedTuple


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
    "Newton solves Σ w = r^−r": Plant("threshold.py", "1.0 - root(mass, R)", "1.0 - R * root(mass, R)"),
    "Newton's step for any r lacks r": Plant(
        "threshold.py", "reach - order * any_root(mass, order)", "reach - any_root(mass, order)", "entmax(1.7)"
    ),
    "one neighbour too few": Plant(
        "threshold.py", "wanted = tl.minimum(seen, nearest)", "wanted = tl.minimum(seen, nearest - 1)", "topk"
    ),
    "the earlier key loses a tie": Plant("threshold.py", "tl.cumsum(tie, 1) <= left", "tl.cumsum(tie, 1) < left", "topk"),
    "scores above a probe are counted in one tile": Plant(
        "threshold.py", "count += tl.sum(higher", "count = tl.sum(higher", "topk"
    ),
    "the k-th of a tie forgets what is above it": Plant(
        "threshold.py", "above = tl.where(more, above, count)", "above = tl.where(more, count, above)", "topk"
    ),
    "the k-th score is given up after a climb": Plant("threshold.py", "turn < CLIMB + 33", "turn < CLIMB", "crowded topk"),
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
        "profiles.py", "tl.where(y > 0.0, 1.0, 0.0)", "tl.where(y >= 0.0, 1.0, 0.0)", "tied"
    ),
    "a weight is cut at a half": Plant("profiles.py", "tl.minimum(t, 1.0)", "tl.minimum(t, 0.5)", "half"),
    "two keys within a tenth are both the best": Plant(
        "profiles.py", "tl.where(x == 0.0, 1.0, 0.0)", "tl.where(x > -0.1, 1.0, 0.0)", "half relumax"
    ),
    "wrong power of the slope": Plant("profiles.py", "log2_1p(z) * (r - 1.0)", "log2_1p(z) * r", "entmax(1.7)"),
    "weights sum to r^r": Plant("weights.py", "base + 1.0 / R, rise * (1.0 / R)", "base + 1.0, rise"),
    "the base in half precision lacks 1/r": Plant("weights.py", "-(ground - reach) * (1.0 / R)", "-(ground - reach)", "half"),
    "where no key is in reach some weigh more": Plant(
        "weights.py", "dead | (reach <= 0.0) if RULE == FIXED and not is_whole(R) else dead", "dead", "rectified(r=1.5)"
    ),
    # forward
    "Newton stops early": Plant("forward.py", "tolerate(order, TOLERANCE, R) * reach", "0.2 * reach", "soft"),
    "the last step of Newton leaves the values alone": Plant(
        "forward.py", "(-lower * factor)[:, None]", "(0.0 * factor)[:, None]", "soft"
    ),
    "the last step of Newton has r once too often": Plant(
        "forward.py", "lower = step if is_whole(R)", "lower = R * step if is_whole(R)", "soft"
    ),
    "the tilt is that of the last tile": Plant(
        "forward.py", "tilt = add_dot(tilt, steep.to(b_v.dtype), b_v)", "tilt = add_dot(0.0 * tilt, steep.to(b_v.dtype), b_v)"
    ),
    "a rising maximum leaves the sum as it was": Plant("forward.py", "mass = mass * fade", "mass = mass * 1.0", "gaussian"),
    "nothing in reach pulls": Plant("weights.py", "tl.where(alone, 0.0, gain)", "gain", "rectified"),
    "nothing in reach has no weights backward": Plant(
        "weights.py", "tl.where(alone, -factor / TINY, theta)", "theta", "rectified"
    ),
    "nothing in reach weighs nothing": Plant("forward.py", "going = tl.max(fresh, 0)", "going = 0", "rectified"),
    "rows with keys in reach are uniform beside one without": Plant(
        "forward.py",
        "sign = tl.where(alone > 0, -1.0, 1.0)",
        "sign = tl.where(tl.max(alone, 0) > 0, -1.0, none + 1.0)",
        "rectified",
    ),
    "tied best keys are counted once": Plant("forward.py", "slopes / tl.maximum(best, 1.0)", "slopes", "tied"),
    "the weights of the nearest keys are not divided by their sum backward": Plant(
        "weights.py", "-(tl.log2(mass) if NORMALISED else 0.0)", "0.0 * mass", "half topk"
    ),
    "a tie at the edge is cut short": Plant("weights.py", "(o_n <= cut)", "(o_n < cut)", "topk_softmax"),
    "light tiles are not handed on": Plant("forward.py", "(more == 0.0)", "(more <= 0.3)", "skipping"),
    "support is counted after rounding": Plant(
        "forward.py", "if SOFT else k > 0.0)", "if SOFT else rounded(k, b_v.dtype) > 0.0)", "vanishing"
    ),
    "support counts zeros": Plant("forward.py", "if SOFT else k > 0.0)", "if SOFT else k >= 0.0)"),
    "wrong head of the values": Plant("forward.py", "h // GROUP * v_h", "h % GROUP * v_h", "grouped"),
    # a bias, a mask of single keys, a learned alpha
    "a bias is left out": Plant("tiles.py", "s + bias)", "s + 0.0 * bias)", "biased"),
    "a bias does not hide": Plant("tiles.py", "tl.where(bias == -INF, -INF, s + bias)", "s + tl.maximum(bias, -9.0)", "biased"),
    "every head has the bias of the first": Plant("tiles.py", "+ h * bias_h", "+ h * 0", "biased"),
    "a mask of single keys is turned": Plant("tiles.py", "+ o_m * allowed_m", "+ o_m * 0", "allowed"),
    "a key that is not allowed is": Plant("tiles.py", "other=0) != 0, s, -INF)", "other=0) != 2, s, -INF)", "allowed"),
    "hidden keys count among the k": Plant("threshold.py", "seen, _ = survey(", "_, _ = survey(", "allowed topk"),
    "a uniform row pulls": Plant("forward.py", "tl.where(alone > 0, -mass, mass)", "mass", "rectified"),
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
        "backward.py", "2 * padded + o_pulled, share)", "2 * padded + o_pulled, 0.0 * share)", "biased relumax"
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
    "the centre of a fixed bandwidth in fp32 is the mean under its slopes": Plant(
        "backward.py", "centring = k if RULE == FIXED else steep", "centring = steep", "rectified"
    ),
    "ds is not centred": Plant("backward.py", "(-gain * centre)[:, None]", "(0.0 * centre)[:, None]"),
    "θ gets the wrong sign": Plant("backward.py", "/ kept[2] * lean", "/ -kept[2] * lean", "relumax"),
    "the share of θ lacks r": Plant("backward.py", "-R / tl.where(known", "-1.0 / tl.where(known", "relumax"),
    "the share in half precision lacks its part of the scale": Plant(
        "backward.py", "row[9] if RULE == FIXED else share * part", "row[9] if RULE == FIXED else share", "half relumax"
    ),
    "an anchored θ is off": Plant(
        "weights.py", "saturate(raw - peak, rise, 1.0)", "saturate(raw - peak, rise, 0.9)", "half relumax"
    ),
    "dv lacks 1/Z": Plant("backward.py", "w = w * row[8]", "w = w", "relumax"),
    "the gain in half precision lacks r": Plant(
        "backward.py", "inverse * (R * (1.0 / margin) * part)", "inverse * ((1.0 / margin) * part)", "half relumax"
    ),
    "a best score is taken for a best q·k": Plant("threshold.py", "tl.where(live, top, LONGEST)", "peak", "half relumax"),
    "the best key loses its share": Plant(
        "backward.py", "tl.fma(is_best(s, row, R, BENDS, EXACT), share, ds)", "1.0 * ds", "relumax"
    ),
    "the k-th key loses its share": Plant("backward.py", "o_n == row[6]", "o_n == row[6] - 1", "topk"),
    "dq lacks the scale": Plant("backward.py", "dq_m, acc * scale", "dq_m, acc"),
    "a fixed θ moves the scale the wrong way": Plant("backward.py", "dscale -= drift\n", "dscale += drift\n", "rectified"),
    "dscale is that of half a batch": Plant(
        "launch.py", "self.blocks).sum((0, 2))", "self.blocks)[:1].sum((0, 2))", "rectified"
    ),
    # backward of the keys
    "dk lacks the scale": Plant("backward.py", "dk * largest", "dk"),
    "dk has the largest scale for every head": Plant("backward.py", "slant = (gain * part)", "slant = (gain * 1.0)", "grouped"),
    "the centre in half precision lacks its part of the scale": Plant(
        "backward.py", "2 * o_pulled + 1, -gain * part * centre", "2 * o_pulled + 1, -gain * centre", "copied"
    ),
    "the gain in half precision lacks its part of the scale": Plant(
        "backward.py", "(part, offset, base)", "(1.0, offset, base)", "copied"
    ),
    "the best of the masked tiles is no bound": Plant(
        "threshold.py", "largest(best) * size - margin", "largest(best) * size", "skipping causal relumax"
    ),
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
    "a rising maximum leaves the sum over a cache as it was": Plant(
        "decode.py", "mass = shrink(mass, factor) + k", "mass = mass + k", "softmax decode"
    ),
    "a rising maximum leaves the values as they were": Plant(
        "decode.py", "add_values(shrink(acc, factor), k, b_v)", "add_values(acc, k, b_v)", "softmax decode"
    ),
    "splits are added in units of their own best keys": Plant(
        "decode.py", "more, part = shrink(more, factor), shrink(part, factor[:, None])", "more, part = more, part", "softmax"
    ),
    "where a key is in reach others still weigh as if none were": Plant(
        "decode.py", "tl.where(factor == 0.0, 0.0, x * factor)", "tl.where(factor == 0.0, x, x * factor)", "fixed decode"
    ),
    "a fixed θ is that of another bandwidth": Plant("decode.py", "(group[3] - margin)", "(group[3] + margin)", "fixed decode"),
    "a list of pages begins anew": Plant(
        "decode.py", "listed += tl.sum(wanted", "listed = tl.sum(wanted", "paged fixed decode"
    ),
    "pages that matter are not listed": Plant("decode_threshold.py", "<= -reach) == 0", "<= -0.5 * reach) == 0", "decode"),
    "Newton on a cache stops early": Plant("decode_threshold.py", "4 * EPS, True", "0.1, True", "decode"),
    "the k-th key of a window is counted from its start": Plant("decode_threshold.py", "cut + begin * PAGE", "cut", "window"),
}
