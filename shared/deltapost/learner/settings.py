"""LearnerSettings: everything a learner is told, from environment, file and arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, StringConstraints

from deltapost.errors import ConfigurationError
from deltapost.limits import LEARNER_LEASE_SECONDS
from deltapost.settings import Settings


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/deltapost`, or `~/.local/state/deltapost`."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "deltapost"


class LearnerSettings(Settings):
    """Settings of `deltapost.join`; each is `DELTAPOST_` and its name in capitals."""

    redis_url: SecretStr
    store: str
    #: The learner's key; made in the state directory at first use where none is named.
    signing_key_file: str | None = None
    #: Where journal, pinned history and keys live. One learner's directory serves one process at a time.
    state_dir: Path = Field(default_factory=default_state_dir)
    #: The aggregators' public key (64 hexadecimal digits), pinned in the manifest of a run created here.
    aggregator_key: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] | None = None
    #: Seconds a learner counts as live after a message; `alive` goes out at a third of it.
    learner_lease_seconds: Annotated[float, Field(gt=0, le=86_400)] = LEARNER_LEASE_SECONDS
    #: Longest wait for mail, in seconds.
    poll_seconds: Annotated[float, Field(gt=0, le=30)] = 0.5
    #: Seconds after which an unanswered envelope is posted again; doubles each time, to 5 minutes.
    repost_seconds: Annotated[float, Field(gt=0, le=86_400)] = 20.0

    def pinned_aggregator_key(self) -> bytes | None:
        return bytes.fromhex(self.aggregator_key) if self.aggregator_key else None

    def key_file(self, learner: str) -> Path:
        """Where the learner's signing key lies."""
        if self.signing_key_file:
            return Path(self.signing_key_file)
        return self.state_dir / "keys" / f"{learner}.key"

    def prepare_state(self) -> None:
        """Makes the state directory. Raises ConfigurationError naming it."""
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the state directory {str(self.state_dir)!r} cannot be made: {error.strerror}",
                hint="set DELTAPOST_STATE_DIR to a directory of yours",
            ) from None
