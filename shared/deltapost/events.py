"""Log events: a name and its facts. The facts are in the message too, so that any handler shows them.

`events(__name__)` is a logger for one module. A call names the event and gives its facts as `extra`; the
message reads `event fact="…" fact=3`, values JSON-quoted, so that no value can forge a line. Handlers that
want the parts find `record.event` and `record.facts`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import MutableMapping
from typing import Any


class _Events(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        facts = dict(kwargs.get("extra") or {})
        quoted = " ".join(f"{name}={json.dumps(value, default=str)}" for name, value in facts.items())
        kwargs["extra"] = {"event": msg, "facts": facts}
        return f"{msg} {quoted}".rstrip(), kwargs


def events(name: str) -> logging.LoggerAdapter[logging.Logger]:
    """The event logger of the module `name`. Adds no handler, as a library should not."""
    return _Events(logging.getLogger(name))
