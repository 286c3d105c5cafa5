"""The demo's text: whole files, each in one place, the same for every process."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from deltapost.cli.demo import corpus
from deltapost.cli.demo.corpus import held_out_batches, load_corpus, training_batch, unigram_loss
from deltapost.errors import ConfigurationError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty files whose texts are told apart by their first bytes, and folders that do not count."""
    for number in range(40):
        (tmp_path / f"m{number:02d}.py").write_bytes(f"<{number:02d}>".encode() * (10 + number))
    for folder in ("site-packages", "test", "encodings", "package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inside.py").write_bytes(f"<{folder}>".encode())
    (tmp_path / "data.txt").write_bytes(b"<text>")
    (tmp_path / "empty.py").write_bytes(b"")
    return tmp_path


def files_in(text: bytes) -> set[bytes]:
    return {part + b">" for part in text.split(b">") if part}


def test_every_file_is_held_out_or_in_exactly_one_shard(library: Path) -> None:
    loaded = load_corpus(4, root=library)
    parts = [files_in(text) for text in (*loaded.shards, loaded.held_out)]

    assert sum(map(len, parts)) == len(set().union(*parts)) == 41
    assert b"<package>" in set().union(*parts)


def test_third_party_code_tests_tables_and_other_files_are_left_out(library: Path) -> None:
    loaded = load_corpus(4, root=library)

    everything = b"".join((*loaded.shards, loaded.held_out))
    assert not files_in(everything) & {b"<site-packages>", b"<test>", b"<encodings>", b"<text>"}


def test_a_corpus_is_the_same_however_the_files_were_created(library: Path, tmp_path: Path) -> None:
    first = load_corpus(3, root=library)
    again = tmp_path / "again"
    again.mkdir()
    for path in sorted(library.glob("m*.py"), reverse=True):
        (again / path.name).write_bytes(path.read_bytes())
    (again / "package").mkdir()
    (again / "package" / "inside.py").write_bytes(b"<package>")

    assert load_corpus(3, root=again) == first


def test_shards_are_about_equal(library: Path) -> None:
    sizes = [len(shard) for shard in load_corpus(4, root=library).shards]

    assert max(sizes) - min(sizes) <= 4 * 50  # the largest file


def test_a_corpus_stops_at_its_cap_of_bytes(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_CORPUS_BYTES", 3_000)
    loaded = load_corpus(2, root=library)

    assert 2_500 < sum(map(len, (*loaded.shards, loaded.held_out))) <= 3_000


def test_too_little_text_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_bytes(b"x = 1\n")

    with pytest.raises(ConfigurationError, match="too little Python source for 4 learners"):
        load_corpus(4, root=tmp_path)


def test_this_python_has_enough_text_of_its_own() -> None:
    loaded = load_corpus(4)

    assert min(map(len, loaded.shards)) > 500_000
    assert len(loaded.held_out) > 100_000


def test_a_batch_depends_on_seed_and_step_alone_so_that_a_restart_goes_on() -> None:
    shard = bytes(range(256)) * 8
    first = [training_batch(shard, seed=3, step=step, batch_size=4, context=16) for step in range(6)]
    resumed = [training_batch(shard, seed=3, step=step, batch_size=4, context=16) for step in range(3, 6)]

    assert all(np.array_equal(a, b) for a, b in zip(first[3:], resumed, strict=True))
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], training_batch(shard, seed=4, step=0, batch_size=4, context=16))


def test_a_batch_holds_windows_of_the_shard_with_the_byte_after_each_input() -> None:
    # Given text in which each byte is one more than the byte before it
    batch = training_batch(bytes(range(256)) * 4, seed=1, step=1, batch_size=8, context=16)

    assert batch.shape == (8, 17)
    assert batch.dtype == np.int64
    assert np.array_equal((batch[:, 1:] - batch[:, :-1]) % 256, np.ones((8, 16)))


def test_every_window_of_a_shard_can_be_drawn() -> None:
    drawn = training_batch(b"abcd", seed=1, step=1, batch_size=200, context=3)

    assert {bytes(window.astype(np.uint8)) for window in drawn} == {b"abcd"}
    with pytest.raises(ConfigurationError, match="a shard of 3 bytes"):
        training_batch(b"abc", seed=1, step=1, batch_size=1, context=3)


def test_held_out_windows_are_the_same_every_time_and_reach_from_start_to_end() -> None:
    text = bytes(range(200))
    first, again = (list(held_out_batches(text, windows=10, batch_size=4, context=9)) for _ in range(2))

    assert [batch.shape for batch in first] == [(4, 10), (4, 10), (2, 10)]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0][0, 0] == 0
    assert first[-1][-1, -1] == 199
    with pytest.raises(ConfigurationError, match="a held-out text of 9 bytes"):
        next(held_out_batches(b"123456789", windows=1, batch_size=1, context=9))


def test_the_unigram_loss_is_the_cross_entropy_of_smoothed_frequencies() -> None:
    # Given 3 + 1 of 'a' and 1 + 1 of 'b' among 4 + 256 counts
    expected = (2 * math.log(260 / 4) + math.log(260 / 2)) / 3

    assert unigram_loss([b"aa", b"ab"], b"aab") == pytest.approx(expected)


def test_the_unigram_loss_of_bytes_never_seen_is_finite() -> None:
    assert unigram_loss([b"a"], b"z") == pytest.approx(math.log(257))
