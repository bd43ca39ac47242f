"""The settings of the documentation: `make docs` builds it into `docs/_build`, with warnings as errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).parents[1]

project = "Baton"
author = "The authors of Baton"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Baton"
html_show_copyright = False
html_show_sphinx = False
smartquotes = False
highlight_language = "none"

INCLUDED = re.compile(r"```\{include\} (\S+)\.md")
"""How a page takes in a README that stands elsewhere in the repository."""


def included_pages() -> dict[str, str]:
    """Return the pages that are READMEs from elsewhere, by the README's path without its suffix."""
    found = {
        "README": "index",
        "bench/RESULTS": "results/index",
        "deploy/README": "how-to/deploy/index",
        "plugins/README": "reference/plugins/index",
    }
    for page in (ROOT / "docs").rglob("*.md"):
        match = INCLUDED.search(page.read_text())
        if match:
            readme = (page.parent / match[1]).resolve().relative_to(ROOT)
            found[str(readme)] = str(page.relative_to(ROOT / "docs").with_suffix(""))
    return found


def link_readmes(_app: Any, doctree: nodes.document) -> None:
    """Lead links to READMEs to their pages; name other files of the repository, and a page's own README."""
    pages = included_pages()
    readmes = {page: readme for readme, page in pages.items()}
    for link in list(doctree.findall(addnodes.pending_xref)):
        target = link["reftarget"]
        if link["refdomain"] == "doc" and target.startswith("/"):
            page = pages.get(str(Path(target).relative_to(ROOT)))
            if page is not None and page != link["refdoc"]:
                link["reftarget"] = page
            else:
                link.replace_self(link.children)
        elif link["refdomain"] is None:
            page = link["refdoc"]
            places = (ROOT / "docs" / page, ROOT / readmes.get(page, page))
            if any((place.parent / target).exists() for place in places):
                link.replace_self(link.children)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("doctree-read", link_readmes)
