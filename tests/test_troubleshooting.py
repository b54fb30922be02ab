"""The troubleshooting pages explain every text of an error that the tool can print."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("docs/troubleshooting.md", "docs/troubleshooting_settings.md")
CATALOGUE = runpy.run_path(str(ROOT / "scripts" / "error_texts.py"))


def words(text: str) -> str:
    """Letters and digits alone: how a page quotes a text does not matter."""
    return "".join(char for char in text.lower() if char.isalnum())


def test_every_error_text_is_explained() -> None:
    pages = words("".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES))
    texts = CATALOGUE["error_texts"]()
    missing = [f"{one.path}:{one.line}: {one.text}" for one in texts if words(one.fixed) not in pages]
    assert not missing, "explain these in docs/troubleshooting*.md:\n" + "\n".join(missing)


def test_catalogue_finds_texts_in_every_package() -> None:
    texts = CATALOGUE["error_texts"]()
    assert len(texts) > 300
    assert {one.path.split("/")[0] for one in texts} == {"burst_cli", "cluster", "engine"}
