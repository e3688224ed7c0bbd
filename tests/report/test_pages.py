"""The HTML reports: their structure, and what a real browser makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser, browsing, chromium_path
from typer.testing import CliRunner
from waiting import PATIENCE_S

from paraplan.cli.main import app

GPT2 = ["gpt2", "--seq-len", "1024", "--global-batch", "64"]
MACHINE = ["--profile", "rtx-3090-x2", "--cp", "1", "--tp", "1"]
COMMANDS = {
    "recommended": ["recommend", *GPT2, *MACHINE, "--tokens", "1e9", "--price", "2", "--mtbf", "8h", "--explain"],
    "pipeline": ["estimate", *GPT2, "--profile", "dgx-h100", "--dp", "2", "--pp", "4", "--virtual-stages", "3"],
    "one-rank": ["estimate", *GPT2, "--profile", "dgx-h100"],
    "nothing-fits": ["recommend", "llama-3-8b", *GPT2[1:], "--profile", "1xrtx-3090", "--offload", "none"],
}
STATUS = {"nothing-fits": 1}
VOID = {"meta", "link", "br", "path", "line", "rect", "circle"}


@dataclass
class Page(HTMLParser):
    """What a document holds: headings in their order, identifiers, links, and elements that are never closed."""

    headings: list[int] = field(default_factory=list)
    identifiers: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    drawings: list[dict[str, str | None]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "svg":
            self.drawings.append(values)
        if values.get("id"):
            self.identifiers.append(str(values["id"]))
        if tag == "a":
            self.targets.append(str(values["href"]))
        elif tag in ("script", "img", "iframe", "link"):
            self.loaded.append(str(values.get("src") or values.get("href") or tag))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.opened.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    found = {}
    for name, words in COMMANDS.items():
        found[name] = folder / f"{name}.html"
        verbose = ["-v"] if name == "recommended" else []
        result = CliRunner().invoke(app, [*words, *verbose, "--html", str(found[name])], env={"COLUMNS": "200"})
        assert result.exit_code == STATUS.get(name, 0), result.output
        assert f"report: {found[name]}" in result.stderr
        found[name].with_suffix(".txt").write_text(result.stdout)
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium_path()
    if path is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with browsing(path) as opened:
        yield opened


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text())
    return page


@pytest.mark.parametrize("name", COMMANDS)
def test_a_report_is_well_formed_and_needs_nothing_from_elsewhere(name: str, reports: dict[str, Path]) -> None:
    page = read(reports[name])
    assert page.opened == []
    assert page.loaded == ["data:,"]
    assert len(page.identifiers) == len(set(page.identifiers))
    assert {target.removeprefix("#") for target in page.targets} <= set(page.identifiers)
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", reports[name].read_text()).replace("http-equiv", "")
    assert reports[name].stat().st_size < 1_500_000


@pytest.mark.parametrize("name", COMMANDS)
def test_headings_are_in_order_and_drawings_have_names(name: str, reports: dict[str, Path]) -> None:
    page = read(reports[name])
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in zip(page.headings, page.headings[1:], strict=False))
    assert page.drawings
    assert all(drawing.get("aria-label") for drawing in page.drawings)


def test_the_report_says_what_the_terminal_says(reports: dict[str, Path]) -> None:
    printed = reports["recommended"].with_suffix(".txt").read_text()
    text = read(reports["recommended"]).text
    plan = re.search(r"Plan +(.+)\n +(.+)", printed)
    assert plan is not None
    assert f"Recommended: {plan[2].strip()}" in text
    assert f"{plan[1].strip()}." in text
    reached = re.search(r"a step \((.+?)\)", printed)
    assert reached is not None
    assert f"Step {reached[1]}" in text
    for line in printed.split("Decision tree\n")[1].split("\n\n")[0].splitlines():
        assert line.strip() in text
    for heading in ("Expected goodput", "Why the best beats the second", "What would help", "Ruled out"):
        printed_section = printed.split("\n" + heading)[1].split("\n\n")[0].lower()
        assert [word for word in re.findall(r"[\w.%+-]+", printed_section) if word not in text.lower()] == [], heading
    for word in ("1.00 B tokens", "Scaling", "cost of 1e9 tokens", "Ruled out"):
        assert word in text


def test_the_report_of_nothing_that_fits_says_what_is_lacking(reports: dict[str, Path]) -> None:
    text = read(reports["nothing-fits"]).text
    for word in ("no plan fits", "Nearest: ", "What makes it fit", "--train lora:r=16", "too much"):
        assert word in text


def test_a_table_stands_for_the_course_of_a_pipeline(reports: dict[str, Path]) -> None:
    text = read(reports["pipeline"]).text
    for rank in range(4):
        assert f"rank {rank}" in text
    assert "12 stages under interleaved_1f1b" in text or "12 stages under 1f1b" in text
    assert "Every second chunk of a rank is paler." in text


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("is_dark", [False, True])
def test_a_browser_shows_it_without_errors_or_requests(
    name: str, width: int, is_dark: bool, reports: dict[str, Path], browser: Browser
) -> None:
    browser.open(reports[name], width=width, is_dark=is_dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 24, 31)" if is_dark else "rgb(255, 255, 255)")
    shown = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width > 0)"
    assert browser.evaluate(f"{shown}.length") >= 1
    # Letters of charts are drawn at their own size, or nearly so: legible.
    assert browser.evaluate(f"Math.min(...{shown}.map(one => one.getScreenCTM().a))") >= 0.8
    entries = [each["entry"] for each in browser.named("Log.entryAdded")]
    assert [entry["text"] for entry in entries if entry["level"] == "error"] == []
    assert browser.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []
    urls = [each["request"]["url"] for each in browser.named("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith("data:")] == [reports[name].as_uri()]


def test_a_screen_reader_finds_names_for_charts_tables_and_regions(reports: dict[str, Path], browser: Browser) -> None:
    for name, path in reports.items():
        browser.open(path, width=1280)
        browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = {node["role"]["value"]: node for node in nodes if "role" in node}
        assert {"main", "heading", "table"} <= set(roles), name
        for node in nodes:
            if node.get("role", {}).get("value") in ("image", "img", "graphics-document", "region", "link"):
                assert node.get("name", {}).get("value"), (name, node)


def test_the_keyboard_reaches_a_plan_and_its_row(reports: dict[str, Path], browser: Browser) -> None:
    browser.open(reports["recommended"], width=1280)
    for _ in range(20):
        browser.press("Tab")
        name = browser.evaluate("document.activeElement.getAttribute('href')")
        if name is not None:
            break
    assert str(name).startswith("#plan-")
    shown = browser.evaluate(
        "[...document.querySelectorAll('.reading span')].filter(one => one.offsetWidth > 0).length"
    )
    assert shown == 1
    browser.press("Enter")
    assert browser.evaluate("document.querySelector('tr:target') !== null")


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / 'x<img src=q onerror="alert(1)">&\udcff'
    folder.mkdir()
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    report = tmp_path / "report.html"
    result = CliRunner().invoke(
        app, ["estimate", str(folder), "--profile", "dgx-h100", "--html", str(report), "--json"]
    )
    assert result.exit_code == 0, result.stderr
    page = read(report)
    assert page.loaded == ["data:,"]
    assert 'x<img src=q onerror="alert(1)">&?' in page.text


def test_an_unwritable_path_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    for words in (COMMANDS["recommended"], COMMANDS["one-rank"]):
        result = CliRunner().invoke(app, [*words, "--html", str(tmp_path / "missing" / "report.html")])
        assert result.exit_code == 2
        assert "cannot write" in result.stderr
        assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_without_the_charting_library_the_page_has_its_tables_and_says_what_draws_charts(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    program = (
        "import sys; sys.modules['vl_convert'] = None; from paraplan.cli.main import main; "
        f"sys.argv = ['paraplan', *{COMMANDS['one-rank']!r}, '--html', {str(path)!r}]; main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert finished.returncode == 0, finished.stderr
    page = path.read_text()
    assert "not drawn, pip install vl-convert-python does" in page
    assert "<table" in page
    assert "aria-roledescription" not in page
