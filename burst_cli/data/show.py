"""`burst data show` on the screen: samples as text, learned tokens marked; or a row per token."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from burst_cli import render
from engine.data.tokenizers import Tokenizer
from engine.data.view import SampleView, decoded, warnings_of
from engine.runs import figures
from engine.runs.figures import count_of

_ENDS, _AROUND, _MOST_EDGES = 96, 16, 12  # tokens shown at both ends, around a change; changes shown
_CONTEXT = 4  # tokens before a text that its decoding may depend on
_LEARNED, _READ = "bold green", "dim"


@dataclass(frozen=True)
class Shown:
    """How samples are printed. has_colour: else learned text stands in [[ ]]."""

    tokenizer: Tokenizer | None
    has_colour: bool
    is_full: bool
    encoding: str

    @classmethod
    def on(cls, console: Console, tokenizer: Tokenizer | None, *, is_full: bool) -> Shown:
        """As `console` can show it."""
        has_colour = console.is_terminal and console.color_system is not None and not console.no_color
        return cls(tokenizer, has_colour, is_full, getattr(sys.stdout, "encoding", None) or "utf-8")

    def safe(self, text: str) -> str:
        """`text` without anything that a terminal obeys or cannot write; line breaks and tabs are escaped, too."""
        shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
        return shown.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def text(self, view: SampleView, first: int, after: int) -> str:
        """Tokens [first, after) of a sample."""
        ids = view.ids[first:after].tolist()
        if self.tokenizer is None:
            return " ".join(map(str, ids)) + " "
        return decoded(self.tokenizer, ids, view.ids[max(0, first - _CONTEXT) : first].tolist())


def visible(view: SampleView, *, is_full: bool) -> npt.NDArray[np.bool_]:
    """Which tokens are printed, bool [seq_len + 1]: head, tail, and what is around labels' edges and documents."""
    shown = np.full(view.ids.size, is_full)
    shown[:_ENDS] = shown[-_ENDS:] = True
    edges = sorted({edge for pair in view.learned_ranges for edge in pair} | set(view.documents.tolist()))
    for edge in edges[:_MOST_EDGES]:
        shown[max(0, edge - _AROUND) : edge + _AROUND] = True
    return shown


def _stretches(view: SampleView, shown: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Ranges of tokens that are alike: shown or not, learned or not, of one document, padding or not."""
    changes = (np.diff(shown) | np.diff(view.is_learned)).nonzero()[0] + 1
    padding = view.seq_len - view.padding
    cuts = sorted({0, view.ids.size, padding, view.seq_len, *changes.tolist(), *view.documents.tolist()})
    yield from itertools.pairwise(cuts)


def print_sample(console: Console, view: SampleView, how: Shown) -> None:
    """A headline, and the text with its documents."""
    render.say(console, Text(headline(view), style="bold"))
    shown, starts = visible(view, is_full=how.is_full), {int(at): n for n, at in enumerate(view.documents, start=1)}
    out = Text()
    for first, after in _stretches(view, shown):
        if first in starts:
            continues = first == 0 and view.begins_document is False
            out.append(
                f"\n--- document {starts[first]}{' (began before this sample)' if continues else ''} ---\n", "cyan"
            )
        if first >= view.seq_len - view.padding and view.padding:
            out.append(
                "" if first == view.seq_len else f"\n--- {count_of('token', view.padding)} of padding ---", "cyan"
            )
        elif first == view.seq_len and not view.is_learned[first]:
            continue  # of the next sample
        elif not shown[first]:
            out.append(f"\n... {count_of('token', after - first)} ...\n", "cyan")
        else:
            _append(out, how, view, first, after)
    if view.is_cut:
        out.append("\n--- the sample ends, its document does not ---", "cyan")
    render.say(console, out, "")


def _append(out: Text, how: Shown, view: SampleView, first: int, after: int) -> None:
    # Line breaks structure most text, so they are shown and broken; everything else that is no letter is escaped.
    lines = [how.safe(line) for line in how.text(view, first, after).split("\n")]
    is_learned = bool(view.is_learned[first])
    text = "\\n\n".join(lines)
    if is_learned and not how.has_colour:
        text = f"[[{text}]]"
    out.append(text, _LEARNED if is_learned else _READ)


def headline(view: SampleView) -> str:
    """Of one sample."""
    share = view.learned_tokens / view.seq_len
    parts = [
        f"sample {view.number}",
        count_of("token", view.seq_len),
        f"{view.learned_tokens:,} learned ({share:.1%})" if view.learned_tokens else "NO LABELS",
        count_of("document", len(view.documents)),
    ]
    return "  ".join([*parts, f"{view.padding:,} of padding"] if view.padding else parts)


def print_tokens(console: Console, view: SampleView, how: Shown) -> None:
    """A row per token: position, id, text, whether it is learned, document."""
    render.say(console, Text(headline(view), style="bold"), f"{'position':>8}  {'id':>7}  learned  document  text")
    shown, was_shown = visible(view, is_full=how.is_full), True
    document = np.searchsorted(view.documents, np.arange(view.ids.size), side="right")
    for at in range(view.seq_len + bool(view.is_learned[-1])):
        if shown[at]:
            word = "yes" if view.is_learned[at] else "padding" if at >= view.seq_len - view.padding else "-"
            line = f"{at:8}  {view.ids[at]:7}  {word:7}  {document[at]:8}  {how.safe(how.text(view, at, at + 1))}"
            style = (_LEARNED if view.is_learned[at] else _READ) if how.has_colour else ""
            render.say(console, Text(line, style))
        elif was_shown:
            render.say(console, "     ...")
        was_shown = bool(shown[at])


def print_legend(console: Console, views: Sequence[SampleView], how: Shown) -> None:
    """Totals, what the marks mean, warnings."""
    tokens, learned = sum(view.seq_len for view in views), sum(view.learned_tokens for view in views)
    mark = Text("learned", _LEARNED) if how.has_colour else Text("[[learned]]")
    legend = Text.assemble(mark, "  ", Text("read, not learned", _READ), "  \\n: a line break of the text")
    share = f"{learned / tokens:.1%}" if tokens else figures.DASH
    render.say(
        console, legend, f"{count_of('sample', len(views))}: {learned:,} of {tokens:,} tokens are learned ({share})"
    )


def describe_sample(view: SampleView, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Plain values; positions count from the start of the sample, and token seq_len is the last label's."""
    return {
        "number": view.number,
        "ids": view.ids.tolist(),
        "text": None if tokenizer is None else decoded(tokenizer, view.ids[: view.seq_len - view.padding].tolist()),
        "learned": [list(pair) for pair in view.learned_ranges],
        "learned_tokens": view.learned_tokens,
        "learned_share": view.learned_tokens / view.seq_len,
        "documents": view.documents.tolist(),
        "begins_document": view.begins_document,
        "is_cut": view.is_cut,
        "padding_tokens": view.padding,
    }


def describe_samples(views: Sequence[SampleView], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The samples, their totals and warnings."""
    tokens, learned = sum(view.seq_len for view in views), sum(view.learned_tokens for view in views)
    return {
        "samples": [describe_sample(view, tokenizer) for view in views],
        "tokens": tokens,
        "learned_tokens": learned,
        "learned_share": learned / tokens if tokens else None,
        "samples_without_labels": sum(not view.learned_tokens for view in views),
        "warnings": list(warnings_of(views)),
    }
