"""What the demo shows: progress while it runs and the account at its end, rendered from plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = [
    "LearnerLine",
    "Participation",
    "Progress",
    "Summary",
    "byte_count",
    "dense_bytes",
    "progress_view",
    "rounds_table",
    "summary_table",
]


@dataclass(frozen=True)
class LearnerLine:
    """One learner as the progress view shows it; `state` is a word such as "training" or "killed"."""

    learner: str
    state: str
    step: int
    loss: float | None
    bytes_sent: int


@dataclass(frozen=True)
class Progress:
    """The whole demo at one moment. `rounds` counts the committed rounds of all fragments."""

    seconds: float
    rounds: int
    rounds_wanted: int
    learners: Sequence[LearnerLine]
    news: str = ""


@dataclass(frozen=True)
class Participation:
    """One participant of one round, as the ledger has it. `cosine` is its delta's with the merged one."""

    fragment: int
    version: int
    learner: str
    steps: int
    tokens: int
    weight: float
    norm: float
    cosine: float | None


@dataclass(frozen=True)
class Summary:
    """What the demo measured: losses in nats per byte of one held-out text, counts over all learners."""

    loss_before: float
    loss_after: float
    unigram_loss: float
    parameters: int
    learners: int
    steps: int
    bytes_sent: int
    bytes_received: int
    seconds: float


def dense_bytes(parameters: int, steps: int) -> int:
    """Bytes that dense fp32 data-parallel would have sent for `steps` steps, counted over all learners.

    A learner sends its whole gradient, 4 bytes a parameter, once a step. (A ring all-reduce sends up to twice
    as much: this is the least that an exchange of every gradient needs.)
    """
    return 4 * parameters * steps


def byte_count(count: int) -> str:
    """`count` in decimal units of three digits.

    >>> byte_count(999), byte_count(1_234_567), byte_count(45_600_000_000)
    ('999 B', '1.23 MB', '45.6 GB')
    """
    if count < 1000:
        return f"{count} B"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"


def progress_view(progress: Progress) -> RenderableType:
    """A bar of committed rounds, a row for each learner and what happened last."""
    wanted = max(progress.rounds_wanted, 1)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        Text("rounds"),
        ProgressBar(total=wanted, completed=min(progress.rounds, wanted), width=32),
        Text(f"{progress.rounds} of {progress.rounds_wanted} committed, {progress.seconds:.0f} s"),
    )
    learners = Table(box=None, pad_edge=False)
    for heading in ("learner", "state"):
        learners.add_column(heading)
    for heading in ("step", "loss", "sent"):
        learners.add_column(heading, justify="right", min_width=8)
    for line in progress.learners:
        learners.add_row(
            Text(line.learner),
            Text(line.state),
            str(line.step),
            "–" if line.loss is None else f"{line.loss:.3f}",
            byte_count(line.bytes_sent),
        )
    return Group(bar, learners, Text(progress.news, style="dim"))


def summary_table(summary: Summary) -> Table:
    """Losses and bytes, each with what it is to be compared with."""
    dense = dense_bytes(summary.parameters, summary.steps)
    title = f"{summary.learners} learners, {summary.steps:,} steps in {summary.seconds:.0f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("what it is")
    table.add_row("held-out loss before", f"{summary.loss_before:.3f}", "nats per byte, untrained model")
    table.add_row("held-out loss after", f"{summary.loss_after:.3f}", "same text, the committed anchors")
    table.add_row("unigram model", f"{summary.unigram_loss:.3f}", "same text, byte frequencies of the shards")
    table.add_section()
    table.add_row("learners sent", byte_count(summary.bytes_sent), "deltas and envelopes")
    table.add_row("learners read", byte_count(summary.bytes_received), "records and anchors or updates")
    table.add_row(
        "dense data-parallel",
        byte_count(dense),
        f"to send: 4 bytes × {summary.parameters:,} parameters × {summary.steps:,} steps",
    )
    table.add_row("less to send", f"{dense / max(summary.bytes_sent, 1):,.0f}×", "")
    return table


def rounds_table(participations: Sequence[Participation]) -> Table:
    """A line for each participant, a rule between rounds, in the order given."""
    table = Table(title="The last rounds, from the ledger", title_justify="left")
    for heading in ("fragment", "version"):
        table.add_column(heading, justify="right")
    table.add_column("participant")
    for heading in ("steps", "tokens", "weight", "norm", "cosine"):
        table.add_column(heading, justify="right")
    before: tuple[int, int] | None = None
    for one in participations:
        here = (one.fragment, one.version)
        if before not in (None, here):
            table.add_section()
        table.add_row(
            str(one.fragment) if here != before else "",
            str(one.version) if here != before else "",
            Text(one.learner),
            f"{one.steps:,}",
            f"{one.tokens:,}",
            f"{one.weight:.4g}",
            f"{one.norm:.3g}",
            "–" if one.cosine is None else f"{one.cosine:+.3f}",
        )
        before = here
    return table
