"""HTML from values: text is escaped unless it is `Markup`. Nothing that a run says can become a tag."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"meta", "link", "br"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Markup:
    """`value` as text of a page; letters that UTF-8 cannot hold (a damaged file name) become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True))


def tag(element: str, /, *children: object, **attributes: object) -> Markup:
    """<element attributes>children</element>. A trailing _ of an attribute is dropped (class_); None leaves it out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _VOID:
        return Markup(f"<{element}{written}>")
    return Markup(f"<{element}{written}>{join(children)}</{element}>")


def join(parts: Iterable[object], separator: str = "") -> Markup:
    """All parts, escaped, one after the other; None is left out."""
    return Markup(separator.join(escape(part) for part in parts if part is not None))
