"""What the pages on reports and on reliability name is there: every row names tests, and each exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PAGES = {"reports.md": 35, "reliability.md": 21}


def text(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall(text(page))

    assert len(named) >= PAGES[page]
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or (name and name not in functions(path))
    ]
    assert missing == []


def test_every_report_is_held_by_a_test() -> None:
    lines = text("reports.md").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| Report")]

    assert len(rows) >= PAGES["reports.md"]
    assert [row for row in rows if not NAMED.search(row)] == []


def test_every_promise_but_two_is_held_by_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*$", text("reliability.md"), re.MULTILINE)
    lines = [line for line in text("reliability.md").splitlines() if re.match(r"\| \d+ \|", line)]

    assert {int(row) for row in rows} == set(range(1, 24)) - {16, 21}
    assert [line for line in lines if not NAMED.search(line)] == []
