"""Tests of measured times: a test that fails on a busy machine is measured again.

A test marked `measured` plants a delay in real processes and checks the times that tutti measures.
Other programs on the same cores may disturb a single measurement (other tests do not: alone.py),
while a bug in tutti affects all measurements. So a failed test runs again with new fixtures, up to
three times, and the summary of the test run lists the test and its failure.
"""

import pytest
from _pytest.runner import runtestprotocol

ATTEMPTS = 3

_AGAIN = "measured again"

_again: list[tuple[str, object]] = []  # (test, failure of an earlier attempt)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = float(config.getini("timeout"))
    for item in items:
        if item.get_closest_marker("measured") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(ATTEMPTS * seconds))


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("measured") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for attempt in range(ATTEMPTS):
        if attempt:
            # Module fixtures hold the measurements: tear them down, so that they run again.
            item.session._setupstate.teardown_exact(None)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        failed = [each for each in reports if each.failed]
        if not failed or attempt == ATTEMPTS - 1:
            break
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        why = crash.message.splitlines()[0] if crash else failed[0].when
        item.user_properties.append((_AGAIN, why))  # the reports carry it to the main process
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        found = [why for name, why in report.user_properties if name == _AGAIN]
        _again.extend((report.nodeid, why) for why in found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, why in _again:
        terminalreporter.write_line(f"MEASURED AGAIN {test}: {why}")
