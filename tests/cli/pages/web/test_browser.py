"""Pages in a real browser: Chromium without a window, driven by Selenium (`make browser`).

With UCP_IMAGES=1 the pictures of docs/images are made anew.
"""

from __future__ import annotations

import json
import os
import shutil
from base64 import b64decode
from collections.abc import Callable, Iterator
from math import exp
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.cli.conftest import FIXTURES, Run
from tests.cli.pages.web.large import TENSORS, make_large_index
from tests.cli.pages.web.test_page import EVIL
from ucp_cli.pages.web.contents import inspect_contents
from ucp_cli.pages.web.write import write_page

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

pytestmark = pytest.mark.integration

IMAGES = Path(__file__).parents[4] / "docs" / "images"
PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1240,1000", "--force-device-scale-factor=1",
)  # fmt: skip
LLAMA = FIXTURES.parent / "megatron" / "llama-tp2-pp2-dp2-full" / "checkpoint"
LIMIT_MS, LIMIT_BYTES = 3000, 15_000_000


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    missing = [name for name, path in PROGRAMS.items() if path is None]
    if missing:
        pytest.skip(f"needs a browser: {' and '.join(missing)} not found (apt-get install chromium chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs Selenium (pip install selenium)")
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.binary_location = PROGRAMS["chromium"]
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(PROGRAMS["chromedriver"]))
    yield browser
    browser.quit()


Open = Callable[[Path], "Chrome"]


@pytest.fixture
def visit(chrome: Chrome) -> Iterator[Open]:
    """Opens a page, and checks at the end that it had no errors and fetched nothing."""
    requested: list[str] = []

    def go(page: Path) -> Chrome:
        chrome.get_log("performance")
        chrome.get_log("browser")
        chrome.get(page.as_uri())
        wait(chrome, lambda: chrome.execute_script("return document.documentElement.dataset.ready"))
        requested.append(page.as_uri())
        return chrome

    dark(chrome, on=False)
    chrome.set_window_size(1240, 1000)
    yield go
    events = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert urls == {requested[-1]}
    assert [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"] == []


def wait(chrome: Chrome, until: Callable[[], object]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(chrome, 60, poll_frequency=0.05).until(lambda _: until())


def find(chrome: Chrome, selector: str) -> list[WebElement]:
    return chrome.find_elements("css selector", selector)


def dark(chrome: Chrome, *, on: bool) -> None:
    media = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})


def type_keys(chrome: Chrome, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(chrome).send_keys(*keys).perform()


def search(chrome: Chrome, text: str, status: str) -> list[str]:
    """Names that a search shows, once the page says `status`."""
    (box,) = find(chrome, "#search")
    box.clear()
    box.send_keys(text)
    wait(chrome, lambda: find(chrome, "#found")[0].text == status)
    return [row.text for row in find(chrome, "#tree li > .row > :first-child")]


def chosen(chrome: Chrome) -> str:
    return find(chrome, "#param h3")[0].text


def picture(chrome: Chrome, selector: str, name: str, folder: Path) -> None:
    """Screenshot of an element and a margin; kept in docs/images if asked for."""
    (element,) = find(chrome, selector)
    place = chrome.execute_script(
        "const b = arguments[0].getBoundingClientRect(); return [b.x, b.y + scrollY, b.width, b.height]", element
    )
    clip = {"x": place[0] - 16, "y": place[1] - 16, "width": place[2] + 32, "height": place[3] + 32, "scale": 1}
    shot = chrome.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    file = folder / name
    file.write_bytes(b64decode(shot["data"]))
    assert file.stat().st_size > 5000, "not blank"
    if os.environ.get("UCP_IMAGES") and "-dark" not in name:
        IMAGES.mkdir(exist_ok=True)
        shutil.copyfile(file, IMAGES / name)


@pytest.fixture
def plan_page(ucp: Run, tmp_path: Path) -> Path:
    """A plan from Megatron to DeepSpeed, with a path that is the same on every machine."""
    page = tmp_path / "plan.html"
    ucp("plan", LLAMA, "--to", "deepspeed", "--topology", "dp=3,zero=3", "--html", page)
    page.write_text(page.read_text().replace(str(LLAMA), "/runs/llama"))
    return page


def test_search(visit: Open, plan_page: Path) -> None:
    chrome = visit(plan_page)
    before = find(chrome, "#found")[0].text
    total = before.split()[0]
    shown = search(chrome, "layers.1 FC1 weight", f"1 of {total} match")
    assert shown == ["decoder.layers.1.mlp.linear_fc1.weight"]
    assert {mark.text for mark in find(chrome, "#tree mark")} == {"layers.1", "fc1", "weight"}
    assert search(chrome, "no such name", f"0 of {total} match") == []
    (box,) = find(chrome, "#search")
    box.clear()
    box.send_keys(" ")
    wait(chrome, lambda: find(chrome, "#found")[0].text == before)


def test_selection_with_the_mouse(visit: Open, plan_page: Path) -> None:
    chrome = visit(plan_page)
    branch = next(row for row in find(chrome, "#tree [aria-expanded=false]") if "decoder" in row.text)
    branch.find_element("css selector", ".row").click()
    assert branch.get_attribute("aria-expanded") == "true"
    search(chrome, "linear_proj", f"4 of {find(chrome, '#found')[0].text.split()[0]} match")
    find(chrome, "#tree li")[2].click()
    assert chosen(chrome) == "decoder.layers.2.self_attention.linear_proj.weight"
    titles = [title.text for title in find(chrome, "#param figcaption strong")]
    assert titles == ["The source", "The target"]
    source, target = find(chrome, "#param svg")
    assert "tp 0" in source.text
    assert "dp 2" in target.text
    (canvas,) = find(chrome, "#holders-map canvas")
    canvas.click()
    assert find(chrome, "#holders-map [role=status]")[0].text.startswith("pp ")


def test_selection_with_the_keyboard(visit: Open, plan_page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    chrome = visit(plan_page)
    (box,) = find(chrome, "#search")
    box.send_keys("linear_proj")
    box.send_keys(Keys.ARROW_DOWN)
    type_keys(chrome, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
    assert chosen(chrome) == "decoder.layers.1.self_attention.linear_proj.weight"
    assert find(chrome, "#said")[0].get_attribute("textContent").startswith(chosen(chrome))
    (selected,) = find(chrome, "#tree [aria-selected=true]")
    assert selected == chrome.switch_to.active_element
    box.clear()
    box.send_keys(" ")
    wait(chrome, lambda: find(chrome, "#tree [aria-expanded]"))
    box.send_keys(Keys.ARROW_DOWN)
    type_keys(chrome, Keys.END, Keys.HOME)
    while not chrome.switch_to.active_element.get_attribute("aria-expanded"):
        type_keys(chrome, Keys.ARROW_DOWN)
    branch = chrome.switch_to.active_element
    type_keys(chrome, Keys.ARROW_RIGHT)
    assert branch.get_attribute("aria-expanded") == "true"
    type_keys(chrome, Keys.ARROW_RIGHT)
    assert int(chrome.switch_to.active_element.get_attribute("aria-level")) == 2
    type_keys(chrome, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert (chrome.switch_to.active_element, branch.get_attribute("aria-expanded")) == (branch, "false")
    chrome.execute_script("document.querySelector('#holders-map canvas').focus()")
    (status,) = find(chrome, "#holders-map [role=status]")
    type_keys(chrome, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    below = status.text
    type_keys(chrome, Keys.END)
    assert status.text != below
    type_keys(chrome, Keys.ENTER)
    assert chosen(chrome) in status.text


def test_everything_is_named_for_a_screen_reader(visit: Open, plan_page: Path) -> None:
    chrome = visit(plan_page)
    chrome.execute_cdp_cmd("Accessibility.enable", {})
    nodes = chrome.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    widgets = {"searchbox", "tree", "treeitem", "image", "application", "combobox"}
    needs_name = {*widgets, "button", "textbox", "link", "heading"}
    nameless = [
        node["role"]["value"]
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in needs_name and not node.get("name", {}).get("value")
    ]
    assert nameless == []
    assert widgets <= {node["role"]["value"] for node in nodes}


@pytest.mark.parametrize("is_dark", [False, True])
def test_texts_are_readable_in_both_themes(visit: Open, plan_page: Path, *, is_dark: bool) -> None:
    chrome = visit(plan_page)
    dark(chrome, on=is_dark)
    script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0]).trim()"
    colour = {
        name: luminance(chrome.execute_script(script, f"--{name}"))
        for name in ("back", "ink", "soft", "accent", "bad", "bad-back", "accent-back", "panel")
    }
    assert (colour["back"] < 0.05) is is_dark
    body = chrome.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert body == ("rgb(20, 23, 27)" if is_dark else "rgb(255, 255, 255)")
    for text, ground in (
        *((name, "back") for name in ("ink", "soft", "accent", "bad")),
        ("bad", "bad-back"), ("ink", "bad-back"), ("ink", "accent-back"), ("soft", "accent-back"), ("soft", "panel"),
    ):  # fmt: skip
        low, high = sorted((colour[text], colour[ground]))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb" (WCAG 2)."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_names_are_texts(visit: Open, ucp: Run, tmp_path: Path) -> None:
    torch.save({EVIL: torch.ones(2, 2), "b": torch.ones(2)}, tmp_path / "a.pt")
    ucp("inspect", tmp_path / "a.pt", "--html", tmp_path / "page.html")
    chrome = visit(tmp_path / "page.html")
    assert chosen(chrome) == EVIL
    assert "run" not in chrome.title.split()
    assert find(chrome, "img") == []
    assert search(chrome, "onerror", "1 of 2 match") == [EVIL]


def test_a_program_from_elsewhere_does_not_run(chrome: Chrome, ucp: Run, tmp_path: Path) -> None:
    """Were a name ever written as markup, the policy of the page would still stop it."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    ucp("inspect", tmp_path / "a.pt", "--html", tmp_path / "page.html")
    page = tmp_path / "page.html"
    page.write_text(page.read_text().replace("</main>", "<script>document.title='run'</script></main>"))
    chrome.get(page.as_uri())
    assert chrome.title.startswith("ucp inspect: ")
    assert "violates" in str(chrome.get_log("browser"))


def test_a_hundred_thousand_tensors(visit: Open, tmp_path: Path) -> None:
    page = tmp_path / "large.html"
    write_page(page, inspect_contents(make_large_index()))
    assert page.stat().st_size <= LIMIT_BYTES
    chrome = visit(page)
    paint = chrome.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
    ready = int(chrome.execute_script("return document.documentElement.dataset.ready"))
    assert paint <= LIMIT_MS
    print(f"{page.stat().st_size:,} bytes, first paint {paint:.0f} ms, tree and map {ready} ms")
    assert find(chrome, "#found")[0].text == f"{TENSORS:,} parameters"
    shown = search(chrome, "layers.63 experts.7.w2", f"1 of {TENSORS:,} match")
    assert shown == ["model.layers.63.mlp.experts.7.w2.weight"]
    find(chrome, "#tree li")[0].click()
    assert chosen(chrome) == shown[0]
    picture(chrome, "#holders", "holders.png", tmp_path)
    find(chrome, "#holders-map canvas")[0].click()
    first, last = find(chrome, "#holders-map [role=status]")[0].text.split()[1:4:2]
    assert int(last.replace(",", "")) - int(first.replace(",", "")) in (207, 208)
    find(chrome, "#holders button")[0].click()
    assert find(chrome, "#holders button")[0].get_property("disabled")


def pixel(chrome: Chrome) -> list[int]:
    """Colour of a cell of the map, which a rank of the first stage holds in part."""
    return chrome.execute_script(
        "const c = document.querySelector('#holders-map canvas');"
        "return [...c.getContext('2d').getImageData(120 + (c.width - 120) / 54, 9, 1, 1).data]"
    )


def test_pictures_of_a_plan(visit: Open, plan_page: Path, tmp_path: Path) -> None:
    chrome = visit(plan_page)
    search(chrome, "fc1", f"4 of {find(chrome, '#found')[0].text.split()[0]} match")
    find(chrome, "#tree li")[1].click()
    picture(chrome, "#parameters", "layouts.png", tmp_path)
    light_pixel = pixel(chrome)
    dark(chrome, on=True)
    wait(chrome, lambda: pixel(chrome) != light_pixel)
    picture(chrome, "#parameters", "layouts-dark.png", tmp_path)


def adam(squares: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(9.0), "exp_avg": torch.ones_like(squares), "exp_avg_sq": squares}


def test_pictures_of_experts(visit: Open, ucp: Run, tmp_path: Path) -> None:
    """Made-up moments: most experts near the median of their layer, a few starved, hot or dead."""
    random = Random(7)
    model, moments = {}, {}
    for layer in range(12):
        for expert in range(32):
            model[f"layers.{layer}.mlp.experts.{expert}.w1"] = torch.ones(2, 2)
            square = exp(random.gauss(0, 0.7)) * random.choices((1, 0.02, 40, 0), (92, 4, 3, 1))[0] * 1e-6
            moments[len(moments)] = adam(torch.full((2, 2), square))
        model[f"layers.{layer}.mlp.gate.weight"] = torch.rand(32, 4)
        moments[len(moments)] = adam(torch.ones(32, 4))
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": [*moments]}]
    torch.save({"model": model, "optimizer": {"state": moments, "param_groups": groups}}, tmp_path / "moe.pt")
    ucp("inspect", tmp_path / "moe.pt", "--experts", "--html", tmp_path / "e.html")
    chrome = visit(tmp_path / "e.html")
    (canvas,) = find(chrome, "#experts-map canvas")
    canvas.click()
    assert find(chrome, "#experts-map [role=status]")[0].text.startswith("layers.")
    picture(chrome, "#experts", "experts.png", tmp_path)
    dark(chrome, on=True)
    picture(chrome, "#experts", "experts-dark.png", tmp_path)
