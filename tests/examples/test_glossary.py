"""The glossary defines each term once, in one sentence."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "glossary.md").read_text()
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+(?:\n  .+)*)$", PAGE, re.M)


def test_every_entry_has_the_form_of_one() -> None:
    assert len(ENTRIES) == len(re.findall(r"^- ", PAGE, re.M)) > 50


def test_no_term_is_defined_twice() -> None:
    terms = Counter(term.strip() for entry, _ in ENTRIES for term in entry.split(","))
    assert [term for term, count in terms.items() if count > 1] == []


def test_every_definition_is_one_sentence() -> None:
    assert [term for term, text in ENTRIES if re.search(r"[.!?](\s|$)", text)] == []
