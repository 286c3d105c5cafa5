"""Mutants of what is read, measured and refused: rows 12 to 15, 17, 18, 20, 22 and 23 of the table."""

from __future__ import annotations

from mutants.mutant import AGGREGATOR, LIBRARY, Mutant

_PAYLOAD = f"{LIBRARY}/serialization/payload.py"
_ADMISSION = f"{LIBRARY}/algorithms/admission.py"
_SEALING = f"{LIBRARY}/algorithms/sealing.py"
_KINDS = "tests/aggregator/test_envelope_kinds.py"

MUTANTS = (
    Mutant(
        12,
        "no more of an object is read than its envelope announces",
        f"{AGGREGATOR}/payloads.py",
        "length = message.payload.size + 1",
        "length = None",
        "tests/hostile/test_oversize.py::test_oversized_objects_are_refused_without_being_read",
    ),
    Mutant(
        13,
        "a header above its limit is not parsed",
        _PAYLOAD,
        "if length > MAX_HEADER_BYTES:",
        "if False:",
        "tests/serialization/test_payload.py",
    ),
    Mutant(
        13,
        "a key that comes twice is refused",
        _PAYLOAD,
        "if key in made:",
        "if False:",
        "tests/serialization/test_payload.py::test_a_hostile_payload_is_malformed_and_says_where",
    ),
    Mutant(
        13,
        "overlaps and holes are refused",
        _PAYLOAD,
        "if begin != position:",
        "if False:",
        "tests/serialization/test_payload.py::test_a_hostile_payload_is_malformed_and_says_where",
    ),
    Mutant(
        14,
        "dtype and shape are the manifest's",
        _PAYLOAD,
        "if (tensor.dtype, tensor.shape) != (dtype, tuple(shape)):",
        "if False:",
        "tests/serialization/test_payload.py::test_entries_other_than_the_expected_are_a_mismatch_by_name",
    ),
    Mutant(
        14,
        "an entry more is refused",
        _PAYLOAD,
        "if name not in expected:",
        "if False:",
        "tests/serialization/test_payload.py::test_entries_other_than_the_expected_are_a_mismatch_by_name",
    ),
    Mutant(
        14,
        "an entry spans what its shape takes",
        _PAYLOAD,
        "if offsets[1] - offsets[0] != size:",
        "if False:",
        "tests/serialization/test_payload.py::test_a_hostile_payload_is_malformed_and_says_where",
    ),
    Mutant(
        15,
        "deltas are finite",
        _ADMISSION,
        "        codec.check(spec, entries)\n",
        "        pass\n",
        "tests/outer_step/test_admission.py",
    ),
    Mutant(
        15,
        "a delta's norm is capped",
        _ADMISSION,
        "if config.max_delta_norm is not None and norm > config.max_delta_norm:",
        "if False:",
        "tests/outer_step/test_admission.py::test_norms_are_judged_by_the_runs_cap",
    ),
    Mutant(
        15,
        "the result is finite before it is uploaded",
        f"{LIBRARY}/algorithms/value_sweeps.py",
        '    if not value.is_finite():\n        raise NonFinite(f"{what}',
        '    if False:\n        raise NonFinite(f"{what}',
        "tests/outer_step/test_closing.py",
    ),
    Mutant(
        15,
        "the result is finite before it is uploaded, in C too",
        f"{LIBRARY}/adapters/native_sweeps.py",
        "                if bits & flag:",
        "                if False:",
        "tests/outer_step/test_closing.py",
    ),
    Mutant(
        17,
        "a message's bytes are capped before they are read",
        f"{LIBRARY}/serialization/documents.py",
        "    if len(data) > limit:\n",
        "    if False:\n",
        "tests/serialization/test_messages.py"
        "::test_a_frame_above_the_limit_is_refused_before_anything_is_parsed",
    ),
    Mutant(
        17,
        "an announced size above the schema's is refused unseen",
        _SEALING,
        "if message.payload.size > max_payload_bytes:",
        "if False:",
        _KINDS,
    ),
    Mutant(
        17,
        "a size other than announced is corrupt",
        f"{AGGREGATOR}/payloads.py",
        "        if blob.size != payload.size:\n"
        "            self._note_decided(signed.sha256)\n"
        '            return "corrupt", f"{blob.size} bytes in the bucket, {payload.size} announced"\n'
        "        if hashlib.sha256(blob.data).digest() != payload.sha256:\n",
        "        if hashlib.sha256(blob.data[: payload.size]).digest() != payload.sha256:\n",
        "tests/hostile/test_oversize.py::test_an_object_that_grows_after_its_envelope_is_corrupt",
    ),
    Mutant(
        18,
        "ids are of their alphabet",
        f"{LIBRARY}/serialization/names.py",
        "if not isinstance(value, str) or _ID.fullmatch(value) is None:",
        "if not isinstance(value, str):",
        "tests/serialization/test_names.py",
    ),
    Mutant(
        18,
        "no key leads out of a directory by a link",
        f"{LIBRARY}/stores/directory.py",
        "path = os.path.join(self._root, check_key(key))\n        if os.path.realpath(path) != path:",
        "path = os.path.join(self._root, check_key(key))\n        if False:",
        "tests/stores/test_directory.py::test_a_key_does_not_follow_a_link_out_of_the_directory",
    ),
    Mutant(
        20,
        "a stream's URL is shown without its password",
        f"{LIBRARY}/streams/urls.py",
        "password: str | None = field(repr=False)",
        "password: str | None",
        "tests/streams/test_opening.py",
    ),
    Mutant(
        20,
        "no statement or bound value shows in an error",
        f"{LIBRARY}/ledger/failures.py",
        "return lines[0] if lines else type(error).__name__",
        'return " ".join(lines) or type(error).__name__',
        "tests/ledger/test_engine.py",
    ),
    Mutant(
        22,
        "whatever cannot be read is counted",
        f"{AGGREGATOR}/intake.py",
        '        except MalformedMessage as error:\n            return Uncounted(entry.id, "malformed"',
        '        except ZeroDivisionError as error:\n            return Uncounted(entry.id, "malformed"',
        _KINDS,
    ),
    Mutant(
        22,
        "only the canonical form is read",
        f"{LIBRARY}/serialization/documents.py",
        "if document.to_bytes() != data:",
        "if False:",
        "tests/serialization/test_messages.py",
    ),
    Mutant(
        22,
        "an entry that kills its readers is skipped",
        f"{AGGREGATOR}/intake.py",
        "if self._caution.skips(entry):",
        "if False:",
        "tests/hostile/test_poison.py",
    ),
    Mutant(
        23,
        "envelopes are limited by learner",
        _SEALING,
        "self.posted.get(message.learner, 0) >= MAX_ENVELOPES_PER_VERSION or bytes_after > max_posted_bytes",
        "bytes_after > max_posted_bytes",
        _KINDS,
    ),
    Mutant(
        23,
        "bytes are limited by learner",
        _SEALING,
        "self.posted.get(message.learner, 0) >= MAX_ENVELOPES_PER_VERSION or bytes_after > max_posted_bytes",
        "self.posted.get(message.learner, 0) >= MAX_ENVELOPES_PER_VERSION",
        "tests/aggregator/test_recovery.py::test_a_learner_over_its_quota_of_bytes_is_counted",
    ),
)
