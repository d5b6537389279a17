"""What is away is said once when that begins and once when it is over."""

from __future__ import annotations

import logging

import pytest
from django.db import InterfaceError, OperationalError

from llmgw.core.outages import Job, Outage

log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_each_outage_is_said_once_with_what_its_first_failure_says(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(log, "%s is away (%s)", "It is back")
    outage.works()
    for told in ("a", "b", "c"):
        outage.fails("It", told)
    outage.works()
    outage.works()
    outage.fails("It", "d")
    assert caplog.messages == ["It is away (a)", "It is back", "It is away (d)"]


def runs(job: Job, *errors: Exception | None) -> None:
    for error in errors:
        with job.guarded("the next one is soon"):
            if error:
                raise error


def test_a_job_that_fails_again_and_again_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    full, closed = OperationalError("full"), InterfaceError("closed")
    runs(Job(log, "It failed", "It works"), None, full, full, closed, full, None, None, full)
    assert caplog.messages == [
        "It failed, as the store cannot be used (full); the next one is soon",
        "It works",
        "It failed, as the store cannot be used (full); the next one is soon",
    ]
    assert "Traceback" not in caplog.text


def test_another_fault_is_told_of_with_its_traceback_though_the_job_failed_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs(Job(log, "It failed", "It works"), OperationalError("full"), KeyError("x"), KeyError("x"), ValueError(), None)
    assert caplog.messages == [
        "It failed, as the store cannot be used (full); the next one is soon",
        "It failed; the next one is soon",
        "It failed; the next one is soon",
        "It works",
    ]
    assert caplog.text.count("Traceback") == 2
