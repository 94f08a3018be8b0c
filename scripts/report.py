"""The rows of `day5.py cache`, from one file or several, as a Markdown table and a picture.

    python scripts/report.py t4.jsonl [more.jsonl ...] [--plot out.png]

What differs between the rows (machine, dtype, threads ...) leads the table; what all share stands
below it. The picture (.png or .svg) needs matplotlib. Exit status: 0, 1 for a file that holds
something else, 2 for wrong arguments.
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


def differing(rows: list[dict]) -> list[str]:
    return [name for name in SOURCE if len({row[name] for row in rows}) > 1]


def report(rows: list[dict]) -> str:
    """The table, and below it what all its rows share."""
    varying = differing(rows)
    shared = ", ".join(f"{name} {rows[0][name]}" for name in SOURCE if name not in varying)
    text = f"Median with [min-max]. Shared: {shared or 'nothing'}."
    return f"{markdown_table(rows, varying)}\n\n{textwrap.fill(text, 80)}"


def draw(rows: list[dict], path: Path) -> None:
    """Two panels: tokens per second and cache bytes, each against the length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(8.6, 4.2), layout="constrained", facecolor="white")
    speed, size = figure.subplots(1, 2, width_ratios=(3, 2))
    varying = differing(rows)
    series: dict[tuple, list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        series.setdefault(tuple(str(row[name]) for name in varying), []).append(row)
    for index, (source, group) in enumerate(series.items()):
        marker = "os^Dv<>p"[index % 8]
        right = [row for row in group if row["greedy_equal"]]
        # Blue and orange differ in lightness, so in grey too; a hollow mark is the naive path.
        for name, color, fill in (("cached", "#1f5fa8", "full"), ("naive", "#c96a12", "none")):
            label = ", ".join((name, *source))
            style = {"color": color, "marker": marker, "fillstyle": fill, "markersize": 5}
            dots = [(row["length"], row["length"] / seconds)
                    for row in right for seconds in row[f"{name}_seconds"]]
            speed.plot(*zip(*dots), linestyle="none", **style) if dots else None
            speed.plot([row["length"] for row in right],
                       [row[f"{name}_tokens_per_second"] for row in right], color=color,
                       linestyle="-" if name == "cached" else "--")
            speed.plot([], [], linestyle="-" if name == "cached" else "--", label=label, **style)
        # The formula is a line through the origin; the stage has checked each row against it.
        last = group[-1]
        slope = last["cache_bytes"] / last["length"]
        size.plot([row["length"] for row in group], [row["cache_bytes"] / 2**20 for row in group],
                  linestyle="none", marker=marker, color="#222222", markersize=6, zorder=3,
                  label=", ".join(("counted", *source)))
        size.plot([0, last["length"]], [0, last["cache_bytes"] / 2**20], color="#777777", zorder=2,
                  label=f"formula: {slope:,.0f} bytes a token")
    for panel, title in ((speed, "Tokens per second"), (size, "Cache, MiB")):
        panel.set_title(title, loc="left", fontsize=11)
        panel.set_xlabel("tokens generated")
        panel.set_xticks(sorted({row["length"] for row in rows}))
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.grid(axis="y", color="#dddddd")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=9, ncols=2 if panel is speed else 1,
                     loc="upper center", bbox_to_anchor=(0.5, -0.18))
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
        rows = [row for path in args.files for row in read_rows(path)]
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
    sys.exit(main())
