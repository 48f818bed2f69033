"""The codes of findings: one table, and every place in the package that names one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specserve
from specserve.app import preflight
from specserve.findings import CODES

PACKAGE = Path(specserve.__file__).parent


def trees() -> Iterator[ast.AST]:
    """The syntax of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def literals(node: ast.AST) -> set[str]:
    """Every string below a node."""
    found = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return {value for value in found if isinstance(value, str)}


def named(tree: ast.AST) -> set[str]:
    """Codes of ``Finding("code", ...)``, and those that a ``.code`` is compared with."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Finding"), args=[ast.Constant() as code, *_]):
                found |= literals(code)
            case ast.Compare(left=ast.Attribute(attr="code"), comparators=[compared]):
                found |= literals(compared)
    return found


def test_every_code_in_the_package_stands_in_the_table() -> None:
    """A typo in a finding, or in what a code is compared with, fails here."""
    found = set().union(*map(named, trees()))
    assert len(found) > 60
    assert [code for code in found if not preflight.is_known(code)] == []


def test_every_code_of_the_table_is_named_by_the_package() -> None:
    """A code that nothing finds any more leaves the table, and the page that is made from it."""
    table = PACKAGE / "findings.py"
    others = (p for p in PACKAGE.rglob("*.py") if p != table)
    found = set().union(*(literals(ast.parse(p.read_text(encoding="utf-8"))) for p in others))
    assert CODES.keys() - found == set()


@pytest.mark.parametrize("table", ["_WITHOUT_WEIGHTS", "_WRONG_KIND", "_SAID_BY"])
def test_the_tables_of_preflight_name_known_codes(table: str) -> None:
    """Codes that stand for one another are codes."""
    codes = getattr(preflight, table)
    names = set(codes)
    if isinstance(codes, dict):
        names = names.union(*codes.values())
    assert names
    assert [code for code in names if not preflight.is_known(code)] == []


def test_a_typo_is_seen() -> None:
    """The search itself finds a wrong code, in a call as in a comparison."""
    wrong = 'Finding("head-kinds", "error", "w", "m")\nany(f.code == "vocab-row" for f in found)'
    assert named(ast.parse(wrong)) == {"head-kinds", "vocab-row"}
