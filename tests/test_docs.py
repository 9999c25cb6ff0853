"""The documents name only tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CITED = re.compile(r"`(tests/[\w/]+\.py|test_\w+)`")


def known_tests() -> set[str]:
    """Every test function and every test file of the repository."""
    files = list((ROOT / "tests").rglob("*.py"))
    functions = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.M)}
    return functions | {str(file.relative_to(ROOT)) for file in files}


@pytest.mark.parametrize("document", sorted(ROOT.glob("docs/*.md")), ids=lambda path: path.stem)
def test_every_test_that_a_document_cites_exists(document: Path) -> None:
    assert set(CITED.findall(document.read_text(encoding="utf-8"))) <= known_tests()


def test_a_citation_is_recognised() -> None:
    """The check above finds what it is to check."""
    cited = CITED.findall((ROOT / "docs" / "generation.md").read_text(encoding="utf-8"))
    assert len(cited) > 30
    assert "test_greedy_output_equals_transformers" in cited
