"""The README as a package index shows it: there, a link relative to the repository leads nowhere.

:data:`ADDRESS` is where the repository's files can be read, with a slash at the end. While it is
empty, links become their text, and pictures are left out.
"""

from __future__ import annotations

import re

ADDRESS = ""
NO_ADDRESS = "\nThe pages that this text names are in the source distribution.\n"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^()\s]+)\)")
"""A link or a picture (``!``) in the repository: mark, text and target."""


def index_page(readme: str, address: str = ADDRESS) -> str:
    """Return the text of a README for an index."""
    if address:
        return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({address}{link[3]})", readme)
    return LINK.sub(lambda link: "" if link[1] else link[2], readme) + NO_ADDRESS
