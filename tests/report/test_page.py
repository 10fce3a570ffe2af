"""The page says what the data says, asks for nothing from outside, and stands in a real browser."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread
from report_examples import make_all_runs, make_inspection, make_run

from compactattn.report.page import POLICY, write_report

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = make_all_runs(seeds=2)
    free = [dataclasses.replace(row, mode="free-running") for row in runs[0].evaluation]
    runs[0] = dataclasses.replace(runs[0], evaluation=[*runs[0].evaluation, *free])
    out = tmp_path_factory.mktemp("report") / "deep"
    assert write_report(runs, out, [make_inspection("gaussian"), make_inspection("sparsemax")]) == out / "index.html"
    return out


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "index.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Every element's name and attributes, and which were left open."""

    VOID = ("meta", "link", "br", "img", "hr")

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_opens_with_the_main_finding(page):
    (headline,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert re.fullmatch(
        r"At \d+× the training length, .* of MQMTAR samples exactly right; Gaussian attention gets .*\.", headline
    )
    assert page.index("<h1>") < page.index("<svg") < page.index("<table") < page.index("How it was made</h2>")


def test_a_page_without_a_look_inside_says_why(page, tmp_path):
    write_report([make_run()], tmp_path)
    for name in ("index.html", "report.md"):
        assert "Attention from inside is not shown: it takes the weights" in (tmp_path / name).read_text(encoding="utf-8")
    assert "is not shown" not in page


def test_every_element_is_closed_and_every_id_is_one(page):
    elements = Elements(page)
    assert elements.open == []
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for tag, attributes in elements.found if tag == "a"]
    assert len(links) == 6
    assert {link[1:] for link in links} <= set(ids)


def test_nothing_on_the_page_comes_from_elsewhere(page):
    text = re.sub(r'"data:image/png;base64,[^"]*"', "", page)
    assert len(text) > len(page) / 2
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
    tags = {tag for tag, _ in Elements(page).found}
    assert not tags & {"script", "iframe", "img", "object", "embed", "video", "audio"}
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_every_rule_of_the_style_sheet_is_closed(page):
    style = page[page.index("<style>") : page.index("</style>")]
    depth = 0
    for character in style:
        depth += (character == "{") - (character == "}")
        assert 0 <= depth <= 2
    assert depth == 0


def test_how_it_was_made_is_told(page):
    made = page[page.index('id="made"') :]
    for fact in (
        "0123456789",
        "A GPU",
        "2,000",
        "30 min",
        "2.11.0",
        "compactattn train length-gen --task mqmtar &lt;&amp;&gt;",
    ):
        assert fact in made, fact
    assert made.count("<details>") == 33 + 2
    assert "195,312" in page


def test_a_map_says_how_its_head_was_chosen(page):
    assert "the head that looks at the fewest keys" in page


def test_a_run_evaluated_otherwise_than_it_ended_says_so(tmp_path):
    run = make_run({64: 1.0})
    rows = [dataclasses.replace(row, step=1000, precision="bf16") for row in run.evaluation]
    write_report([dataclasses.replace(run, evaluation=rows)], tmp_path)
    for name in ("index.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "2,000, evaluated at 1,000" in text
        assert "fp32, evaluated in bf16" in text
        assert "sparsemax, at step 1,000" in text


def test_markdown_and_figures_lie_beside_the_page(folder):
    text = (folder / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(linked) == 3 * 3 + 1 + 3
    for path in linked:
        assert (folder / path).is_file()
        assert (folder / path).with_suffix(".svg").is_file()
    assert "| **sparsemax** |" in text
    assert "| *paper* |" in text


def test_text_from_a_run_is_escaped(tmp_path):
    run = make_run()
    rows = [dataclasses.replace(row, task=HOSTILE) for row in run.evaluation]
    environment = dict.fromkeys(("commit", "device", "torch", "started", "command"), HOSTILE)
    page = write_report([dataclasses.replace(run, evaluation=rows, environment=environment)], tmp_path).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<script" not in (tmp_path / "report.md").read_text()
    assert all(path.parent == tmp_path / "figures" for path in tmp_path.rglob("*.svg"))


def test_runs_without_an_evaluation_are_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        write_report([make_run({}, source="runs/a")], tmp_path / "out")
    assert str(error.value) == "no run has been evaluated (given: runs/a); run `compactattn evaluate` on it first"
    assert not (tmp_path / "out").exists()


def test_the_same_runs_write_the_same_bytes(tmp_path):
    runs = [make_run(), make_run(kernel="gaussian")]
    one, two = (write_report(runs, tmp_path / name).parent for name in ("one", "two"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert len(files) == 2 + 2 * 3
    for path in files:
        assert (one / path).read_bytes() == (two / path).read_bytes(), path


# -- in a browser --------------------------------------------------------------------------------

PROBE = """<script>
const broken = [];
document.addEventListener("securitypolicyviolation", event => broken.push(event.blockedURI));
addEventListener("load", () => setTimeout(() => {
  const sizes = name => [...document.querySelectorAll(name)].map(e => e.getBoundingClientRect()).map(r => [r.width, r.height]);
  const found = {
    broken, figures: sizes("figure > svg"), tables: sizes("table"),
    width: innerWidth, wide: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(entry => entry.name),
  };
  document.body.dataset.found = JSON.stringify(found);
}));
</script>"""


def find_browser():
    """Chromium's path. Where there is none the test fails, unless it is told to do without."""
    if os.environ.get("COMPACTATTN_NO_BROWSER"):
        pytest.skip("COMPACTATTN_NO_BROWSER is set")
    names = [os.environ.get("COMPACTATTN_BROWSER"), "chromium", "chromium-browser", "google-chrome"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.fail(
            "no browser: install one with `apt-get install chromium`, or set COMPACTATTN_NO_BROWSER=1 to go without this test"
        )
    return found


def browse(page, profile, *options):
    command = [
        find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, encoding="utf-8").stdout


@pytest.mark.parametrize("width", [500, 1200])
def test_a_browser_renders_the_page_and_asks_for_nothing_else(page, tmp_path, width):
    open_to_probe = page.replace(POLICY, POLICY + "; script-src 'unsafe-inline'").replace("<title>", PROBE + "<title>")
    assert open_to_probe.count("unsafe-inline") == 2
    (tmp_path / "probed.html").write_text(open_to_probe, encoding="utf-8")
    dom = browse(
        tmp_path / "probed.html", tmp_path / "profile", f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom"
    )
    assert "<title>Length generalisation: MQMTAR, Reverse, Sort</title>" in dom
    body = next(attributes for tag, attributes in Elements(dom).found if tag == "body")
    found = json.loads(body["data-found"])
    assert (found["requests"], found["broken"]) == ([], [])
    assert found["wide"] <= found["width"]  # only tables scroll sideways, the page does not
    assert len(found["figures"]) == 3 * 3 + 1 + 3
    assert len(found["tables"]) == 4 + 1
    assert all(across > 0.6 * min(width, 600) and down > 100 for across, down in found["figures"])
    assert all(down > 60 for _, down in found["tables"][:-1])  # the list of runs is folded


def test_a_browser_shows_more_than_an_empty_page(folder, tmp_path):
    browse(folder / "index.html", tmp_path / "profile", "--window-size=1000,1600", f"--screenshot={tmp_path / 'page.png'}")
    pixels = (imread(tmp_path / "page.png")[..., :3] * 255).round().astype(int)
    assert pixels.shape == (1600, 1000, 3)
    blue, orange = (np.abs(pixels - colour).max(-1) < 8 for colour in ((0x00, 0x67, 0xA8), (0xC4, 0x4E, 0x00)))
    assert blue.sum() > 200
    assert orange.sum() > 200
    assert 0.05 < (np.abs(pixels - pixels[0, 0]).max(-1) > 30).mean() < 0.6
