"""Writes the tables of benchmarks/README.md and README.md from the rows in benchmarks/results.

python -m benchmarks.report
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.common import read
from compactattn.report import tables
from compactattn.report.comparison import compare
from compactattn.report.finding import find, hold_against_paper, list_departures
from compactattn.report.runs import load

ROOT = Path(__file__).parent.parent
Row = dict[str, str]


def newest(rows: list[Row], *keys: str) -> list[Row]:
    """The last row for each value of the keys, in the order of their first appearance."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def worst(rows: list[Row]) -> list[Row]:
    """For each kernel the run in which we did worst against the peer: its time swings more than ours."""
    kernels = dict.fromkeys(row["kernel"] for row in rows)
    return [max((row for row in rows if row["kernel"] == kernel), key=lambda row: float(row["ratio"])) for kernel in kernels]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ms(row: Row, who: str, what: str = "median") -> str:
    return f"{float(row[f'{who}_{what}_ms']):.1f}"


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
                f"**{row['ratio']}**",
                f"≤ {row['goal']}",
                row["ours_error"],
                row["peer_error"],
                row["ours_gradient_error"],
                row["peer_gradient_error"],
            ]
            for row in worst(read("cpu_weights"))
        ],
    )


def memory_table() -> str:
    rows = [
        [f"`{row['kernel']}`", row["shape"], row["above_inputs_mib"], f"≤ {row['limit_mib']}", row["seconds"]]
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


def comparisons_section(folder: str, headings: bool = True) -> str:
    """Every comparison that the files of a folder allow, in the words of the report."""
    parts = []
    for comparison in compare(load([ROOT / "results" / folder])):
        found = find(comparison)
        parts += [f"### {comparison.title}, {comparison.mode}"] if headings else []
        parts += [f"**{found.headline}** {' '.join(found.details)}"]
        parts += [tables.describe(comparison), tables.format_markdown(comparison), " ".join(hold_against_paper(comparison))]
        missing = comparison.not_run()
        parts += [f"Rows of the paper that were not run: {', '.join(missing)}."] if missing else []
        if comparison.published:
            parts += ["Departures from the paper:\n\n" + "\n".join(f"- {note}" for note in list_departures(comparison))]
    return "\n\n".join(part for part in parts if part)


def source(name: str) -> str:
    row = read(name)[-1]
    return (
        f"`{row['command']}` on {row['cpu']}, {row['threads']} threads, torch {row['torch']}, Python {row['python']}, "
        f"{row['date']}, commit {row['commit']}."
    )


def benchmarks_page() -> str:
    weights = read("cpu_weights")[-1]
    runs = [row for row in read("cpu_weights") if row["kernel"] == weights["kernel"]]
    return f"""# Benchmarks

Rows are appended to [results/](results/) with machine, versions and commit; `python -m benchmarks.report` writes this
page from them. Ours and the peer take turns in one process. `make bench` runs everything here.

## Weights on a CPU, against the `entmax` package {weights["entmax"]}

Scores {weights["shape"]}, {weights["dtype"]}, N(0, 1); forward + backward, median and (20th–80th percentile)
of a call, for each kernel from the least kind to us of {len(runs)} runs, since the peer's time swings on a shared
machine. Errors are relative to the package's own functions in
float64. `softmax` of PyTorch takes {ms(weights, "softmax")} ms here.

{weights_table()}

{source("cpu_weights")}

## Memory of attend() on a CPU

Causal, fp32, forward + backward; peak resident memory above the inputs, each case in a fresh process. A matrix of
all scores of one head alone would take 1,024 MiB at 16,384 keys.

{memory_table()}

{source("cpu_memory")}

## What a training step must not wait for

{training_tables()}

{source("cpu_training")}
"""


def readme_section() -> str:
    measured = worst(read("cpu_weights"))
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
        + f"\n\nattend() over 16,384 keys with 4 heads, forward + backward, needs at most {most} MiB above its inputs."
    )


def pages() -> dict[Path, str]:
    """Every page that holds measured numbers, as it should read."""
    readme, experiments = ROOT / "README.md", ROOT / "docs" / "experiments.md"
    text = fill(experiments.read_text(), "length-gen", comparisons_section("length-gen"))
    return {
        ROOT / "benchmarks" / "README.md": benchmarks_page(),
        readme: fill(readme.read_text(), "benchmarks", readme_section()),
        experiments: fill(text, "demo", comparisons_section("demo", headings=False)),
    }


def fill(text: str, name: str, section: str) -> str:
    """A page with a new section between its marks."""
    marked = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{section}\n{match[2]}", text)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)
        print("wrote", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
