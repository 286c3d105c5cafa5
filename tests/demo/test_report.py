"""The demo's account: every number with what it is compared with."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from deltapost.cli.demo.report import (
    LearnerLine,
    Participation,
    Progress,
    Summary,
    byte_count,
    dense_bytes,
    progress_view,
    rounds_table,
    summary_table,
)


def shown(view: RenderableType) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def row_with(text: str, *words: str) -> list[str]:
    """The cells of the one line that holds all of `words`."""
    (line,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return line.replace("│", " ").split()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (7 * 10**12, "7 TB"),
    ],
)
def test_bytes_are_told_in_three_digits(count: int, text: str) -> None:
    assert byte_count(count) == text


def test_dense_data_parallel_sends_four_bytes_a_parameter_and_step() -> None:
    assert dense_bytes(parameters=1_000_000, steps=1_200) == 4_800_000_000


def test_progress_shows_rounds_each_learners_loss_and_bytes_and_what_happened() -> None:
    learners = [
        LearnerLine("learner-0", "training", 120, 2.51, 2_500_000),
        LearnerLine("learner-1", "killed", 0, None, 0),
    ]

    text = shown(progress_view(Progress(12.3, 10, 40, learners, news="one is away")))

    assert "10 of 40 committed, 12 s" in text
    assert row_with(text, "learner-0") == ["learner-0", "training", "120", "2.510", "2.5", "MB"]
    assert row_with(text, "learner-1") == ["learner-1", "killed", "0", "–", "0", "B"]
    assert "one is away" in text


def test_progress_can_be_shown_before_anything_happened() -> None:
    assert "0 of 48 committed" in shown(progress_view(Progress(0.0, 0, 48, [])))


def test_the_summary_compares_losses_and_bytes() -> None:
    summary = Summary(
        loss_before=5.545,
        loss_after=2.0451,
        unigram_loss=3.177,
        parameters=1_000_000,
        learners=4,
        steps=1_200,
        bytes_sent=24_000_000,
        bytes_received=30_000_000,
        seconds=61.4,
    )

    text = shown(summary_table(summary))

    assert "4 learners, 1,200 steps in 61 s" in text
    assert "5.545" in row_with(text, "held-out loss before")
    assert "2.045" in row_with(text, "held-out loss after")
    assert "3.177" in row_with(text, "unigram model")
    assert row_with(text, "learners sent")[2:4] == ["24", "MB"]
    assert row_with(text, "learners read")[2:4] == ["30", "MB"]
    assert row_with(text, "dense", "4 bytes × 1,000,000 parameters × 1,200 steps")[2:4] == ["4.8", "GB"]
    assert "200×" in row_with(text, "less to send")


def test_the_rounds_list_participants_with_weight_norm_and_cosine() -> None:
    lines = [
        Participation(2, 11, "learner-0", 30, 7_680, 1_966_080.0, 1.25, 0.9),
        Participation(2, 11, "learner-1", 30, 7_680, 1_966_080.0, 0.75, -0.25),
        Participation(3, 11, "learner-[red]", 15, 3_840, 983_040.0, 0.5, None),
    ]

    text = shown(rounds_table(lines))

    first = ["2", "11", "learner-0", "30", "7,680", "1.966e+06", "1.25", "+0.900"]
    assert row_with(text, "learner-0") == first
    assert row_with(text, "learner-1") == ["learner-1", *first[3:6], "0.75", "-0.250"]
    assert row_with(text, "learner-[red]") == [
        "3", "11", "learner-[red]", "15", "3,840", "9.83e+05", "0.5", "–",
    ]  # fmt: skip
