"""Runs migrations on the connection, and in the transaction, that `deltapost.ledger.revisions` hands over."""

from __future__ import annotations

from alembic import context

from deltapost.ledger.tables import Base

connection = context.config.attributes.get("connection")
if connection is None:
    raise SystemExit("migrations run through `deltapost ledger migrate`, which holds the lock they need")

context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
