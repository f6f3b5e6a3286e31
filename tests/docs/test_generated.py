"""What is generated fits the code: tables, help, pieces of source, and the text of the public signatures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from documenting import ROOT, regions
from documenting.public_api import public_api
from generate_docs import WRITERS

PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if regions.MARK in page.read_text()]
OUTPUT = "<!-- generated: output "


def accelerated() -> bool:
    """Whether commands print something else here than on the machine that the pages show."""
    from engines.devices import BUILT_IN, presence

    return any(presence(spec).present for spec in BUILT_IN.values() if spec.name != "cpu")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_page_is_not_stale(page: Path) -> None:
    text = page.read_text()
    if OUTPUT in text and accelerated():
        pytest.skip("the page shows a machine without accelerators")
    assert text == regions.rewritten(text, WRITERS, page.name), "run `make docs`"


def test_public_signatures_are_those_that_were_promised() -> None:
    """A failure here is a change of what others build on: meant? Then `make docs`, and a line in CHANGELOG.md."""
    assert (ROOT / "tests/docs/public_api.txt").read_text() == public_api()


def test_an_end_that_is_missing_is_said() -> None:
    with pytest.raises(AssertionError, match=r"page.md: 1 regions begin and 0 end"):
        regions.rewritten("<!-- generated: commands -->\n", WRITERS, "page.md")


@pytest.mark.more
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors lead somewhere, every page is in the navigation, and nothing is fetched from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fetched = [
        line
        for page in tmp_path.rglob("*.html")
        for line in page.read_text().split("<")
        if line.startswith(("script", "link", "img")) and "//" in line.partition(">")[0]
    ]
    assert not fetched
