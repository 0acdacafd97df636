"""The page on conditions is made from the enums and is up to date; every reason is documented and is written by some code."""

from __future__ import annotations

import re
from pathlib import Path

import builders
import pytest

from pd_operator.api import condition_docs
from pd_operator.api.conditions import REASONS, PoolType, Reason, Type

PAGE = builders.ROOT / "docs" / "reference" / "conditions.md"
CODE = builders.ROOT / "operator" / "pd_operator"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == condition_docs.markdown()


def test_check_tells_a_stale_page_and_write_mends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "reference" / "conditions.md"
    assert condition_docs.main(["--check", str(page)]) == 1
    assert f"condition_docs {page}" in capsys.readouterr().err
    assert condition_docs.main([str(page)]) == 0
    assert condition_docs.main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "x")
    assert condition_docs.main(["--check", str(page)]) == 1


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
