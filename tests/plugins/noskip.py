"""A pytest plugin: a session with a skipped (or expected-to-fail) test ends as failed. Load it with `-p plugins.noskip`.

A skip says "nobody looked". Where every test can run, that must not pass for success.
"""

from __future__ import annotations

import pytest

_SKIPPED: list[str] = []


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        _SKIPPED.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that was skipped or failed as expected."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a module that was skipped as a whole."""
    _note(report)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn success with skips into failure."""
    if _SKIPPED and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name each skip and its reason."""
    for line in _SKIPPED:
        terminalreporter.write_line(f"SKIPPED IS FAILED  {line}", red=True)
