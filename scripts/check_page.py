"""Drive docs/kv-cache.html by keyboard in headless chromium and check what it shows.

    apt-get install chromium chromium-driver && pip install selenium==4.51.0
    python scripts/check_page.py [docs/kv-cache.png]

With a file name, it also draws README's picture: the first view at step 9.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kv-cache.html"


def require(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"{what}: expected {expected}, found {found}")


def press(driver: Chrome, *keys: str, tab_to: str = "") -> None:
    for _ in range(40):
        if tab_to in ("", driver.execute_script("return document.activeElement.id")):
            return ActionChains(driver).send_keys(*keys).perform()
        ActionChains(driver).send_keys(Keys.TAB).perform()
    raise ValueError(f"the Tab key does not reach {tab_to}")


def cells(driver: Chrome, selector: str) -> list[dict[str, str]]:
    return driver.execute_script("""return [...document.querySelectorAll(arguments[0])].map(
        cell => ({...cell.dataset, id: cell.id, text: cell.textContent}))""", selector)


def texts(driver: Chrome) -> dict[str, str]:
    return {cell["id"]: cell["text"] for cell in cells(driver, "[id]")}


def check_quiet(driver: Chrome) -> None:
    require("console", [entry["message"] for entry in driver.get_log("browser")], [])
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in events
            if event["method"] == "Network.requestWillBeSent"} - {driver.current_url}
    require("requests", [url for url in urls if not url.startswith("data:")], [])


def check_step(driver: Chrome, step: int, cached: bool, per_position: int) -> None:
    shown, naive, computed = texts(driver), sum(range(step + 1)), 1 if cached else step
    for name, number in {"step": step, "projections-cached": step, "projections-naive": naive,
                         "keys-read": naive, "cache-bytes": per_position * step}.items():
        require(f"step {step}, {name}", shown[name], f"{number:,}")
    said = f"Step {step}: {computed} position{'s' * (computed > 1)} computed, {step - computed} r"
    require("status", shown["status"][:len(said)], said)
    for row in range(1, step + 1):
        line = cells(driver, f"#grid [data-step='{row}']")
        past = ["Rread" if cached else "Ccomputed"] * (row - 1)
        expected = [*past, "Ccomputed", *["later"] * (len(line) - row)]
        found = [cell["text"] + cell["state"] for cell in line]
        require(f"step {step}, cells of row {row}", found, expected)


def check(driver: Chrome) -> None:
    driver.get(PAGE.as_uri())
    check_quiet(driver)
    config = json.loads(texts(driver)["data"])["config"]
    heads, per_position = config["n_kv_heads"], 2 * math.prod(config.values()) // config["n_heads"]
    for cached in (True, False):
        check_step(driver, 1, cached, per_position)
        press(driver, *[Keys.ARROW_RIGHT] * 10)
        check_step(driver, 11, cached, per_position)
        press(driver, Keys.SPACE, *[Keys.ARROW_LEFT] * 10, tab_to="cache-switch")
    for typed in ("3", "", "0", "1.5", str(4 * heads)):
        press(driver, *[Keys.BACKSPACE] * 4, typed, tab_to="n_kv_heads")
        shown, right = texts(driver), typed == str(4 * heads)
        require(f"no error for {typed!r} heads", shown["config-error"] == "", right)
        require("bytes", shown["cache-bytes"], f"{4 * per_position:,}" if right else "–")
    require("4 times the model's heads", f" 4 times the model's {heads} " in shown["heads"], True)
    for name, shift in {"right-mask": 5, "upper-left-mask": 0}.items():  # 5 cached, 3 new
        right = [f"{row}{column}" for row in range(3) for column in range(row + shift + 1)]
        for key, yes in {"sees": "true", "text": "sees"}.items():
            require(f"{name}, row and column of what is seen", [cell["row"] + cell["column"]
                    for cell in cells(driver, f"#{name} td") if cell[key] == yes], right)
    for row, item in enumerate(cells(driver, "#missed li")):
        require("missed", re.findall(r"\d", item["text"]), [*f"{5 + row}01234567"[:6 + row]])
    press(driver, Keys.ENTER, tab_to="turn-again")
    found = [cell["text"].replace("−", "-") for cell in cells(driver, "#dials td")][-10:]
    angles = [20 * (4 - turns * key) for turns in (1, 2) for key in range(5)]
    require("scores", found, [f"{math.cos(math.radians(angle)):.2f}" for angle in angles])
    for width in (390, 1280):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        require(f"width of the page at {width} pixels", driver.execute_script(
            "return document.documentElement.scrollWidth"), width)
    check_quiet(driver)


def draw(driver: Chrome, picture: str) -> None:
    size = {"width": 1280, "height": 740, "deviceScaleFactor": 1.5, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(PAGE.as_uri())
    press(driver, *[Keys.ARROW_RIGHT] * 8)
    driver.execute_script("document.querySelector('.controls').scrollIntoView()")
    driver.save_screenshot(picture)


def main() -> int:
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        with Chrome(options, ChromeService("/usr/bin/chromedriver")) as driver:
            check(driver)
            if sys.argv[1:]:
                draw(driver, sys.argv[1])
    except (ValueError, KeyError, WebDriverException) as error:
        print(f"{PAGE.name}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(f"{PAGE.name}: counts, cells, masks, scores and widths are right; no console error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
