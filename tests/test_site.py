"""The documentation site: its links are adapted, and what checks the built site finds mistakes."""

import re
import subprocess
import time
from pathlib import Path

import pytest

from scripts.check_links import check
from scripts.docs_site import THEME, adapt_links, generated, public_names, site_theme
from tests.reports.browser import CHROMIUM, Browser

ROOT = Path(__file__).parents[1]


def test_links_of_the_forge_lead_to_the_same_page_of_the_site():
    readme = "[a](docs/memory.md#x) ![b](docs/images/report.png) [c](docs/adr/) [d](#here)"
    assert adapt_links(readme, "README.md", "index.md") == (
        "[a](memory.md#x) ![b](images/report.png) [c](adr/index.md) [d](#here)"
    )
    guide = "[a](../../CONTRIBUTING.md) [b](../memory.md) [c](../../examples/web_demo) [d](ci.md)"
    assert adapt_links(guide, "docs/guides/cpp.md", "guides/cpp.md") == (
        "[a](../contributing.md) [b](../memory.md) c [d](ci.md)"
    )
    source = "[a](../../runtime/odtpack_runtime/errors.py)\n```\n[b](../../CONTRIBUTING.md)\n```"
    adapted = adapt_links(source, "docs/formats/kits.md", "formats/kits.md")
    assert "[a](../source/runtime/odtpack_runtime/errors.py.txt)" in adapted
    assert "[b](../../CONTRIBUTING.md)" in adapted  # code stays as it is


def test_the_site_has_the_colours_of_the_reports():
    site, reports = site_theme(), THEME.read_text("utf-8")
    values = re.findall(r"--[\w-]+: [^;]+", reports)
    assert len(values) >= 40
    assert re.findall(r"--[\w-]+: [^;]+", site) == values
    assert site.count("color-scheme") == 3  # light dark, the selector, dark
    own = (ROOT / "docs" / "assets" / "site.css").read_text("utf-8")
    assert re.findall(r"#[0-9a-f]{3,8}\b|rgb|font-family: (?!var)", own) == []
    assert set(re.findall(r"var\((--[\w-]+)\)", own)) <= {value.split(":")[0] for value in values}


def test_the_reference_has_every_public_module():
    modules = public_names()
    assert {"odtpack_runtime", "odtpack.build", "odtpack_simulator"} <= set(modules)
    for module, names in modules.items():
        page = generated()[f"reference/python/{module}.md"]
        assert [f"::: {module}.{name}" in page for name in names] == [True] * len(names)


def test_the_check_finds_what_is_broken(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text('<p id="there"><a href="sub/b.html#x">b</a><a href="#there">')
    (tmp_path / "sub" / "b.html").write_text('<h2 id="x"></h2><a href="../a.html">a</a>')
    assert check(tmp_path) == (3, [])
    (tmp_path / "sub" / "b.html").write_text(
        '<a href="../a.html#nowhere">1</a><a href="c.html">2</a><a href="../../out.html">3</a>'
        '<script src="https://example.org/x.js"></script><a href="https://example.org">fine</a>'
    )
    assert check(tmp_path) == (
        5,
        ["a.html links to sub/b.html#x", "sub/b.html links to ../a.html#nowhere",
         "sub/b.html links to c.html", "sub/b.html links to ../../out.html",
         "sub/b.html loads https://example.org/x.js"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def site() -> Path:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    return ROOT / "build" / "site"


@pytest.mark.docs
def test_the_built_site_is_complete_and_has_no_broken_link(site):
    checked, broken = check(site)
    assert broken == []
    assert checked > 10_000
    for page in generated():
        assert (site / page).with_suffix(".html").is_file() or not page.endswith(".md"), page


@pytest.mark.docs
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_site_fits_a_phone_and_works_without_a_server(site, tmp_path):
    pages = ["index", "errors", "devices", "memory", "contributing"]
    pages += ["reference/python/odtpack_runtime"]
    with Browser(tmp_path) as browser:
        for page in pages:
            for dark in (False, True):
                browser.open(site / f"{page}.html", width=390, height=844, phone=True, dark=dark)
                assert browser.evaluate("document.documentElement.scrollWidth") <= 390, page
                background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
                assert background == ("rgb(19, 20, 22)" if dark else "rgb(251, 250, 248)")
        browser.open(f"{(site / 'index.html').as_uri()}?q=checkpoint")
        found = "document.querySelectorAll('.md-search-result__item').length"
        until = time.monotonic() + 30
        shim = site / "assets" / "iframe-worker.js"  # comes with npm
        while shim.is_file() and browser.evaluate(found) < 5:
            assert time.monotonic() < until, "the search finds nothing"
            time.sleep(0.1)
        assert browser.console == []
