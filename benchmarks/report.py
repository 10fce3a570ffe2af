"""Writes every page with measured numbers from their files: benchmarks/README.md and README.md from benchmarks/results, and
docs/experiments.md with its pictures from results.

python -m benchmarks.report
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import attention
from benchmarks.common import newest, read, source
from benchmarks.experiments import draw_pictures, references_section, results_section
from compactattn.bench.contestants import AUTOTUNING, CONTESTANTS, KERNELS
from compactattn.bench.goals import BEHIND_TRANSFORMER, HEAD_DIMS, TOKENS_PER_SECOND, count_verdicts, format_goals
from compactattn.bench.results import Row
from compactattn.bench.results import format_markdown as table

ROOT = Path(__file__).parent.parent
CURVES = ("validation", "positions")  # the pictures of language modelling that stand in docs/experiments.md
TEXT = ("text", "tokenizer")  # what names a row of preparation


def weights_rows() -> list[Row]:
    """The rows of weights that are of the newest code."""
    rows = read("cpu_weights")
    return [row for row in rows if row.get("commit") == rows[-1].get("commit")]


def worst(rows: list[Row]) -> list[Row]:
    """For each kernel the run in which we did worst against the peer: its time swings more than ours."""
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    return [max((row for row in rows if row["kernel"] == kernel), key=lambda row: float(row["ratio"])) for kernel in kernels]


def ms(row: Row, who: str, what: str = "median") -> str:
    return f"{float(row[f'{who}_{what}_ms']):.1f}"


def mark(text: str, reached: bool) -> str:
    """A number as every table shows it: bold where it misses its goal."""
    return text if reached else f"**{text}**, lost"


def is_reached(row: Row) -> bool:
    """Whether the weights are as much faster than the peer's as they should be."""
    return float(row["ratio"]) <= float(row["goal"])


def is_small(row: Row) -> bool:
    return int(row["above_inputs_mib"]) <= int(row["limit_mib"])


def is_fast(row: Row) -> bool:
    return float(row["median_ms"]) <= float(row["goal_ms"])


def is_prepared_fast(row: Row) -> bool:
    return not row["goal"] or float(row["mb_per_core_second"]) >= float(row["goal"])


def summary() -> str:
    """What is reached and what is not, in a sentence or two, from all the rows."""
    attention = count_verdicts(read("attention"))
    judged = {
        "a training step on a GPU": [verdict == "reached" for *_, verdict in step_lines() if verdict],
        "a decode step on a GPU": [
            ratio <= 1
            for row, ratio in zip(decode_rows(), decode_ratios(decode_rows()), strict=True)
            if ratio is not None and row["contestant"] != "sdpa"
        ],
        "weights on a CPU": [is_reached(row) for row in worst(weights_rows())],
        "a training step on a CPU": [is_fast(row) for row in newest(read("cpu_mixers"), "model")],
        "text to tokens on a CPU": [is_prepared_fast(row) for row in newest(read("preparation"), *TEXT) if row["goal"]],
        "memory on a CPU": [is_small(row) for row in newest(read("cpu_memory"), "kernel", "shape")],
    }
    judged["attention on a GPU"] = [True] * attention["reached"] + [False] * attention["lost"]
    parts = [f"{name}, {'all' if all(found) else f'{sum(found)} of'} {len(found)}" for name, found in judged.items() if found]
    missing = {"of attention on a GPU": attention["not measured"], "kernels of a training step on a GPU": len(missing_steps())}
    counts = " and ".join(f"{count} {what}" for what, count in missing.items() if count)
    left = f" Not measured: {counts}." if counts else ""
    return "Goals reached of those measured: " + "; ".join(parts) + "." + left


def weights_table() -> str:
    header = [
        "kernel",
        "ours, ms",
        "peer, ms",
        "peer",
        "ours / peer",
        "goal",
        "error: ours",
        "peer",
        "gradient error: ours",
        "peer",
    ]
    return table(
        header,
        [
            [
                f"`{row['kernel']}`",
                f"{ms(row, 'ours')} ({ms(row, 'ours', 'p20')}–{ms(row, 'ours', 'p80')})",
                f"{ms(row, 'peer')} ({ms(row, 'peer', 'p20')}–{ms(row, 'peer', 'p80')})",
                f"`{row['peer']}`",
                mark(row["ratio"], is_reached(row)),
                f"≤ {row['goal']}",
                row["ours_error"],
                row["peer_error"],
                row["ours_gradient_error"],
                row["peer_gradient_error"],
            ]
            for row in worst(weights_rows())
        ],
    )


def memory_table() -> str:
    rows = [
        [
            f"`{row['kernel']}`",
            row["shape"],
            mark(row["above_inputs_mib"], is_small(row)),
            f"≤ {row['limit_mib']}",
            row["seconds"],
        ]
        for row in newest(read("cpu_memory"), "kernel", "shape")
    ]
    return table(["kernel", "batch × heads × length × dim", "MiB above the inputs", "goal", "seconds"], rows)


def training_tables() -> str:
    rows = newest(read("cpu_training"), "what", "case")
    averages = [
        [f"{row['case']}", row["ours_ms"], row["definition_ms"], f"{row['faster_by']} ×", row["goal"] or "–"]
        for row in rows
        if row["what"] == "leaky average"
    ]
    data = [
        [row["case"], row["ours_ms"], f"{int(row['tokens_per_second']) / 1e6:.1f} M", row["goal"]]
        for row in rows
        if row["what"] == "data"
    ]
    return (
        "Leaky average, forward + backward, fp32:\n\n"
        + table(["batch × heads × time × dim", "scan, ms", "T×T definition, ms", "faster by", "goal"], averages)
        + "\n\nTraining data at the published sizes, one thread; tokens/s without padding, from the 80th percentile:\n\n"
        + table(["task", "ms for a batch", "tokens/s", "goal"], data)
    )


def preparation_section() -> str:
    """How fast a core turns text into tokens; empty before the first run."""
    rows = newest(read("preparation"), *TEXT)
    if not rows:
        return ""
    lines = [
        [
            row["text"], row["tokenizer"], row["megabytes"], f"{int(row['documents']):,}",
            mark(row["mb_per_core_second"], is_prepared_fast(row)), f"≥ {float(row['goal']):g}" if row["goal"] else "–",
            row["mb_per_second"],
        ]
        for row in rows
    ]  # fmt: skip
    header = ["text", "tokens", "MB", "documents", "MB/s of a core", "goal", "MB/s that passed"]
    return (
        "## Text to tokens on a CPU\n\nThe whole of `compactattn data` with one worker, from the file to the finished corpus.\n"
        "Beside the time that its threads were busy stands the time that passed.\n\n"
        + table(header, lines)
        + f"\n\n{source('preparation')}\n\n"
    )


def mixers_section() -> str:
    """Training steps of every architecture on a CPU; empty before the first run."""
    rows = newest(read("cpu_mixers"), "model")
    if not rows:
        return ""
    lines = []
    for row in rows:
        time = mark(f"{float(row['median_ms']) / 1e3:.2f}", is_fast(row))
        lines.append([f"`{row['model']}`", f"{int(row['parameters']):,}", time, f"≤ {float(row['goal_ms']) / 1e3:g}"])
    first = rows[0]
    size = f"{first['layers']} layers of width 128, {first['tokens'].replace('x', ' × ')} tokens, fp32"
    return (
        f"## A training step on RegBench, on a CPU\n\n{size}: forward, backward, clipping, AdamW.\n"
        "The eight heads of a Memory Mosaic weigh every pair of tokens; the others carry a state, or have two heads\n"
        "(the transformer).\n\n" + table(["model", "parameters", "s", "goal"], lines) + f"\n\n{source('cpu_mixers')}\n\n"
    )


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
    parts += [f"### {_name_place(*place)}\n\n{times_table(rows, *place)}" for place in places]
    return "\n\n".join([*parts, gpu_sources(rows)]) + "\n\n"


def _state_absent(rows: list[Row]) -> str:
    """The contestants that no row is of."""
    absent = [name for name in CONTESTANTS if name not in {row["contestant"] for row in rows}]
    return f" Without a row so far: {', '.join(absent)}." if absent else ""


def _name_place(regime: str, head_dim: str) -> str:
    if regime == "memory":
        return "The paper's contextual memory: batch 32, 12 heads, length 512, head dim 64, q ≡ k"
    return f"Times on {regime} scores at head dim {head_dim}"


def times_table(rows: list[Row], regime: str, head_dim: str) -> str:
    here = [row for row in rows if (row["regime"], row["head_dim"]) == (regime, head_dim)]
    last = max(row["started"] for row in here)  # one table, one run
    here = newest([row for row in here if row["started"] == last], "kernel", "contestant", "mask", "length")
    lengths = sorted({int(row["length"]) for row in here})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in sorted(here, key=lambda row: (row["kernel"] != "gaussian", row["kernel"])):
        line = lines.setdefault((row["kernel"], row["contestant"], row["mask"]), dict.fromkeys(lengths, "–"))
        line[int(row["length"])] = _format_times(row)
    header = ["kernel", "contestant", "mask", *(f"n = {length:,}" for length in lengths)]
    text = table(header, [[f"`{kernel}`", who, mask, *line.values()] for (kernel, who, mask), line in lines.items()])
    return f"ms forward / forward + backward (share of active 64×64 tiles; MiB above the inputs):\n\n{text}"


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


PEER = ("transformer", "8")


def gpu_sources(rows: list[Row]) -> str:
    """Where the rows come from, a line for each run."""
    lines = [
        f"- `{row['command']}` on {row['device']}, torch {row['torch']}, triton {row['triton']}, adasplash {row['adasplash']}, "
        f"{row['started'][:10]}, commit {row['commit'] or 'unknown'}"
        for row in newest(rows, "started")
    ]
    return "\n".join(lines)


def benchmarks_page() -> str:
    weights = weights_rows()[-1]
    runs = [row for row in weights_rows() if row["kernel"] == weights["kernel"]]
    return f"""# Benchmarks

{summary()} Bold marks a number that misses its goal.

Rows are appended to [results/](results/) with machine, versions and commit; `python -m benchmarks.report` writes this
page from them. `make bench` runs everything on a CPU, where ours and the peer take turns in one process;
`make bench-gpu` runs `compactattn bench attention`, `training` and `decode`, and `benchmarks.small_models`, on a GPU.

{attention_section()}{steps_section()}{decode_section()}{small_models_section()}\
## Weights on a CPU, against the `entmax` package {weights["entmax"]}

Scores {weights["shape"]}, {weights["dtype"]}, N(0, 1); forward + backward, median and (20th–80th percentile)
of a call, for each kernel from the least kind to us of {len(runs)} runs, since the peer's time swings on a shared
machine. Errors are relative to the package's own functions in
float64. `softmax` of PyTorch takes {ms(weights, "softmax")} ms here.

{weights_table()}

{source("cpu_weights")}

{attention.section()}## Memory of attend() on a CPU

Causal, fp32, forward + backward; peak resident memory above the inputs, each case in a fresh process. A matrix of
all scores of one head alone would take 1,024 MiB at 16,384 keys.

{memory_table()}

{source("cpu_memory")}

{mixers_section()}{preparation_section()}## What a training step must not wait for

{training_tables()}

{source("cpu_training")}
"""


def readme_section() -> str:
    measured = worst(weights_rows())
    rows = [
        [
            f"`{row['kernel']}`",
            ms(row, "ours"),
            f"{ms(row, 'peer')} (`{row['peer']}`)",
            f"{1 / float(row['ratio']):.1f} ×",
        ]
        for row in measured
    ]
    kinds = ("error", "gradient_error")
    closer = all(float(row[f"ours_{kind}"]) <= float(row[f"peer_{kind}"]) for row in measured for kind in kinds)
    most = max(int(row["above_inputs_mib"]) for row in newest(read("cpu_memory"), "kernel", "shape"))
    first = measured[0]
    return (
        f"Weights of {first['shape'].replace('x', ' × ')} scores on a CPU, fp32, forward + backward, beside the `entmax`\n"
        f"package {first['entmax']}, for each kernel from the run least kind to us"
        f"{', with no larger error against float64' if closer else ''} "
        "([all figures](benchmarks/README.md), `make bench`):\n\n"
        + table(["kernel", "ours, ms", "peer, ms", "faster by"], rows)
        + f"\n\n{attention.summary()}\n"
        + f"Over 16,384 keys with 4 heads it needs at most {most} MiB above its inputs."
    )


def pages() -> dict[Path, str]:
    """Every page that holds measured numbers, as it should read."""
    readme, experiments = ROOT / "README.md", ROOT / "docs" / "experiments.md"
    text = fill(experiments.read_text(), "length-gen", results_section("length-gen", 3))
    text = fill(text, "regbench", results_section("regbench", 4))
    text = fill(text, "references", references_section())
    text = fill(text, "lm", results_section("lm", 4, pictures=CURVES))
    return {
        ROOT / "benchmarks" / "README.md": benchmarks_page(),
        readme: fill(readme.read_text(), "benchmarks", readme_section()),
        experiments: fill(text, "demo", results_section("demo", 3, titled=False)),
    }


def fill(text: str, name: str, section: str) -> str:
    """A page with a new section between its marks."""
    marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{section}\n{match[2]}", text)


def main() -> None:
    files = {path: text.encode() for path, text in pages().items()} | draw_pictures("lm", CURVES)
    for path, content in files.items():
        path.write_bytes(content)
        print("wrote", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
