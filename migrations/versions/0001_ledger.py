"""The first schema: runs, fragments, learners, contributions, unverified, seals, rounds, participants.

With the view `round_audit`, one row per round for people and dashboards.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_JSON: Final = sa.JSON().with_variant(postgresql.JSONB(), "postgresql")

#: One row per round. An answered envelope is one that the round's record lists with a final verdict.
_ROUND_AUDIT: Final = """
CREATE VIEW round_audit AS
SELECT
    rounds.run AS run,
    (rounds.version - 1) * (SELECT count(*) FROM fragments WHERE fragments.run = rounds.run)
        + rounds.fragment AS round,
    rounds.fragment AS fragment,
    rounds.version AS version,
    rounds.sequence AS sequence,
    rounds.participants AS participants,
    rounds.degraded AS degraded,
    rounds.cosine AS cosine,
    (SELECT count(*) FROM contributions AS answered WHERE {answered}
        AND answered.verdict = 'accepted') AS accepted,
    (SELECT count(*) FROM contributions AS answered WHERE {answered}
        AND answered.verdict IN ('late', 'stale')) AS late,
    (SELECT count(*) FROM contributions AS answered WHERE {answered}
        AND answered.verdict NOT IN ('accepted', 'late', 'stale')) AS rejected,
    (SELECT CAST(coalesce(sum(counted.count), 0) AS BIGINT) FROM unverified AS counted
        WHERE counted.run = rounds.run AND counted.fragment = rounds.fragment
        AND counted.version = rounds.version) AS unverified,
    rounds.quorum_seconds AS quorum_seconds,
    rounds.grace_seconds AS grace_seconds,
    rounds.close_seconds AS close_seconds,
    rounds.sync_seconds AS sync_seconds,
    rounds.bytes_in AS bytes_in,
    rounds.update_size AS update_size,
    rounds.anchor_size AS anchor_size,
    {record_hex} AS record_sha256,
    rounds.committed_at AS committed_at
FROM rounds
"""

_ANSWERED: Final = (
    "answered.run = rounds.run AND answered.fragment = rounds.fragment"
    " AND answered.answered_version = rounds.version"
)

_RECORD_HEX: Final = {
    "sqlite": "lower(hex(rounds.record_sha256))",
    "postgresql": "encode(rounds.record_sha256, 'hex')",
}


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("manifest", sa.LargeBinary(), nullable=False),
        sa.Column("manifest_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("aggregator_key", sa.LargeBinary(length=32), nullable=True),
        sa.Column("state", sa.Text(), server_default="active", nullable=False),
        sa.Column("next_sequence", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('active', 'paused', 'finished')", name=op.f("ck_runs_state_known")),
        sa.CheckConstraint("length(aggregator_key) = 32", name=op.f("ck_runs_aggregator_key_32_bytes")),
        sa.CheckConstraint("length(manifest_sha256) = 32", name=op.f("ck_runs_manifest_sha256_32_bytes")),
        sa.CheckConstraint("length(run) BETWEEN 1 AND 64", name=op.f("ck_runs_run_length")),
        sa.CheckConstraint("next_sequence >= 1", name=op.f("ck_runs_next_sequence_minimum")),
        sa.PrimaryKeyConstraint("run", name=op.f("pk_runs")),
    )
    op.create_table(
        "fragments",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("head", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("head_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("stream_epoch", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("position", sa.Text(), server_default="0-0", nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("lease_epoch", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("announced", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("waiting_reason", sa.Text(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("announced >= 0", name=op.f("ck_fragments_announced_minimum")),
        sa.CheckConstraint("fragment >= 0", name=op.f("ck_fragments_fragment_minimum")),
        sa.CheckConstraint("head >= 0", name=op.f("ck_fragments_head_minimum")),
        sa.CheckConstraint("lease_epoch >= 0", name=op.f("ck_fragments_lease_epoch_minimum")),
        sa.CheckConstraint("length(head_sha256) = 32", name=op.f("ck_fragments_head_sha256_32_bytes")),
        sa.CheckConstraint("length(position) > 0", name=op.f("ck_fragments_position_length")),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], name=op.f("fk_fragments_runs")),
        sa.PrimaryKeyConstraint("run", "fragment", name=op.f("pk_fragments")),
    )
    op.create_table(
        "learners",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("learner", sa.String(length=64), nullable=False),
        sa.Column("public_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("first_version", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("session", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("counter", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("local_step", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "left",
            sa.Boolean(create_constraint=True, name="left_bool"),
            server_default=sa.false(),
            nullable=False,
        ),
        sa.CheckConstraint("counter >= 0", name=op.f("ck_learners_counter_minimum")),
        sa.CheckConstraint("first_version >= 0", name=op.f("ck_learners_first_version_minimum")),
        sa.CheckConstraint("length(learner) BETWEEN 1 AND 64", name=op.f("ck_learners_learner_length")),
        sa.CheckConstraint("length(public_key) = 32", name=op.f("ck_learners_public_key_32_bytes")),
        sa.CheckConstraint("local_step >= 0", name=op.f("ck_learners_local_step_minimum")),
        sa.CheckConstraint("session >= 0", name=op.f("ck_learners_session_minimum")),
        sa.ForeignKeyConstraint(["run"], ["runs.run"], name=op.f("fk_learners_runs")),
        sa.PrimaryKeyConstraint("run", "learner", name=op.f("pk_learners")),
    )
    op.create_table(
        "contributions",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("envelope", sa.LargeBinary(length=32), nullable=False),
        sa.Column("fragment", sa.Integer(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("learner", sa.String(length=64), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=True),
        sa.Column("payload_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("payload_size", sa.BigInteger(), nullable=True),
        sa.Column("local_step", sa.BigInteger(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=True),
        sa.Column("step_seconds", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", _JSON, nullable=True),
        sa.Column("final", sa.Boolean(create_constraint=True, name="final_bool"), nullable=True),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("deliveries", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
        sa.Column("entry_id", sa.Text(), nullable=True),
        sa.Column("stream_epoch", sa.Text(), nullable=True),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("answered_version", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "verdict IN ('accepted', 'conflict', 'late', 'stale', 'ahead', 'zero_steps', 'zero_weight', "
            "'malformed', 'schema', 'corrupt', 'missing', 'too_large', 'outlier', 'non_finite')",
            name=op.f("ck_contributions_verdict_known"),
        ),
        sa.CheckConstraint("answered_version >= 1", name=op.f("ck_contributions_answered_version_minimum")),
        sa.CheckConstraint("deliveries >= 1", name=op.f("ck_contributions_deliveries_minimum")),
        sa.CheckConstraint("length(envelope) = 32", name=op.f("ck_contributions_envelope_32_bytes")),
        sa.CheckConstraint("length(learner) BETWEEN 1 AND 64", name=op.f("ck_contributions_learner_length")),
        sa.CheckConstraint(
            "length(payload_sha256) = 32", name=op.f("ck_contributions_payload_sha256_32_bytes")
        ),
        sa.CheckConstraint("local_step >= 0", name=op.f("ck_contributions_local_step_minimum")),
        sa.CheckConstraint(
            "loss IS NULL OR (coalesce(loss * 0, 1) = 0)", name=op.f("ck_contributions_loss_finite")
        ),
        sa.CheckConstraint("payload_size >= 0", name=op.f("ck_contributions_payload_size_minimum")),
        sa.CheckConstraint(
            "step_seconds IS NULL OR (coalesce(step_seconds * 0, 1) = 0 AND step_seconds >= 0)",
            name=op.f("ck_contributions_step_seconds_finite"),
        ),
        sa.CheckConstraint("steps >= 0", name=op.f("ck_contributions_steps_minimum")),
        sa.CheckConstraint("tokens >= 0", name=op.f("ck_contributions_tokens_minimum")),
        sa.CheckConstraint("version >= 0", name=op.f("ck_contributions_version_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"],
            ["fragments.run", "fragments.fragment"],
            name=op.f("fk_contributions_fragments"),
        ),
        sa.PrimaryKeyConstraint("run", "envelope", name=op.f("pk_contributions")),
    )
    op.create_index(
        op.f("ix_contributions_run_fragment_answered_version"),
        "contributions",
        ["run", "fragment", "answered_version"],
        unique=False,
    )
    op.create_index(
        op.f("ix_contributions_run_learner_fragment_version"),
        "contributions",
        ["run", "learner", "fragment", "version"],
        unique=False,
    )
    op.create_index(
        "uq_contributions_accepted",
        "contributions",
        ["run", "fragment", "version", "learner"],
        unique=True,
        sqlite_where=sa.text("verdict = 'accepted'"),
        postgresql_where=sa.text("verdict = 'accepted'"),
    )
    op.create_table(
        "rounds",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("record_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("previous_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("attestation", sa.LargeBinary(), nullable=False),
        sa.Column("attestation_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("participants", sa.Integer(), nullable=False),
        sa.Column("degraded", sa.Boolean(create_constraint=True, name="degraded_bool"), nullable=False),
        sa.Column("cosine", sa.Double(), nullable=True),
        sa.Column("anchor_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("anchor_size", sa.BigInteger(), nullable=True),
        sa.Column("outer_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("outer_size", sa.BigInteger(), nullable=True),
        sa.Column("update_sha256", sa.LargeBinary(length=32), nullable=True),
        sa.Column("update_size", sa.BigInteger(), nullable=True),
        sa.Column("bytes_in", sa.BigInteger(), nullable=False),
        sa.Column("quorum_seconds", sa.Double(), nullable=True),
        sa.Column("grace_seconds", sa.Double(), nullable=True),
        sa.Column("close_seconds", sa.Double(), nullable=True),
        sa.Column("sync_seconds", sa.Double(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("lease_epoch", sa.BigInteger(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("(participants < 2) = (cosine IS NULL)", name=op.f("ck_rounds_cosine_needs_two")),
        sa.CheckConstraint("anchor_size >= 0", name=op.f("ck_rounds_anchor_size_minimum")),
        sa.CheckConstraint("bytes_in >= 0", name=op.f("ck_rounds_bytes_in_minimum")),
        sa.CheckConstraint(
            "close_seconds IS NULL OR (coalesce(close_seconds * 0, 1) = 0 AND close_seconds >= 0)",
            name=op.f("ck_rounds_close_seconds_finite"),
        ),
        sa.CheckConstraint("cosine BETWEEN -1 AND 1", name=op.f("ck_rounds_cosine_range")),
        sa.CheckConstraint("generation >= 0", name=op.f("ck_rounds_generation_minimum")),
        sa.CheckConstraint(
            "grace_seconds IS NULL OR (coalesce(grace_seconds * 0, 1) = 0 AND grace_seconds >= 0)",
            name=op.f("ck_rounds_grace_seconds_finite"),
        ),
        sa.CheckConstraint("lease_epoch >= 0", name=op.f("ck_rounds_lease_epoch_minimum")),
        sa.CheckConstraint("length(anchor_sha256) = 32", name=op.f("ck_rounds_anchor_sha256_32_bytes")),
        sa.CheckConstraint(
            "length(attestation_sha256) = 32", name=op.f("ck_rounds_attestation_sha256_32_bytes")
        ),
        sa.CheckConstraint("length(outer_sha256) = 32", name=op.f("ck_rounds_outer_sha256_32_bytes")),
        sa.CheckConstraint("length(previous_sha256) = 32", name=op.f("ck_rounds_previous_sha256_32_bytes")),
        sa.CheckConstraint("length(record_sha256) = 32", name=op.f("ck_rounds_record_sha256_32_bytes")),
        sa.CheckConstraint("length(update_sha256) = 32", name=op.f("ck_rounds_update_sha256_32_bytes")),
        sa.CheckConstraint("outer_size >= 0", name=op.f("ck_rounds_outer_size_minimum")),
        sa.CheckConstraint("participants >= 1", name=op.f("ck_rounds_participants_minimum")),
        sa.CheckConstraint(
            "quorum_seconds IS NULL OR (coalesce(quorum_seconds * 0, 1) = 0 AND quorum_seconds >= 0)",
            name=op.f("ck_rounds_quorum_seconds_finite"),
        ),
        sa.CheckConstraint("sequence >= 1", name=op.f("ck_rounds_sequence_minimum")),
        sa.CheckConstraint(
            "sync_seconds IS NULL OR (coalesce(sync_seconds * 0, 1) = 0 AND sync_seconds >= 0)",
            name=op.f("ck_rounds_sync_seconds_finite"),
        ),
        sa.CheckConstraint("update_size >= 0", name=op.f("ck_rounds_update_size_minimum")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_rounds_version_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"], ["fragments.run", "fragments.fragment"], name=op.f("fk_rounds_fragments")
        ),
        sa.PrimaryKeyConstraint("run", "fragment", "version", name=op.f("pk_rounds")),
        sa.UniqueConstraint("run", "sequence", name=op.f("uq_rounds_run_sequence")),
    )
    op.create_table(
        "seals",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("stream_epoch", sa.Text(), nullable=False),
        sa.Column("position", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("content_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("degraded", sa.Boolean(create_constraint=True, name="degraded_bool"), nullable=False),
        sa.Column("sealed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("generation >= 0", name=op.f("ck_seals_generation_minimum")),
        sa.CheckConstraint("length(content_sha256) = 32", name=op.f("ck_seals_content_sha256_32_bytes")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_seals_version_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"], ["fragments.run", "fragments.fragment"], name=op.f("fk_seals_fragments")
        ),
        sa.PrimaryKeyConstraint("run", "fragment", "version", "generation", name=op.f("pk_seals")),
    )
    op.create_table(
        "unverified",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("learner", sa.String(length=64), server_default=sa.text("''"), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "reason IN ('malformed', 'unknown_learner', 'bad_signature', 'over_quota')",
            name=op.f("ck_unverified_reason_known"),
        ),
        sa.CheckConstraint("count >= 1", name=op.f("ck_unverified_count_minimum")),
        sa.CheckConstraint("length(learner) BETWEEN 0 AND 64", name=op.f("ck_unverified_learner_length")),
        sa.CheckConstraint("version >= 1", name=op.f("ck_unverified_version_minimum")),
        sa.ForeignKeyConstraint(
            ["run", "fragment"], ["fragments.run", "fragments.fragment"], name=op.f("fk_unverified_fragments")
        ),
        sa.PrimaryKeyConstraint(
            "run", "fragment", "version", "reason", "learner", name=op.f("pk_unverified")
        ),
    )
    op.create_table(
        "participants",
        sa.Column("run", sa.String(length=64), nullable=False),
        sa.Column("fragment", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("learner", sa.String(length=64), nullable=False),
        sa.Column("envelope", sa.LargeBinary(length=32), nullable=False),
        sa.Column("payload_sha256", sa.LargeBinary(length=32), nullable=False),
        sa.Column("payload_size", sa.BigInteger(), nullable=False),
        sa.Column("local_step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("step_seconds", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("metrics", _JSON, nullable=True),
        sa.Column("final", sa.Boolean(create_constraint=True, name="final_bool"), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("norm", sa.Double(), nullable=False),
        sa.Column("cosine", sa.Double(), nullable=False),
        sa.CheckConstraint("cosine BETWEEN -1 AND 1", name=op.f("ck_participants_cosine_range")),
        sa.CheckConstraint("length(envelope) = 32", name=op.f("ck_participants_envelope_32_bytes")),
        sa.CheckConstraint("length(learner) BETWEEN 1 AND 64", name=op.f("ck_participants_learner_length")),
        sa.CheckConstraint(
            "length(payload_sha256) = 32", name=op.f("ck_participants_payload_sha256_32_bytes")
        ),
        sa.CheckConstraint("local_step >= 0", name=op.f("ck_participants_local_step_minimum")),
        sa.CheckConstraint(
            "loss IS NULL OR (coalesce(loss * 0, 1) = 0)", name=op.f("ck_participants_loss_finite")
        ),
        sa.CheckConstraint(
            "norm IS NULL OR (coalesce(norm * 0, 1) = 0 AND norm >= 0)",
            name=op.f("ck_participants_norm_finite"),
        ),
        sa.CheckConstraint("payload_size >= 0", name=op.f("ck_participants_payload_size_minimum")),
        sa.CheckConstraint(
            "step_seconds IS NULL OR (coalesce(step_seconds * 0, 1) = 0 AND step_seconds >= 0)",
            name=op.f("ck_participants_step_seconds_finite"),
        ),
        sa.CheckConstraint("steps >= 1", name=op.f("ck_participants_steps_minimum")),
        sa.CheckConstraint("tokens >= 0", name=op.f("ck_participants_tokens_minimum")),
        sa.CheckConstraint(
            "weight IS NULL OR (coalesce(weight * 0, 1) = 0 AND weight > 0)",
            name=op.f("ck_participants_weight_finite"),
        ),
        sa.ForeignKeyConstraint(
            ["run", "fragment", "version"],
            ["rounds.run", "rounds.fragment", "rounds.version"],
            name=op.f("fk_participants_rounds"),
        ),
        sa.PrimaryKeyConstraint("run", "fragment", "version", "learner", name=op.f("pk_participants")),
    )
    op.create_index(op.f("ix_participants_run_learner"), "participants", ["run", "learner"], unique=False)
    op.execute(_ROUND_AUDIT.format(answered=_ANSWERED, record_hex=_RECORD_HEX[op.get_bind().dialect.name]))


def downgrade() -> None:
    op.execute("DROP VIEW round_audit")
    for table in (
        "participants",
        "rounds",
        "seals",
        "unverified",
        "contributions",
        "learners",
        "fragments",
        "runs",
    ):
        op.drop_table(table)
