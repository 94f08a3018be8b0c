"""The rows of `day5.py cache`, from one file or several, as a Markdown table and a picture.

    python scripts/report.py t4.jsonl [more.jsonl ...] [--plot out.png]

What differs between the rows (machine, dtype, threads ...) leads the table, or the file's name if
nothing else does; what all share stands below it. The picture (.png or .svg) needs matplotlib and
takes a few seconds. Exit status: 0, 1 for a file that holds something else, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from day5 import DTYPES, markdown_table

SOURCE = ("hardware", "device", "dtype", "threads", "pytorch", "python", "checkpoint_sha256")
NUMBERS = ("length", "naive_tokens_per_second", "cached_tokens_per_second", "speedup",
           "cache_bytes", "weight_bytes")
SECONDS = ("naive_seconds", "cached_seconds")


def is_row(row: object) -> bool:
    """Whether it has what the table and the picture are made from."""
    def positive(value: object) -> bool:
        return type(value) in (int, float) and 0 < value < 1e18

    return (isinstance(row, dict) and row.get("type") == "cache_benchmark"
            and all(isinstance(row.get(name), (str, int)) for name in SOURCE)
            and row["dtype"] in map(str, DTYPES.values()) and type(row.get("greedy_equal")) is bool
            and all(positive(row.get(name)) for name in NUMBERS)
            and all(isinstance(row.get(name), list) and row[name] and all(map(positive, row[name]))
                    for name in SECONDS))


def read_rows(path: Path) -> list[dict]:
    """The rows of one file. A last line that was cut off is named on stderr and left out.

    Raises ValueError, naming the file, if it is empty or holds anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text") from None
    rows, lines = [], text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines) and not text.endswith("\n"):
                print(f"report.py: {path}, line {number} is torn and left out", file=sys.stderr)
                continue
            row = None
        if not is_row(row):
            raise ValueError(f"{path}, line {number} is not a row of the cache stage")
        rows.append(row | {"dtype": row["dtype"].removeprefix("torch."),
                           "checkpoint_sha256": str(row["checkpoint_sha256"])[:12]})
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def fields_that_tell(rows: list[dict], names: tuple[str, ...]) -> list[str]:
    """Which of `names` differ between the rows, and as many more as tell every source apart.

    A source is one set-up (machine, dtype and so on) in one file.
    """

    def sources(names: tuple[str, ...]) -> int:
        return len({tuple(row[name] for name in names) for row in rows})

    everything = (*SOURCE, "file")
    for chosen in (names, (*names, "file"), everything):
        if sources(chosen) == sources(everything):
            break
    return [name for name in chosen if sources((name,)) > 1]


def report(rows: list[dict]) -> str:
    """The table, and below it what all its rows share."""
    telling = fields_that_tell(rows, SOURCE)
    shared = ", ".join(f"{name} {rows[0][name]}" for name in SOURCE if name not in telling)
    text = f"Median with [min-max]. Shared: {shared or 'nothing'}."
    return f"{markdown_table(rows, telling)}\n\n{textwrap.fill(text, 80)}"


def draw(rows: list[dict], path: Path) -> None:
    """Two panels: tokens per second and cache bytes, each against the length.

    A source has one colour and one marker in both; rows whose tokens differ show no speed.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    series: dict[str, list[dict]] = {}
    telling = fields_that_tell(rows, ("hardware", "device", "dtype", "threads"))
    for row in rows:
        label = ", ".join(f"{row[name]} threads" if name == "threads" else str(row[name])
                          for name in telling)
        series.setdefault(label, []).append(row)
    slopes = sorted({row["cache_bytes"] / row["length"] for row in rows}, reverse=True)

    naive, cached = {"linestyle": "--", "fillstyle": "none"}, {"linestyle": "-"}
    formulas = [{"color": "#777777", "linestyle": ("-", "-.", ":")[index % 3]}
                for index in range(len(slopes))]
    sources = [{"color": f"C{index % 10}", "marker": "os^Dv<>p"[index % 8], "markersize": 5}
               for index in range(len(series))]
    keys = [Line2D([], [], label=label, **style) for label, style in (
        ("cached", {"color": "#222222", "marker": "o", "markersize": 5, **cached}),
        ("naive", {"color": "#222222", "marker": "o", "markersize": 5, **naive}),
        *((f"formula: {slope:,.0f} bytes a token", style)
          for slope, style in zip(slopes, formulas)))]
    columns = len(keys)
    if len(series) > 1:  # the sources in a column of their own, at the left
        names = [Line2D([], [], linestyle="none", label=textwrap.fill(label, 60), **style)
                 for label, style in zip(series, sources)]
        blank = Line2D([], [], linestyle="none", label=" ")
        missing = len(keys) - len(names)
        keys = [*names, *[blank] * missing, *keys, *[blank] * -missing]
        columns = 2
    lines = sum(1 + key.get_label().count("\n") for key in keys[: len(keys) // columns])

    # The figure grows with its legend, so that the panels keep their size.
    figure = Figure(figsize=(8.6, 3.8 + 0.2 * lines), layout="constrained", facecolor="white")
    speed, size = figure.subplots(1, 2, width_ratios=(3, 2))
    for group, style in zip(series.values(), sources):
        group.sort(key=lambda row: row["length"])
        equal = [row for row in group if row["greedy_equal"]]
        for name, way in (("naive", naive), ("cached", cached)):
            runs = [(row["length"], row["length"] / seconds)
                    for row in equal for seconds in row[f"{name}_seconds"]]
            speed.plot([length for length, _ in runs], [rate for _, rate in runs],
                       **style | way | {"linestyle": "none"})
            speed.plot([row["length"] for row in equal],
                       [row[f"{name}_tokens_per_second"] for row in equal],
                       **style | way | {"marker": ""})
        size.plot([row["length"] for row in group], [row["cache_bytes"] / 2**20 for row in group],
                  zorder=3, **style | {"linestyle": "none", "fillstyle": "none"})
    for slope, style in zip(slopes, formulas):  # the stage has checked each row against it
        last = max(row["length"] for row in rows if row["cache_bytes"] / row["length"] == slope)
        size.plot([0, last], [0, slope * last / 2**20], **style)

    ticks: list[int] = []
    for length in sorted({row["length"] for row in rows}, reverse=True):
        if not ticks or ticks[-1] - length > 0.1 * ticks[0]:  # room for its digits
            ticks.append(length)
    for panel, title in ((speed, "Tokens per second"), (size, "Cache, MiB (marks: counted)")):
        panel.set_title(title, loc="left", fontsize=11)
        panel.set_xlabel("tokens generated")
        panel.set_xticks(ticks)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(axis="y", color="#dddddd")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=keys, ncols=columns, frameon=False, fontsize=9, alignment="left",
                  loc="outside lower center")
    figure.savefig(path, dpi=200)


def picture(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must end with .png or .svg, got {text!r}")
    return Path(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rows of `day5.py cache` as a table.")
    parser.add_argument("files", nargs="+", type=Path, metavar="rows.jsonl")
    parser.add_argument("--plot", type=picture, help="also draw to this .png or .svg file")
    args = parser.parse_args(argv)
    try:
        paths = {path.resolve(): path for path in args.files}
        if len(paths) < len(args.files):
            raise ValueError("a file is given twice")
        short = len({path.name for path in args.files}) == len(args.files)
        rows = [row | {"file": path.name if short else str(path)}
                for path in args.files for row in read_rows(path)]
        print(report(rows), flush=True)
        if args.plot:
            draw(rows, args.plot)
    except ModuleNotFoundError:
        print("report.py: --plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("report.py: interrupted")
