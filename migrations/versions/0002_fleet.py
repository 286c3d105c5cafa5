"""Several aggregators, and what their recovery has to remember: withdrawn seals.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: Added columns: table, name, and the definition in each database. SQLite takes a named check with the
#: column only inline, and Postgres has real booleans.
_COLUMNS = (
    (
        "seals",
        "withdrawn",
        {
            "sqlite": "BOOLEAN DEFAULT 0 NOT NULL "
            "CONSTRAINT ck_seals_withdrawn_bool CHECK (withdrawn IN (0, 1))",
            "postgresql": "BOOLEAN DEFAULT false NOT NULL",
        },
    ),
)


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, name, definition in _COLUMNS:
        op.execute(f"ALTER TABLE {table} ADD COLUMN {name} {definition[dialect]}")


def downgrade() -> None:
    for table, name, _ in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
