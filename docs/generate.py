"""Writes into the pages what was measured, from the JSON files beside this one, between marks:

    <!-- generated: NAME -->
    …
    <!-- end -->

`python docs/generate.py` does so for every page; `make lint` says where it would change something.
`make pictures` runs it, and draws the pictures from the same files. A new measurement is a new JSON file, and that run
again.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

from figures import GENERATED  # noqa: E402

PAGES = (DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))
MARKED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.S)


def generated(text: str) -> str:
    """A page's text with what is between marks made anew."""
    return MARKED.sub(lambda found: f"{found[1]}{GENERATED[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        if (new := generated(text)) != text:
            page.write_text(new)
            print(page.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
