"""What was measured on a GPU, as the page of the benchmarks and README show it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.common import mark, newest, read, source
from compactattn.bench.contestants import AUTOTUNING, CONTESTANTS, KERNELS
from compactattn.bench.goals import BEHIND_TRANSFORMER, HEAD_DIMS, LENGTHS, TOKENS_PER_SECOND, find_times, format_goals
from compactattn.bench.results import Row
from compactattn.bench.results import format_markdown as table

PEER = ("transformer", "8")
COMPARED = ("sparsemax", "biweight", "triweight", "relumax(1)", "norm_relu", "gaussian")
# kernel, peer, its kernel: what README shows
BESIDE = (("biweight", "adasplash-2", "biweight"), *((kernel, "sdpa-cudnn", "gaussian") for kernel in COMPARED))


def readme_table() -> str:
    """Times of attention at head dim 64 as shares of a peer's, each from one run; empty before the first run."""
    rows = [row for row in read("attention") if row["head_dim"] == "64"]
    if not rows:
        return ""
    lines = [
        [f"`{kernel}` / {peer}", regime, *(cells)]
        for kernel, peer, other in BESIDE
        for regime in ("mild", "local", "sharp")
        if any(cells := list(_shares(rows, kernel, peer, other, regime)))
    ]
    header = ["ours / peer", "scores", *(f"n = {length:,}" for length in LENGTHS)]
    return (
        f"attend() on one {rows[-1]['device']}, bf16, causal, forward + backward, head dim 64: its time as a share of a\n"
        "peer's (AdaSplash-2, or cuDNN's dense softmax) where scores are *mild* and most tiles of 64 × 64 hold a\n"
        "weight, where neighbours attend to neighbours (*local*), and where scores are *sharp* "
        "([all figures](benchmarks/README.md),\n"
        f"`make bench-gpu`):\n\n{table(header, lines)}"
    )


def _shares(rows: list[Row], kernel: str, peer: str, other: str, regime: str) -> Iterator[str]:
    """For each length the ratio of two times of one run; an empty text where there is none."""
    for length in LENGTHS:
        place = {"regime": regime, "length": str(length)}
        ours = find_times(rows, place | {"contestant": "ours", "kernel": kernel})
        theirs = find_times(rows, place | {"contestant": peer, "kernel": other})
        both = [(mine, theirs[run][0]) for run, (mine, _) in sorted(ours.items()) if run in theirs]
        mine, yours = both[-1] if both else (None, None)
        yield f"{mine / yours:.2f}" if mine and yours else ""


def small_models_section() -> str:
    """Steps in a second of RegBench's models on a GPU, by how they are trained; empty before the first run."""
    rows = newest(read("small_models"), "model", "way")
    if not rows:
        return ""
    models, ways = (list(dict.fromkeys(row[name] for row in rows)) for name in ("model", "way"))
    rates = {(row["model"], row["way"]): float(row["steps_per_second"]) for row in rows}

    def show(model: str, way: str) -> str:
        if (rate := rates.get((model, way))) is None:
            return "–"
        return f"{rate:.0f} ({rate / rates[model, ways[0]]:.1f} ×)"

    lines = [[way, *(show(model, way) for model in models)] for way in ways]
    return (
        "## Small models on a GPU\n\nSteps in a second of RegBench's models (batch 32, 1,000 examples, bf16), of all the runs "
        "at a time together,\n"
        f"and how many times as many as {ways[0]}. Runs side by side share the GPU by {rows[-1]['shared']}.\n\n"
        + table(["trained", *(f"`{model}`" for model in models)], lines)
        + f"\n\n{source('small_models')}\n\n"
    )  # fmt: skip


def attention_section() -> str:
    """Goals and times of attention on a GPU; empty before the first run."""
    rows = read("attention")
    if not rows:
        return ""
    parts = [
        "## Attention on a GPU",
        "bf16, causal, batch · length = 32,768, 16 heads; medians of calls with a cold L2 cache. Scores are *mild* (N(0, 1)),\n"
        "*sharp* (six times that) or *local* (half of the features encode the position, so that neighbours attend to\n"
        "neighbours). Each contestant's output and gradients are held against float64 first; one that is wrong is not timed.\n"
        "Ratios are of two times from one run.",
        "Contestants: " + "; ".join(f"{name}, {contestant.about}" for name, contestant in CONTESTANTS.items()) + "."
        f"{_state_absent(rows)}\n"
        "adasplash-2 chooses among its own variants by timing them; since that takes ten seconds for each length, it is given\n"
        f"{AUTOTUNING[0]} ms to warm up and {AUTOTUNING[1]} ms to measure each, not Triton's 25 and 100.",
    ]
    parts += [f"### Goals at head dim {dim}\n\n{format_goals(rows, dim)}" for dim in HEAD_DIMS]
    places = dict.fromkeys((row["regime"], row["head_dim"]) for row in rows)
    parts += [f"### {_name_place(*place)}\n\n{times_tables(rows, *place)}" for place in places]
    return "\n\n".join([*parts, gpu_sources(rows)]) + "\n\n"


def _state_absent(rows: list[Row]) -> str:
    """The contestants that no row is of."""
    absent = [name for name in CONTESTANTS if name not in {row["contestant"] for row in rows}]
    return f" Without a row so far: {', '.join(absent)}." if absent else ""


def _name_place(regime: str, head_dim: str) -> str:
    if regime == "memory":
        return "The paper's contextual memory: batch 32, 12 heads, length 512, head dim 64, q ≡ k"
    return f"Times on {regime} scores at head dim {head_dim}"


def times_tables(rows: list[Row], regime: str, head_dim: str) -> str:
    """A table for each run that is shown."""
    first, *others = shown_runs([row for row in rows if (row["regime"], row["head_dim"]) == (regime, head_dim)])
    parts = ["ms forward / forward + backward (share of active 64×64 tiles; MiB above the inputs):", times_table(first)]
    for run in others:
        whose = "In another run" if run[0]["commit"] == first[0]["commit"] else "Only of an earlier version"
        parts += [f"{whose} ({run[0]['started'][:10]}, commit {(run[0]['commit'] or 'unknown')[:7]}):", times_table(run)]
    return "\n\n".join(parts)


def shown_runs(rows: list[Row]) -> list[list[Row]]:
    """The fullest run of the newest commit, its other runs that add a cell, and of older runs what no newer one has."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["started"], []).append(row)
    last = runs[max(runs)][0]["commit"]
    today, older = (
        [runs[when] for when in sorted(runs, reverse=True) if (runs[when][0]["commit"] == last) == new] for new in (1, 0)
    )
    seen: set[tuple[str, ...]] = set()
    shown = []
    for run in [*sorted(today, key=len, reverse=True), *older]:
        cells = [(*_line_of(row), row["length"]) for row in run]
        added = [row for row, cell in zip(run, cells, strict=True) if cell not in seen]
        seen |= set(cells)
        if added:
            shown.append(run if run in today else added)
    return shown


def _line_of(row: Row) -> tuple[str, ...]:
    return row["kernel"], row["contestant"], row["mask"]


def times_table(run: list[Row]) -> str:
    here = newest(run, "kernel", "contestant", "mask", "length")
    lengths = sorted({int(row["length"]) for row in here})
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in sorted(here, key=lambda row: (row["kernel"] != "gaussian", row["kernel"])):
        line = lines.setdefault(_line_of(row), dict.fromkeys(lengths, "–"))
        line[int(row["length"])] = _format_times(row)
    header = ["kernel", "contestant", "mask", *(f"n = {length:,}" for length in lengths)]
    return table(header, [[f"`{kernel}`", who, mask, *line.values()] for (kernel, who, mask), line in lines.items()])


def _format_times(row: Row) -> str:
    if row["status"] != "ok":
        return row["status"].replace("|", "/")
    forward, both = (f"{float(row[f'{what}_median_ms']):.3g}" for what in ("forward", "both"))
    return f"{forward} / {both} ({row['active_tiles'] or 'unknown'}; {row['memory_mib']})"


def step_goal(rows: list[Row]) -> float:
    """Tokens a second that a mosaic of 8 layers should reach."""
    best = max((int(row["tokens_per_second"] or 0) for row in rows if (row["architecture"], row["layers"]) == PEER), default=0)
    return max(TOKENS_PER_SECOND, best / BEHIND_TRANSFORMER)


def step_rows() -> list[Row]:
    return newest(read("training"), "architecture", "kernel", "layers", "compile", "graph")


def step_lines() -> list[list[str]]:
    """The lines of the table of training steps; the last cell says reached or lost, and nothing where there is no goal."""
    rows = step_rows()
    goal, lines = step_goal(rows), []
    peers = {row["layers"]: float(row["median_ms"]) for row in rows if row["architecture"] == PEER[0] and row["median_ms"]}
    for row in rows:
        speed, judged = int(row["tokens_per_second"] or 0), row["architecture"] == "mosaic" and row["layers"] == "8"
        name = f"mosaic, `{row['kernel']}`" if row["architecture"] == "mosaic" else "transformer"
        verdict = ("reached" if speed >= goal else "lost") if judged else ""
        time = f"{float(row['median_ms']):.2f}" if speed else row["status"].replace("|", "/")
        ratio = f"{float(row['median_ms']) / peers[row['layers']]:.2f}" if speed and row["layers"] in peers else "–"
        rate = f"{speed / 1e3:,.0f}" if speed else "–"
        how = f"{row['compile']}{', graph' if row['graph'] == 'True' else ''}"
        rate = f"**{rate}**" if verdict == "lost" else rate
        lines.append([row["layers"], name, how, time, ratio, rate, row["memory_mib"], verdict])
    return lines


def missing_steps() -> list[str]:
    """The kernels of whom there is no step at 8 layers."""
    timed = {row["kernel"] for row in step_rows() if row["architecture"] == "mosaic" and row["layers"] == "8"}
    return [name for name in KERNELS if name not in timed]


def steps_section() -> str:
    """Training steps on a GPU; empty before the first run."""
    rows = step_rows()
    if not rows:
        return ""
    goal = f"goal {step_goal(rows) / 1e3:,.0f}"
    mixed = len({row["started"] for row in rows}) > 1
    header = ["layers", "model", "compiled", "ms", "/ transformer", "thousand tokens/s", "peak MiB", goal]
    return (
        "## A training step on a GPU\n\nWidth 768, 12 heads, length 512, batch 32, bf16 autocast: forward, backward, clipping, "
        f"AdamW.\nThe goal at 8 layers is {TOKENS_PER_SECOND / 1e3:,.0f} thousand tokens/s and {BEHIND_TRANSFORMER} times the "
        "time of our transformer,\nwhich is of the same size and trained in the same way.\n\n"
        + table(header, step_lines())
        + ("\n\nSome rows are of another run than the transformer's, so that their ratio is of two runs." if mixed else "")
        + (
            f"\n\nNot measured at 8 layers: {', '.join(f'`{name}`' for name in missing)}."
            if (missing := missing_steps())
            else ""
        )
        + f"\n\n{gpu_sources(rows)}\n\n"
    )


def decode_rows() -> list[Row]:
    return newest(read("decode"), "data", "length", "kernel", "contestant")


def decode_ratios(rows: list[Row]) -> list[float | None]:
    """The time of each row as a share of SDPA's; None where there are not both."""
    times = [float(row["median_ms"] or 0) for row in rows]
    dense = {(row["data"], row["length"]): t for row, t in zip(rows, times, strict=True) if row["contestant"] == "sdpa" and t}
    peers = [dense.get((row["data"], row["length"])) for row in rows]
    return [time / peer if time and peer else None for time, peer in zip(times, peers, strict=True)]


def decode_section() -> str:
    """Decode steps on a GPU; empty before the first run."""
    rows = decode_rows()
    if not rows:
        return ""
    lines = []
    for row, ratio in zip(rows, decode_ratios(rows), strict=True):
        name = [row["data"], f"{int(row['length']):,}", f"`{row['kernel']}`", row["contestant"]]
        measured = f"{float(row['median_ms']):.3f}" if row["median_ms"] else row["status"].replace("|", "/")
        judged = "" if ratio is None else mark(f"{ratio:.2f}", ratio <= 1)
        lines.append([*name, measured, judged, row["skipped_pages"] or "–", row["error_output"]])
    return (
        "## A decode step on a GPU\n\nOne query for each of 8 heads, batch 8, head dim 128, fp16; the goal is to be faster "
        "than SDPA.\n\n"
        + table(["keys are", "keys", "kernel", "contestant", "ms", "/ SDPA", "pages skipped", "error"], lines)
        + f"\n\n{gpu_sources(rows)}\n\n"
    )


def gpu_sources(rows: list[Row]) -> str:
    """Where the rows come from, a line for each run."""
    lines = [
        f"- `{row['command']}` on {row['device']}, torch {row['torch']}, triton {row['triton']}, adasplash {row['adasplash']}, "
        f"{row['started'][:10]}, commit {row['commit'] or 'unknown'}"
        for row in newest(rows, "started")
    ]
    return "\n".join(lines)
