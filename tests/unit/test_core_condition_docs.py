"""The page on conditions is made from the enums and is up to date; every reason is documented and is written by some code."""

from __future__ import annotations

import re

import builders
import pytest

from pd_operator.api import condition_docs
from pd_operator.api.conditions import REASONS, PoolType, Reason, Type

CODE = builders.ROOT / "operator" / "pd_operator"


def test_every_reason_is_documented_with_a_condition_that_can_have_it() -> None:
    assert set(REASONS) == set(Reason)
    assert all(doc.conditions and doc.meaning.endswith(".") for doc in REASONS.values())
    assert all(not doc.remedy or doc.remedy.endswith(".") for doc in REASONS.values())


def test_the_page_has_a_row_for_every_condition_and_reason() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+?) \|", condition_docs.markdown(), flags=re.M)
    assert {name for name, _ in rows} >= {*Type, *PoolType, *Reason}
    assert all(cell.strip() for _, cell in rows)


@pytest.mark.parametrize("reason", Reason)
def test_some_code_writes_the_reason(reason: Reason) -> None:
    """The page promises that the operator writes it today."""
    sources = [path for path in CODE.rglob("*.py") if path.name not in ("conditions.py", "condition_docs.py")]
    assert any(f"Reason.{reason.name}" in path.read_text() for path in sources)
