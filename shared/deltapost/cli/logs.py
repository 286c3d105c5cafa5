"""Log lines of the services: one line an event, with its fields, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Final, Literal

#: What a LogRecord has of its own: everything else is a field that the event brought.
_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in record.__dict__.items() if name not in _OWN}


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = " ".join(
            f"{name}={json.dumps(value, default=str, ensure_ascii=True)}"
            for name, value in _fields(record).items()
        )
        line = f"{moment} {record.levelname.lower():7} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=True)


def log_to_stderr(form: Literal["text", "json"] = "text", level: int = logging.INFO) -> None:
    """Sends deltapost's log to stderr. Values are JSON-quoted, so that no field can forge a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("deltapost", "deltapost_aggregator", "deltapost_ledger"):
        logging.getLogger(name).setLevel(level)
