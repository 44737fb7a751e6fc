"""Hooks of mkdocs: pages from files outside docs/, and links that work there and in a checkout.

README.md, CONTRIBUTING.md and others are read where they lie, in the repository, and are pages of
the site, too. Links in all pages are written for the repository. On the site, those to pages lead
there, and those to anything else, such as a source file, are left out; their text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "all-benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "kvconnect/settings/schema.json": "settings.schema.json",
}
"""File in the repository -> page of the site, or a file that it serves as it is."""
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with the site's links."""
    origins = {name: source for source, name in PAGES.items()}
    source = origins.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return site_links(markdown, source)


def site_links(markdown: str, source: str) -> str:
    """Return the text of the file ``source`` of the repository with links for the site."""

    def target(match: re.Match[str]) -> str:
        text, link = match.groups()
        path, _, anchor = link.partition("#")
        if "://" in link or not path:
            return match.group()
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        page = PAGES.get(found) or (found[5:] if found.startswith("docs/") else None)
        if page is None:
            return text
        return f"[{text}]({page}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(target, markdown)
