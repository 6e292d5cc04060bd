"""The built site in a browser: nothing is broken, sticks out, or is asked of the network."""

import importlib.util
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.documentation.browser import Browser, find_chromium

ROOT = Path(__file__).parents[2]
BROKEN = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
STICKS_OUT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FROM_ELSEWHERE = """
performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('file:'))
"""
RAW_MATHS = (
    r"[...document.querySelectorAll('math')].filter(m => m.textContent.includes('\\') "
    "|| [...m.querySelectorAll('mi')].some(e => e.textContent == '~')).length"
)
SEARCH_IS_DONE = """
/found|match/.test((document.querySelector('#search-results .search-summary') || {}).textContent)
"""
SEARCH_RESULTS = "[...document.querySelectorAll('#search-results li a')].map(a => a.href)"
SEARCHES = {  # what a reader looks for, and the page that answers
    "control variates": "understand/theory.html",
    "troubleshooting": "troubleshooting.html",
    "imputation": "faq.html",
    "exposure": "faq.html",
    "offset": "faq.html",
    "GPU": "installation.html",
    "label switching": "choosing.html",
    "multimodal": "choosing.html",
    "influential": "faq.html",
    "leverage": "faq.html",
    "glossary": "understand/glossary.html",
    "citation": "citing.html",
    "categorical": "large-data.html",
    "convergence": "understand/diagnostics.html",
    "batch size": "batch-size.html",
}
SCREENS = {
    "desktop": (1280, 900, False),
    "desktop, dark": (1280, 900, True),
    "phone": (390, 844, False),
    "phone, dark": (390, 844, True),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="needs the extra `docs`"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet"]
    subprocess.run([*sphinx, ROOT / "docs", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find_chromium() is None:
        pytest.skip("there is no Chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


class Links(HTMLParser):
    """Where a page's links lead to, and its fragments."""

    def __init__(self, page):
        super().__init__()
        self.found, self.fragments = [], set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.fragments.add(attrs.get("id"))
        for name in ("href", "src"):
            if attrs.get(name):
                self.found.append(attrs[name])


def dead_links(site):
    """Links within the site that lead nowhere, with the page that they stand on."""
    pages = {p.resolve(): Links(p) for p in pages_of(site)}
    dead = []
    for page, links in pages.items():
        for link in links.found:
            parts = urlsplit(link)
            if parts.scheme:  # vocabulary: ok
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            fragments = pages[there].fragments if there in pages else {parts.fragment}
            is_there = there.exists() and (not parts.fragment or parts.fragment in fragments)
            if not is_there:
                dead.append((page.name, link))
    return dead


def pages_of(site):
    return [p for p in sorted(site.rglob("*.html")) if "_static" not in p.parts]


def test_links_lead_somewhere(site):
    assert dead_links(site) == []


def test_dead_links_are_seen(tmp_path):
    (tmp_path / "a.html").write_text("<a href='b.html#x'></a><a href='b.html#y'></a><a href='c'>")
    (tmp_path / "b.html").write_text("<p id='x'><img src='no.png'>")
    found = [("a.html", "b.html#y"), ("a.html", "c"), ("b.html", "no.png")]
    assert dead_links(tmp_path) == found


@pytest.mark.parametrize("screen", SCREENS)
def test_pages(site, browser, screen):
    width, height, is_dark = SCREENS[screen]
    browser.show(width, height, is_dark=is_dark)
    pages = pages_of(site)
    assert len(pages) > 25
    wrong = {}
    for page in pages:
        browser.open(page)
        found = {
            "complaints": browser.complaints(),
            "broken": browser.evaluate(BROKEN),
            "sticks out by": browser.evaluate(STICKS_OUT),
            "from elsewhere": browser.evaluate(FROM_ELSEWHERE),
            "raw formulas": browser.evaluate(RAW_MATHS),
        }
        if any(found.values()):
            wrong[page.name] = {what: x for what, x in found.items() if x}
    assert wrong == {}


@pytest.mark.parametrize("screen", SCREENS)
def test_what_is_wrong_is_seen(browser, tmp_path, screen):
    page = tmp_path / "page.html"
    page.write_text(
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<div style='width: 2000px'>x</div><img src='nowhere.png'><script>throw Error(1)</script>"
    )
    width, height, is_dark = SCREENS[screen]
    browser.show(width, height, is_dark=is_dark)
    browser.open(page)
    assert len(browser.complaints()) >= 2
    assert browser.evaluate(BROKEN)
    assert browser.evaluate(STICKS_OUT) > 0


def test_dark_is_dark(site, browser):
    lightness = []
    for is_dark in (False, True):
        browser.show(1280, 900, is_dark=is_dark)
        browser.open(site / "index.html")
        colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        lightness.append(int(colour.split("(")[1].split(",")[0]))
    assert lightness[0] > 200 > 60 > lightness[1]


@pytest.mark.parametrize("query", SEARCHES)
def test_search_finds(site, browser, query):
    browser.show(1280, 900, is_dark=False)
    browser.open(site / "search.html", f"?q={query.replace(' ', '+')}")
    for _ in range(100):
        if browser.evaluate(SEARCH_IS_DONE):
            break
        browser.evaluate("new Promise(r => setTimeout(r, 100))")
    found = browser.evaluate(SEARCH_RESULTS)
    assert any(SEARCHES[query] in address for address in found[:10]), found[:10]
