"""Several aggregators: who is alive; withdrawn seals, deadly entries; who may speak for a learner.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
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
    (
        "seals",
        "record_sha256",
        {
            database: f"{type_} CONSTRAINT ck_seals_record_sha256_32_bytes CHECK (length(record_sha256) = 32)"
            for database, type_ in (("sqlite", "BLOB"), ("postgresql", "BYTEA"))
        },
    ),
    ("fragments", "started_position", {"sqlite": "TEXT", "postgresql": "TEXT"}),
    (
        "runs",
        "finish_requested_at",
        {"sqlite": "DATETIME", "postgresql": "TIMESTAMP WITH TIME ZONE"},
    ),
)


def upgrade() -> None:
    dialect = op.get_bind().dialect.name
    for table, name, definition in _COLUMNS:
        op.execute(f"ALTER TABLE {table} ADD COLUMN {name} {definition[dialect]}")
    op.create_table(
        "aggregators",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("length(name) BETWEEN 1 AND 64", name=op.f("ck_aggregators_name_length")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aggregators")),
    )
    op.create_table(
        "aggregator_runs",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["name"], ["aggregators.name"], name=op.f("fk_aggregator_runs_aggregators")),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], name=op.f("fk_aggregator_runs_runs")),
        sa.PrimaryKeyConstraint("name", "run", name=op.f("pk_aggregator_runs")),
    )
    op.create_table(
        "suspects",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("entry", sa.LargeBinary(length=32), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.CheckConstraint("length(entry) = 32", name=op.f("ck_suspects_entry_32_bytes")),
        sa.CheckConstraint("starts >= 1", name=op.f("ck_suspects_starts_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"], ["fragments.run", "fragments.fragment"], name=op.f("fk_suspects_fragments")
        ),
        sa.PrimaryKeyConstraint("run", "fragment", "entry", name=op.f("pk_suspects")),
    )
    _create_learner_keys()
    _create_fragment_ends()


def _create_learner_keys() -> None:
    op.create_table(
        "learner_keys",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("learner", sa.String(length=64), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("public_key", sa.LargeBinary(length=32), nullable=True),
        sa.Column("from_version", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.LargeBinary(), nullable=False),
        sa.Column("entry_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.CheckConstraint(
            "(action = 'revoke') = (public_key IS NULL)", name=op.f("ck_learner_keys_revoked_without_key")
        ),
        sa.CheckConstraint(
            "action IN ('add', 'rotate', 'revoke')", name=op.f("ck_learner_keys_action_known")
        ),
        sa.CheckConstraint("from_version >= 0", name=op.f("ck_learner_keys_from_version_minimum")),
        sa.CheckConstraint("length(entry_sha256) = 32", name=op.f("ck_learner_keys_entry_sha256_32_bytes")),
        sa.CheckConstraint("length(learner) BETWEEN 1 AND 64", name=op.f("ck_learner_keys_learner_length")),
        sa.CheckConstraint("length(public_key) = 32", name=op.f("ck_learner_keys_public_key_32_bytes")),
        sa.CheckConstraint("number >= 1", name=op.f("ck_learner_keys_number_minimum")),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], name=op.f("fk_learner_keys_runs")),
        sa.PrimaryKeyConstraint("run", "number", name=op.f("pk_learner_keys")),
    )
    op.create_index("ix_learner_keys_run_learner", "learner_keys", ["run", "learner"])


def _create_fragment_ends() -> None:
    op.create_table(
        "fragment_ends",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("end", sa.LargeBinary(), nullable=False),
        sa.Column("end_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("attestation", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("length(end_sha256) = 32", name=op.f("ck_fragment_ends_end_sha256_32_bytes")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_fragment_ends_version_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"],
            ["fragments.run", "fragments.fragment"],
            name=op.f("fk_fragment_ends_fragments"),
        ),
        sa.PrimaryKeyConstraint("run", "fragment", name=op.f("pk_fragment_ends")),
    )


def downgrade() -> None:
    op.drop_table("fragment_ends")
    op.drop_table("learner_keys")
    op.drop_table("suspects")
    op.drop_table("aggregator_runs")
    op.drop_table("aggregators")
    for table, name, _ in reversed(_COLUMNS):
        op.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
