"""Rewinding: forgetting every verdict that no record answered, when another seal than ours decides.

Verdicts are provisional until a record carries them. What a record answered stays, and when the stream is
read again it only counts as a delivery.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from deltapost.ledger.leases import Lease
from deltapost.ledger.tables import ContributionRow, FragmentRow, UnverifiedRow


def drop_unanswered(session: Session, lease: Lease, *, keep: Collection[bytes] = ()) -> None:
    """Deletes the fragment's unanswered verdicts but those of the envelopes in `keep`, and its open counts.

    The caller sets the position back to the start of the stream in the same transaction.
    """
    session.execute(
        delete(ContributionRow).where(
            ContributionRow.run == lease.run,
            ContributionRow.fragment == lease.fragment,
            ContributionRow.answered_version.is_(None),
            ContributionRow.envelope.not_in(keep),
        )
    )
    session.execute(
        delete(UnverifiedRow).where(
            UnverifiedRow.run == lease.run,
            UnverifiedRow.fragment == lease.fragment,
            UnverifiedRow.version
            > select(FragmentRow.head)
            .where(FragmentRow.run == lease.run, FragmentRow.fragment == lease.fragment)
            .scalar_subquery(),
        )
    )
