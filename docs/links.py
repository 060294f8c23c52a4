"""A hook of MkDocs: names in code that have an entry on the API page lead to it, and on the API page pages that
docstrings name lead to those pages. Pages of kernels and of the lab speak of kernels, which have some of these names.

Docstrings stay plain text, as `help` shows them: `fmha`, `Cache.zeros`, docs/transforms.md.
"""

import re
from typing import Any

API = "api.md"
UNLINKED = ("kernels/", "lab/")

_ENTRY = re.compile(r'id="(jax_dsv4_fmha\.(?:layers\.)?(?:(\w+)\.(?=\2"))?([\w.]+))"')  # layers.rope.rope is rope
_CODE = re.compile(r"(<a\b.*?</a>|<b>.*?</b>|<pre\b.*?</pre>|<h\d\b.*?</h\d>)|<code>([\w.]+)</code>", re.S)
_PAGE = re.compile(r"\bdocs/([\w/-]+\.md)\b")
_BODY = re.compile(r"<article\b.*?</article>", re.S)

_found: dict[str, str] = {}
"""the API page's entries, which MkDocs renders before it writes any page"""


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    def address(path: str) -> str:
        return str(files.get_file_from_path(path).url_relative_to(page.file))

    if page.file.src_uri != API:
        return html
    _found.update(entries(html), **{"": page.file.url})
    return _PAGE.sub(lambda path: f'<a href="{address(path[1])}">{path[0]}</a>', linked(html, _found))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Any other page, as it is written: by then the API page has been rendered."""
    if page.file.src_uri == API or page.file.src_uri.startswith(UNLINKED):
        return output
    to_api = "../" * page.file.url.count("/") + _found[""]
    return _BODY.sub(lambda body: linked(body[0], _found, to_api), output)


def entries(html: str) -> dict[str, str]:
    """The anchors of the API page, by the names that code has."""
    found = {name: anchor for anchor, _, name in _ENTRY.findall(html)}
    return found | {f"layers.{name}": anchor for name, anchor in found.items() if ".layers." in anchor}


def linked(html: str, found: dict[str, str], api: str = "") -> str:
    """The page with links; code in links, bold names of arguments, programs and headings stays as it is."""

    def to_entry(code: re.Match[str]) -> str:
        anchor = found.get(code[2])
        return f'<a href="{api}#{anchor}">{code[0]}</a>' if anchor else code[0]

    return _CODE.sub(to_entry, html)
