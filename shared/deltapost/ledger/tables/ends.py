"""The table of fragments that have ended."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKeyConstraint, Integer, LargeBinary
from sqlalchemy.orm import Mapped, mapped_column

from deltapost.ledger.columns import at_least, has_32_bytes
from deltapost.ledger.tables.base import Base, Hash, Id


class FragmentEndRow(Base):
    """A fragment that merges nothing more: its end stands where the record of `version` would.

    All history, from that object and its attestation; what it answers is in `contributions`.
    """

    __tablename__ = "fragment_ends"

    run: Mapped[str] = mapped_column(Id, primary_key=True)
    fragment: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    version: Mapped[int] = mapped_column(BigInteger)
    end: Mapped[bytes] = mapped_column(LargeBinary)
    end_sha256: Mapped[bytes] = mapped_column(Hash)
    attestation: Mapped[bytes] = mapped_column(LargeBinary)

    __table_args__ = (
        ForeignKeyConstraint(["run", "fragment"], ["fragments.run", "fragments.fragment"]),
        has_32_bytes("end_sha256"),
        *at_least(1, "version"),
    )
