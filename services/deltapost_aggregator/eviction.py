"""EvictionCheck: a Redis that evicts keys when its memory is full drops whole streams: readiness says so.

redis/redis#6576: under any `maxmemory-policy` but `noeviction` a stream goes with everything in it. deltapost
heals from that, at the price of posting again; under `noeviction` nothing is lost in the first place.
"""

from __future__ import annotations

from typing import Final

from deltapost.errors import StreamError
from deltapost.events import events
from deltapost.streams.redis import RedisLog
from deltapost_aggregator.context import Services

logger = events(__name__)

#: Seconds between two looks at a setting that somebody may change while the server runs.
CHECK_SECONDS: Final = 30.0

COMPONENT: Final = "redis memory"


class EvictionCheck:
    """Asks the server for its policy when it is time. `step` is called in a loop by one thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._at = float("-inf")
        self._policy: str | None = None

    def step(self) -> None:
        """Raises StreamUnavailable without an answer; a server that may not be asked is fine."""
        log, now = self._services.log, self._services.monotonic()
        if not isinstance(log, RedisLog) or now < self._at:
            return
        try:
            policy = log.eviction_policy()
        except StreamError as error:
            if error.retryable:
                raise
            logger.info("eviction_policy_unknown", extra={"reason": str(error)})
            policy = None
        self._at = now + CHECK_SECONDS
        if policy in (None, "noeviction"):
            self._services.health.fine(COMPONENT)
        else:
            reason = f"maxmemory-policy is {policy}: Redis may evict whole streams; set it to noeviction"
            self._services.health.problem(COMPONENT, reason)
            if policy != self._policy:
                logger.error("redis_evicts", extra={"policy": policy, "reason": reason})
        self._policy = policy
