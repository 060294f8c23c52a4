"""A hook of MkDocs: on the API page, names in code that have an entry there lead to it, and pages that docstrings name
lead to those pages.

Docstrings stay plain text, as `help` shows them: `fmha`, `Cache.zeros`, docs/transforms.md.
"""

import re
from collections.abc import Callable
from typing import Any

_ENTRY = re.compile(r'id="(jax_dsv4_fmha\.(?:layers\.)?(?:(\w+)\.(?=\2"))?([\w.]+))"')  # layers.rope.rope is rope
_CODE = re.compile(r"(<a\b.*?</a>|<b>.*?</b>|<pre\b.*?</pre>|<h\d\b.*?</h\d>)|<code>([\w.]+)</code>", re.S)
_PAGE = re.compile(r"\bdocs/([\w/-]+\.md)\b")


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    def address(path: str) -> str:
        return str(files.get_file_from_path(path).url_relative_to(page.file))

    return linked(html, address) if page.file.src_uri == "api.md" else html


def linked(html: str, address: Callable[[str], str]) -> str:
    """The page with links; code in links, bold names of arguments, programs and headings stays as it is."""
    entries = {name: anchor for anchor, _, name in _ENTRY.findall(html)}
    entries |= {f"layers.{name}": anchor for name, anchor in entries.items() if ".layers." in anchor}

    def to_entry(code: re.Match[str]) -> str:
        anchor = entries.get(code[2])
        return f'<a href="#{anchor}">{code[0]}</a>' if anchor else code[0]

    def to_page(path: re.Match[str]) -> str:
        return f'<a href="{address(path[1])}">{path[0]}</a>'

    return _PAGE.sub(to_page, _CODE.sub(to_entry, html))
