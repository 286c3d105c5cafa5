"""docs/reports.md is right: every row names tests, and each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_test_that_the_reports_name_exists() -> None:
    named = NAMED.findall(TEXT)

    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in named if name not in functions(path)]
    assert missing == []


def test_every_report_is_held_by_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| Report")]

    assert len(rows) >= 35
    assert [row for row in rows if not NAMED.search(row)] == []
