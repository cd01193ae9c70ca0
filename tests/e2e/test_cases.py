"""The page of cases names tests: each of them has to be there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cases.md").read_text()
NAMED = sorted(set(re.findall(r"`((?:unit|property|numerics|e2e)/\w+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_every_test_that_the_page_names_is_there(file: str, test: str) -> None:
    text = (ROOT / "tests" / file).read_text()
    assert not test or re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_every_case_has_an_answer() -> None:
    rows = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| [A-P]\d\d", line)]
    assert len(rows) > 90
    assert all(len(row) == 5 and ("`" in row[3] or len(row[3]) > 20) for row in rows)
    assert "@" not in PAGE
