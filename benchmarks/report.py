"""Writes every page with measured numbers from their files: benchmarks/README.md and README.md from benchmarks/results, and
docs/experiments.md with its pictures from results.

python -m benchmarks.report
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import attention, gpu
from benchmarks.common import mark, newest, read, source
from benchmarks.experiments import (
    cpu_section,
    draw_pictures,
    plan_section,
    recipes_section,
    references_section,
    results_section,
)
from compactattn.bench.goals import count_verdicts
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
        "a training step on a GPU": [verdict == "reached" for *_, verdict in gpu.step_lines() if verdict],
        "a decode step on a GPU": [
            ratio <= 1
            for row, ratio in zip(gpu.decode_rows(), gpu.decode_ratios(gpu.decode_rows()), strict=True)
            if ratio is not None and row["contestant"] != "sdpa"
        ],
        "weights on a CPU": [is_reached(row) for row in worst(weights_rows())],
        "a training step on a CPU": [is_fast(row) for row in newest(read("cpu_mixers"), "model")],
        "text to tokens on a CPU": [is_prepared_fast(row) for row in newest(read("preparation"), *TEXT) if row["goal"]],
        "memory on a CPU": [is_small(row) for row in newest(read("cpu_memory"), "kernel", "shape")],
    }
    judged["attention on a GPU"] = [True] * attention["reached"] + [False] * attention["lost"]
    parts = [f"{name}, {'all' if all(found) else f'{sum(found)} of'} {len(found)}" for name, found in judged.items() if found]
    missing = {
        "of attention on a GPU": attention["not measured"],
        "kernels of a training step on a GPU": len(gpu.missing_steps()),
    }
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


def benchmarks_page() -> str:
    weights = weights_rows()[-1]
    runs = [row for row in weights_rows() if row["kernel"] == weights["kernel"]]
    return f"""# Benchmarks

{summary()} Bold marks a number that misses its goal.

Rows are appended to [results/](results/) with machine, versions and commit; `python -m benchmarks.report` writes this
page from them. `make bench` runs everything on a CPU, where ours and the peer take turns in one process;
`make bench-gpu` runs `compactattn bench attention`, `training` and `decode`, and `benchmarks.small_models`, on a GPU.

{gpu.attention_section()}{gpu.steps_section()}{gpu.decode_section()}{gpu.small_models_section()}\
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
        (f"{measured_on_gpu}\n\n" if (measured_on_gpu := gpu.readme_table()) else "")
        + f"Weights of {first['shape'].replace('x', ' × ')} scores on a CPU, fp32, forward + backward, beside the `entmax`\n"
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
    for name, section in (("recipes", recipes_section), ("cpu", cpu_section), ("plan", plan_section)):
        text = fill(text, name, section())
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
