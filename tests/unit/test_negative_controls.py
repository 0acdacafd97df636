"""The table of negative controls in docs/verification.md: rows name reasons and tests that exist, and no control is left out."""

from __future__ import annotations

import ast
import re

import pytest

import generated
from pd_operator.api.conditions import REASONS, Reason, Type

TESTS = generated.ROOT / "tests"
PAGE = generated.ROOT / "docs" / "verification.md"
SHOWN = re.compile(r"`((?:e2e|real)/\w+\.py)(?:\[(\w+)\]|::(\w+))`")
TABLES = {"e2e/test_verification.py": "BROKEN", "e2e/test_controls.py": "CONTROLS", "e2e/test_evidence.py": "REASONS"}
# What docs/verification.md must have a row of.
ASKED = (
    *("connector moves nothing", "counts mode `nixl`", "annotation", "side channel", "two versions", "computes every prompt"),
    *("after the proof", "leases end", "midst of a handoff", "keeps what it knew", "one role only", "answered with 500"),
    *("wrong port", "nothing is stored", "lazy offload", "server is killed", "coordinator is killed", "not registered"),
)


def rows() -> list[list[str]]:
    section = PAGE.read_text().split("## Negative controls")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def module(path: str) -> ast.Module:
    return ast.parse((TESTS / path).read_text())


def names(tree: ast.Module) -> set[str]:
    """Functions, and strings: the cases of a table and the names of objects."""
    nodes = list(ast.walk(tree))
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return functions | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def table(path: str, name: str) -> dict[str, ast.expr]:
    """A dict literal at the top of a module: its keys and values."""
    for node in module(path).body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == name:
            value = getattr(node, "value", None)
            assert isinstance(value, ast.Dict)
            return {ast.literal_eval(key): v for key, v in zip(value.keys, value.values, strict=True) if key is not None}
    raise AssertionError(f"{path} has no table {name}")


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0][:40]} {row[2]}")
def test_a_row_names_reasons_and_a_test_that_exists(row: list[str]) -> None:
    _, _, when, said, shown = row
    found = SHOWN.findall(shown)
    assert found and when in ("dark", "live"), row
    for path, case, function in found:
        assert (TESTS / path).is_file() and (case or function) in names(module(path)), (path, case, function)
    told = [words.split() for words in said.split(", ")] if "nothing is accused" not in said else []
    for type_, reason in told:
        assert Type(type_) in REASONS[Reason(reason)].conditions, (type_, reason)
        cases = [table(path, TABLES[path]).get(case) for path, case, _ in found if path in TABLES]
        asserted = [ast.unparse(case) for case in cases if case is not None]
        assert not asserted or any(repr(reason) in text for text in asserted), (row, asserted)


def test_every_control_of_the_tests_is_in_the_table() -> None:
    listed = {(path, case) for row in rows() for path, case, _ in SHOWN.findall(row[-1])}
    for path, name in TABLES.items():
        for case in table(path, name):
            assert (path, case) in listed, f"{path}[{case}] is in no row of {PAGE.name}"


def test_every_control_that_was_asked_for_is_in_the_table() -> None:
    first = " / ".join(row[0] for row in rows())
    assert [word for word in ASKED if word not in first] == []


def test_a_proof_that_fails_says_what_to_do() -> None:
    proofs = {Type.HANDOFF_VERIFIED, Type.OFFLOAD_VERIFIED}
    silent = [r for r, doc in REASONS.items() if proofs & {*doc.conditions} and not doc.remedy]
    assert sorted(silent) == [Reason.NOT_YET_RUN, Reason.VERIFIED]
