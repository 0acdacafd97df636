"""Log lines are JSON, and nothing that may hold a secret is logged."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from pd_operator import logs


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    others = {name: logging.getLogger(name).level for name in (*logs.PINNED, "kopf.objects")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, old in others.items():
        logging.getLogger(name).setLevel(old)


def lines(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_time_level_logger_and_message() -> None:
    stream = io.StringIO()
    logs.setup("INFO", stream)
    logging.getLogger("a.b").info("count %d\nand a second line", 3)
    logging.getLogger("a.b").debug("unseen")
    (line,) = lines(stream)
    assert line["msg"] == "count 3\nand a second line"
    assert (line["level"], line["logger"]) == ("INFO", "a.b")
    assert line["ts"].endswith("Z")
    assert set(line) == {"ts", "level", "logger", "msg"}


def test_an_exception_is_one_line() -> None:
    stream = io.StringIO()
    logs.setup("INFO", stream)
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("a").exception("failed")
    (line,) = lines(stream)
    assert "ValueError: wrong" in line["error"]


@pytest.mark.parametrize("name", ["kopf", "kopf.activities", "kopf._cogs.clients.watching", "kubernetes", "kubernetes.client.rest"])
def test_libraries_that_log_bodies_at_debug_stay_at_info(name: str) -> None:
    stream = io.StringIO()
    logs.setup("DEBUG", stream)
    logging.getLogger(name).debug("the body: hunter2")
    logging.getLogger(name).info("harmless")
    logging.getLogger("pd_operator.x").debug("ours is seen")
    assert [line["msg"] for line in lines(stream)] == ["harmless", "ours is seen"]


def test_kopf_lines_about_objects_are_warnings_only_and_carry_the_key() -> None:
    stream = io.StringIO()
    logs.setup("INFO", stream)
    logger = logging.getLogger("kopf.objects")
    logger.info("Handler 'deployment' succeeded.")
    logger.warning("throttled", extra={"k8s_ref": {"namespace": "ns", "name": "chat"}})
    (line,) = lines(stream)
    assert (line["msg"], line["key"]) == ("throttled", "ns/chat")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="log level 'LOUD': one of DEBUG, INFO, WARNING, ERROR is accepted"):
        logs.setup("LOUD")
