"""Reading the XML of nvidia-smi safely, one value at a time.

Three ways of not knowing stay apart, see `Gap`: a field that this GPU does not have, one that the driver left out, one
that the driver could not read. Only the first is harmless.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from cluster.remote_text import one_line

MAX_DEPTH = 40


class Gap(enum.Enum):
    """Why there is no value."""

    NOT_SUPPORTED = "N/A"
    MISSING = "not in the answer"
    UNREADABLE = "unreadable"


Number = float | Gap
Word = str | Gap


def parse_xml(text: str) -> Element:
    """The root element. Raises ValueError for what is no XML, nests too deep, or declares entities of its own."""
    if _declares(text):
        raise ValueError("the XML declares entities, which nvidia-smi never does")
    try:
        return ElementTree.fromstring(text, parser=ElementTree.XMLParser(target=_ShallowBuilder()))
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from error


def _declares(text: str) -> bool:
    """Whether there is more than the one plain line `<!DOCTYPE nvidia_smi_log SYSTEM "...">` of the real tool."""
    upper = text.upper()
    _, _, document_type = upper.partition("<!DOCTYPE")
    return "<!ENTITY" in upper or upper.count("<!DOCTYPE") > 1 or "[" in document_type.partition(">")[0]


def normal_address(text: str) -> str | None:
    """The first PCI address in `text` as sysfs spells it, `0000:1b:00.0`; None without one."""
    found = _ADDRESS.search(text)
    if found is None:
        return None
    domain, bus, device, function = found.groups()
    return f"{domain[-4:]}:{bus}:{device}.{function or '0'}".lower()


class _ShallowBuilder(ElementTree.TreeBuilder):
    """Refuses a tree so deep that walking it would exhaust the stack."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"the XML nests deeper than {MAX_DEPTH}")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> Element:
        self._depth -= 1
        return super().end(tag)


_ADDRESS = re.compile(r"(?<![0-9A-Fa-f])([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-7]))?")
_NOT_SUPPORTED = re.compile(
    r"\[?(N/A|Not Supported|Not Available|Requested functionality has been deprecated)\]?|", re.I
)
_BROKEN = re.compile(
    r"ERR!|\[?Unknown Error\]?|\[?GPU is lost\]?|\[?GPU requires reset\]?|\[?Reset required\]?|\[?Timeout\]?"
    r"|\[?Insufficient Permissions\]?|\[?Insufficient power\]?",
    re.IGNORECASE,
)


def paths(parents: Iterable[str], *names: str) -> list[str]:
    return [f"{parent}/{name}" for parent in parents for name in names]


def read_word(node: Element, path: str) -> Word:
    """The text at `path`; `N/A` of a parent holds for its children, too."""
    found = node.find(path)
    if found is None:
        parent, _, _ = path.rpartition("/")
        outer = read_word(node, parent) if parent else Gap.MISSING
        return outer if outer in (Gap.NOT_SUPPORTED, Gap.UNREADABLE) else Gap.MISSING
    text = one_line(found.text or "", 100)
    if not text and len(found):
        return Gap.MISSING
    if _NOT_SUPPORTED.fullmatch(text):
        return Gap.NOT_SUPPORTED
    return Gap.UNREADABLE if _BROKEN.fullmatch(text) else text


def read_number(node: Element, path: str) -> Number:
    """The number at `path`, in the unit that belongs there: `81559 MiB`, `16x`, `-2 C`."""
    word = read_word(node, path)
    if isinstance(word, Gap):
        return word
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?:x| MiB| W| MHz| C)?", word)
    return float(found[1]) if found else Gap.UNREADABLE


def first_number(node: Element, paths: Iterable[str]) -> Number:
    """The first of `paths` that is in the answer at all: names change with the driver."""
    for path in paths:
        value = read_number(node, path)
        if value is not Gap.MISSING:
            return value
    return Gap.MISSING


def add_up(values: Iterable[Number]) -> Number:
    """The sum of what is there. A value that could not be read makes the sum unreadable; absent ones do not count."""
    known: list[float] = []
    gaps: list[Gap] = []
    for value in values:
        if isinstance(value, Gap):
            gaps.append(value)
        else:
            known.append(value)
    if Gap.UNREADABLE in gaps:
        return Gap.UNREADABLE
    if known:
        return sum(known)
    return Gap.NOT_SUPPORTED if Gap.NOT_SUPPORTED in gaps else Gap.MISSING


def broken_fields(node: Element) -> Iterable[str]:
    """Every field of a GPU that says an error instead of a value, names of processes aside: people choose those."""
    for element in node.iter():
        text = (element.text or "").strip()
        if element.tag != "process_name" and text and _BROKEN.fullmatch(text):
            yield f"{element.tag}: {one_line(text, 60)}"
