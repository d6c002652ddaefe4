"""Formulas as MathML, which browsers draw themselves: no script, and nothing to fetch."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **arguments: Any) -> str:
    """Called by MkDocs with the page before it goes into the template."""
    return _FORMULA.sub(_formula, html)


def _formula(match: re.Match[str]) -> str:
    if match.group(1) == "span":
        return convert(unescape(match.group(2)), display="inline")
    formula = convert(unescape(match.group(2)), display="block")
    return f'<div class="formula">{formula}</div>'  # scrolls where the window is narrow
