"""Drive docs/kv-cache.html by keyboard in headless chromium and check what it shows.

    apt-get install chromium chromium-driver && pip install selenium==4.51.0
    python scripts/check_page.py [docs/kv-cache.png] [--data]

With a file name, it also draws README's picture: the page as it opens. With --data, it first writes
the page's data anew: the sentence and sizes of the model in checkpoints/ and the speeds of
docs/cache-cpu.jsonl. Do both after either has changed.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import re
import sys
from pathlib import Path

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "kv-cache.html"
SHORT_RUN, LONG_RUN = 9, 22  # steps
COMPUTER, PHONE, LANDSCAPE = (1280, 720), (390, 844), (844, 390)  # window sizes in pixels

LOOK = """
const box = (element) => {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return [left, top, right, bottom];
};
const all = (selector, of = document) => [...of.querySelectorAll(selector)];
const look = (mark) => {
  const style = getComputedStyle(mark);
  return { letter: mark.textContent, colour: style.backgroundColor + style.color,
    shape: style.clipPath + style.borderRadius + style.borderStyle };
};
const overflows = (element) => element && (element.scrollWidth > element.clientWidth
  || overflows(element.parentElement));
return {
  texts: Object.fromEntries(all("[id]").map((element) => [element.id, element.textContent])),
  first: all("h1, .lead, .controls").slice(0, 3).map(box),
  data: JSON.parse(document.getElementById("data").textContent),
  grids: all(".grid").filter((grid) => grid.checkVisibility()).map((grid) => ({
    id: grid.id, box: box(grid), overflows: overflows(grid),
    panel: box(grid.closest(".panel")),
    marks: all(".mark", grid).map(box),
    heads: all("thead tr", grid).map((row) => all("th", row).slice(1).map((cell) =>
      cell.textContent)),
    rows: all("tbody tr:not(.reach)", grid).map((row) => all("td", row).map((cell) =>
      cell.dataset.state + cell.textContent)),
    now: all(".now", grid).map((row) => ({ step: row.rowIndex - 1, box: box(row),
      cells: all(".mark", row).map(box) })),
    tips: all(".tip", grid).map(box),
    query: all("circle", grid).map(box),
    repeats: all(".repeats", grid).map((text) => text.textContent),
    looks: Object.fromEntries(all(".mark", grid).map((mark) =>
      [(mark.closest(".now") ? "now " : "past ") + mark.dataset.state, look(mark)])),
    legend: all(".legend .mark", grid.parentElement).map((mark) => mark.dataset.state),
    legendBox: box(grid.parentElement.querySelector(".legend")),
  })),
};
"""


def require(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: expected {expected}, found {found}")


def press(driver: Chrome, *keys: str, tab_to: str = "") -> None:
    for _ in range(60):
        if tab_to in ("", driver.execute_script("return document.activeElement.id")):
            return ActionChains(driver, duration=0).send_keys(*keys).perform()
        ActionChains(driver, duration=0).send_keys(Keys.TAB).perform()
    raise ValueError(f"the Tab key does not reach {tab_to}")


def resize(driver: Chrome, size: tuple[int, int]) -> None:
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def cells(driver: Chrome, selector: str) -> list[dict[str, str]]:
    return driver.execute_script("""return [...document.querySelectorAll(arguments[0])].map(
        cell => ({...cell.dataset, text: cell.textContent}))""", selector)


def texts(driver: Chrome) -> dict[str, str]:
    return driver.execute_script(LOOK)["texts"]


def check_quiet(driver: Chrome) -> None:
    require("console", [entry["message"] for entry in driver.get_log("browser")], [])
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in events
            if event["method"] == "Network.requestWillBeSent"} - {driver.current_url}
    require("requests", [url for url in urls if not url.startswith("data:")], [])


def model_counts() -> dict[bool, list[dict[str, int]]]:
    """What octlm itself computes up to each step, from step 0, with the cache and without."""
    import torch

    from octlm import Decoder, DecoderConfig

    sizes = {"context_length": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "d_model": 8}
    model = Decoder(DecoderConfig(vocab_size=8, d_ff=8, **sizes)).eval()
    projected = []
    model.blocks[0].attention.key.register_forward_hook(
        lambda module, given, result: projected.append(given[0].shape[1]))
    counts = {}
    for cached in (True, False):
        total = {"projections": 0, "repeats": 0, "keys": 0}
        counts[cached] = [dict(total)]
        projected.clear()
        for step, _ in enumerate(model.stream(torch.tensor([[1]]), LONG_RUN, cached), start=1):
            new = projected.pop()
            total["projections"] += new
            total["repeats"] += new - 1
            total["keys"] += sum(range(step - new + 1, step + 1))  # each query: up to its own
            counts[cached].append(dict(total))
    return counts


def visible(tokens: list[str]) -> list[str]:
    return [re.sub("^ ", "·", token).replace("\n", "↵") for token in tokens]


def check_numbers(page: dict, step: int, cached: bool, counts: dict) -> None:
    from octlm import DecoderConfig, kv_cache_bytes

    config = dict(page["data"]["config"])
    element_size, head_size = config.pop("bytes_per_element"), config.pop("head_size")
    sizes = DecoderConfig(vocab_size=2, d_model=head_size * config["n_heads"], **config)
    with_cache, naive = counts[True][step], counts[False][step]
    require("repeats with the cache", with_cache["repeats"], 0)
    expected = {
        "step": step, "total-cached": with_cache["projections"],
        "total-naive": naive["projections"], "total-again": naive["repeats"],
        "projections-cached": with_cache["projections"],
        "projections-naive": naive["projections"], "repeats": naive["repeats"],
        "keys-cached": with_cache["keys"], "keys-naive": naive["keys"],
        "cache-bytes": kv_cache_bytes(sizes, step, element_size)}
    for name, number in expected.items():
        require(f"step {step}, {name}", page["texts"][name], f"{number:,}")
    said = (f"1 position computed, {step - 1} read from the cache." if cached else
            f"{step} position{'s' * (step > 1)} computed, {step - 1} of them again.")
    fed, chosen = visible(page["data"]["tokens"])[step - 1 : step + 1]
    require("status", page["texts"]["status"],
            f"Step {step}: {said} After “{fed}” the model chooses “{chosen}”.")


def check_grid(grid: dict, step: int, steps: int, tokens: list[str]) -> None:
    """Its cells, its legend, and what is drawn from the new query to the saved keys."""
    name = f"step {step}, {grid['id']}"
    positions = [str(position) for position in range(steps)]
    require(f"{name}, tokens and positions", grid["heads"], [visible(tokens[:steps]), positions])
    past = "readR" if grid["id"] == "cached-grid" else "againA"
    for number, found in enumerate(grid["rows"], start=1):
        shown = [past] * (number - 1) + ["computedC"] if number <= step else ["ahead"] * number
        require(f"{name}, row {number}", found, shown + ["later"] * (steps - number))
    shown = {look.split()[1] for look in grid["looks"]} - {"ahead", "later"}
    shown |= {"query"} if grid["query"] else set()
    require(f"{name}, legend", sorted(grid["legend"]), sorted(shown))
    saved = step - 1 if grid["id"] == "cached-grid" else 0
    require(f"{name}, query drawn", len(grid["query"]), int(saved > 0))
    require(f"{name}, keys reached", len(grid["tips"]), saved)
    keys = grid["now"][0]["cells"][:step]
    for drawn, key in zip(grid["query"] + grid["tips"], [keys[-1], *keys], strict=False):
        require(f"{name}, drawn below its cell", 0 <= drawn[1] - key[3] + 3
                and abs(drawn[0] + drawn[2] - key[0] - key[2]) < 4, True)
    repeats = [f"{step - 1} again"] if saved == 0 and step > 1 else []
    require(f"{name}, bracket", grid["repeats"], repeats)


def inside(box: list[float], size: tuple[float, float]) -> bool:
    return box[0] >= 0 and box[1] >= 0 and box[2] <= size[0] and box[3] <= size[1]


def check_room(page: dict, step: int, size: tuple[int, int], steps: int) -> None:
    """The current row is in view, no grid is wider than its place; a short run fits a screen."""
    name = f"step {step} of {steps} at {size[0]}x{size[1]}"
    for grid in page["grids"]:
        require(f"{name}, current row", [row["step"] for row in grid["now"]], [step])
        current = [grid["now"][0]["box"], *grid["query"]]
        require(f"{name}, current row in view", [box for box in current if not inside(box, size)],
                [])
        require(f"{name}, controls in view", inside(page["first"][2], size), True)
        require(f"{name}, grid overflows sideways", grid["overflows"]
                or max(box[2] for box in [grid["box"], *grid["marks"]]) > grid["panel"][2], False)
        if steps == SHORT_RUN and size != LANDSCAPE:
            boxes = [*page["first"], grid["box"], grid["legendBox"]]
            require(f"{name}, outside the first screen",
                    [box for box in boxes if not inside(box, size)], [])


def check_looks(grids: list[dict], when: str) -> None:
    """The three kinds of cells differ in letter, colour and shape."""
    looks = {name.split()[1]: look for grid in grids for name, look in grid["looks"].items()
             if name.split()[0] == when}
    for part in ("letter", "colour", "shape"):
        found = {kind: look[part] for kind, look in looks.items()}
        require(f"kinds of cells told by their {part} ({when}) in {found}",
                len({found.get(kind) for kind in ("computed", "again", "read")} - {None}), 3)


def check_steps(driver: Chrome, size: tuple[int, int], counts: dict) -> None:
    """Both runs, with the cache and without, one arrow key at a time."""
    resize(driver, size)
    driver.get(PAGE.as_uri())
    page = driver.execute_script(LOOK)
    require("opening step", page["texts"]["step"], "3")
    if size != LANDSCAPE:
        check_room(page, 3, size, SHORT_RUN)
    if size == COMPUTER:
        check_looks(page["grids"], "now")
        check_looks(page["grids"], "past")
    for steps in (SHORT_RUN, LONG_RUN):
        for cached in (True, False):
            driver.execute_script("scrollTo(0, 0)")  # the Tab key may have moved it
            press(driver, *[Keys.ARROW_LEFT] * steps)
            for step in range(1, steps + 1):
                page = driver.execute_script(LOOK)
                shown = ["cached-grid"] * (cached or size == COMPUTER)
                shown += ["naive-grid"] * (not cached or size == COMPUTER)
                require("grids shown", [grid["id"] for grid in page["grids"]], shown)
                check_numbers(page, step, cached, counts)
                for grid in page["grids"]:
                    check_grid(grid, step, steps, page["data"]["tokens"])
                check_room(page, step, size, steps)
                press(driver, Keys.ARROW_RIGHT)
            press(driver, Keys.SPACE, tab_to="cache-switch")
            if size == COMPUTER and cached:
                was = page["grids"][1]["looks"]
                lit = driver.execute_script(LOOK)["grids"][1]["looks"]
                require("repeated cells light up without the cache",
                        was["past again"] != lit["past again"] == lit["now again"], True)
        press(driver, Keys.SPACE, tab_to="long-run")


def check_controls(driver: Chrome) -> None:
    for key, control, step in ((Keys.ENTER, "next", 4), (Keys.ENTER, "back", 3),
                               (Keys.END, "step-slider", SHORT_RUN), (Keys.ENTER, "first", 1)):
        press(driver, key, tab_to=control)
        require(f"step after {control}", texts(driver)["step"], str(step))


def check_bytes(driver: Chrome) -> None:
    from octlm import DecoderConfig, kv_cache_bytes

    config = driver.execute_script(LOOK)["data"]["config"]
    heads, layers, head_size = config["n_kv_heads"], config["n_layers"], config["head_size"]
    for typed in ("3", "", "0", "1.5", str(4 * heads)):
        press(driver, *[Keys.BACKSPACE] * 4, typed, tab_to="n_kv_heads")
        shown, right = texts(driver), typed == str(4 * heads)
        require(f"no error for {typed!r} heads", shown["config-error"] == "", right)
    sizes = DecoderConfig(vocab_size=2, n_layers=layers, n_heads=4 * heads, n_kv_heads=4 * heads,
                          d_model=4 * heads * head_size)
    step = int(shown["step"])
    expected = kv_cache_bytes(sizes, step, config["bytes_per_element"])
    require("bytes", shown["cache-bytes"], f"{expected:,}")
    require("formula", shown["formula"].endswith(f" = {expected:,} bytes"), True)
    require("4 times the model's heads", f" 4 times the model's {heads} " in shown["heads"], True)


def check_masks(driver: Chrome, cached: int, new: int) -> None:
    """Right: column <= absolute row. Wrong: aligned to the upper left. All columns are in view."""
    for name, shift in {"right-mask": cached, "upper-left-mask": 0}.items():
        seen = [f"{row}{column}" for row in range(new) for column in range(row + shift + 1)]
        for key, yes in {"sees": "true", "text": "sees"}.items():
            require(f"{name}, row and column of what is seen", [cell["row"] + cell["column"]
                    for cell in cells(driver, f"#{name} td") if cell[key] == yes], seen)
        right = driver.execute_script("""return Math.max(...[...document.querySelectorAll(
            arguments[0])].map(cell => cell.getBoundingClientRect().right))""", f"#{name} td")
        require(f"{name}, columns in view", right <= PHONE[0], True)
    for row, item in enumerate(cells(driver, "#missed li")):
        position = cached + row
        require("missed", re.findall(r"\d+", item["text"]),
                [str(number) for number in (position, *range(position))])


def check_scores(driver: Chrome) -> None:
    press(driver, Keys.ENTER, tab_to="turn-again")
    found = [cell["text"].replace("−", "-") for cell in cells(driver, "#dials td")][-10:]
    angles = [20 * (4 - turns * key) for turns in (1, 2) for key in range(5)]
    require("scores", found, [f"{math.cos(math.radians(angle)):.2f}" for angle in angles])


def check(driver: Chrome) -> None:
    counts = model_counts()
    for size in (COMPUTER, PHONE, LANDSCAPE):
        print(f"at {size[0]}x{size[1]}", file=sys.stderr)
        check_steps(driver, size, counts)
        check_quiet(driver)
    resize(driver, PHONE)
    driver.get(PAGE.as_uri())
    check_controls(driver)
    check_bytes(driver)
    check_masks(driver, 5, 3)
    press(driver, Keys.END, tab_to="cached")
    press(driver, Keys.END, tab_to="fresh")
    check_masks(driver, 8, 5)
    check_scores(driver)
    for width, height in (PHONE, COMPUTER):
        resize(driver, (width, height))
        require(f"width of the page at {width} pixels", driver.execute_script(
            "return document.documentElement.scrollWidth"), width)
    check_quiet(driver)


def data_block() -> str:
    """The page's data, from the shipped model and the rows of README's table."""
    import sentencepiece
    import torch

    import octlm

    model = octlm.load_checkpoint(ROOT / "checkpoints" / "octlm-26m.pt")
    tokenizer = sentencepiece.SentencePieceProcessor(
        model_file=str(ROOT / "checkpoints" / "tokenizer.model"))
    ids = model.generate_cached(torch.tensor([[tokenizer.bos_id()]]), LONG_RUN)[0, 1:].tolist()
    tokens = ["BOS", *(tokenizer.id_to_piece(token).replace("\u2581", " ") for token in ids)]
    lines = [", ".join(map(json.dumps, tokens[at : at + 9])) for at in range(0, len(tokens), 9)]
    config = {name: getattr(model.config, name) for name in (
        "n_layers", "n_heads", "n_kv_heads", "head_size")} | {"bytes_per_element": 2}
    text = (ROOT / "docs" / "cache-cpu.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    first = rows[0]
    on = (f"{first['hardware'].replace('(R)', '')}, {first['threads']} threads, "
          f"{first['dtype'].removeprefix('torch.')}, PyTorch {first['pytorch'].split('+')[0]}, "
          f"{first['time'][:10]}")
    speedups = ", ".join(json.dumps({"length": row["length"], "speedup": round(row["speedup"], 2)})
                         for row in rows)
    indent = ",\n" + " " * 13
    return f"""{{
  "tokens": [{indent.join(lines)}],
  "config": {json.dumps(config).replace(', "bytes', "," + chr(10) + " " * 13 + '"bytes')},
  "measured": {{"on": {json.dumps(on)},
               "speedups": [{speedups.replace("}, {", "}," + chr(10) + " " * 28 + "{")}]}}
}}"""


def write_data() -> None:
    page = PAGE.read_text(encoding="utf-8")
    start = page.index('id="data">') + len('id="data">')
    end = page.index("</script>", start)
    PAGE.write_text(f"{page[:start]}\n{data_block()}\n{page[end:]}", encoding="utf-8")


def draw(driver: Chrome, picture: str) -> None:
    resize(driver, COMPUTER)
    driver.get(PAGE.as_uri())
    bottom = driver.execute_script(LOOK)["grids"][0]["legendBox"][3]
    clip = {"x": 0, "y": 0, "width": COMPUTER[0], "height": bottom + 20, "scale": 1.5}
    drawn = driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
    Path(picture).write_bytes(base64.b64decode(drawn["data"]))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drive docs/kv-cache.html and check it.")
    parser.add_argument("picture", nargs="?", help="a file for README's picture, .png")
    parser.add_argument("--data", action="store_true",
                        help="first write the page's data anew from the model and the rows")
    args = parser.parse_args(argv)
    print("Drives docs/kv-cache.html in chromium; about a minute.", file=sys.stderr)
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        if args.data:
            write_data()
        with Chrome(options, ChromeService("/usr/bin/chromedriver")) as driver:
            check(driver)
            if args.picture:
                draw(driver, args.picture)
    except KeyboardInterrupt:
        print("check_page.py: interrupted", file=sys.stderr)
        return 1
    except (ValueError, KeyError, OSError, RuntimeError, WebDriverException) as error:
        print(f"{PAGE.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(f"{PAGE.name}: opening step, room, counts, cells, masks and scores are right; "
          "no console error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
