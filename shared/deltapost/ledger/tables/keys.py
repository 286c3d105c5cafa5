"""The table of learner keys: the run's registry, entry by entry, as its creator signed it."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, Integer, LargeBinary, Text
from sqlalchemy.orm import Mapped, mapped_column

from deltapost.ledger.columns import at_least, has_32_bytes, identifier, one_of
from deltapost.ledger.tables.base import Base, Hash, Id
from deltapost.serialization.registry import KEY_ACTIONS


class LearnerKeyRow(Base):
    """An entry of the registry: from base version `from_version` on, `public_key` speaks for the learner.

    All history, all from the object `registry/NUMBER`, whose bytes are `entry`. public_key is NULL for a
    `revoke`. A learner of an open run that has no entry here is spoken for by its key in `learners`.
    """

    __tablename__ = "learner_keys"

    run: Mapped[str] = mapped_column(Id, ForeignKey("runs.run"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    learner: Mapped[str] = mapped_column(Id)
    action: Mapped[str] = mapped_column(Text)
    public_key: Mapped[bytes | None] = mapped_column(Hash)
    from_version: Mapped[int] = mapped_column(BigInteger)
    entry: Mapped[bytes] = mapped_column(LargeBinary)
    entry_sha256: Mapped[bytes] = mapped_column(Hash)

    __table_args__ = (
        identifier("learner"),
        one_of("action", KEY_ACTIONS),
        has_32_bytes("public_key"),
        has_32_bytes("entry_sha256"),
        *at_least(0, "from_version"),
        *at_least(1, "number"),
        CheckConstraint("(action = 'revoke') = (public_key IS NULL)", name="revoked_without_key"),
        Index(None, "run", "learner"),
    )
