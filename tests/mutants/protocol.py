"""Mutants of the commit protocol: rows 1 to 11 and 19 of the promise table."""

from __future__ import annotations

from mutants.mutant import AGGREGATOR, LIBRARY, SIMULATOR, Mutant

_INDEX = f"{LIBRARY}/ledger/rounds.py"
_LEASES = f"{LIBRARY}/ledger/leases.py"
_SEALING = f"{LIBRARY}/algorithms/sealing.py"
_WORKER = f"{AGGREGATOR}/worker.py"
_CLOSER = f"{AGGREGATOR}/closer.py"
_ATTESTING = f"{AGGREGATOR}/attesting.py"
_INTAKE = f"{AGGREGATOR}/intake.py"
_COURIER = f"{LIBRARY}/learner/courier.py"
_FOLLOWING = f"{LIBRARY}/learner/following.py"
_ANCHORS = f"{LIBRARY}/learner/anchors.py"

MUTANTS = (
    Mutant(
        1,
        "a repeated envelope is recognised",
        _SEALING,
        "if earlier is not None and (fixed or not redecide or earlier not in REDECIDED):",
        "if earlier is not None and earlier not in REDECIDED and not fixed:",
        SIMULATOR,
    ),
    Mutant(
        1,
        "an accepted contribution takes the slot",
        _SEALING,
        "taken = self.slots.get(message.learner)",
        "taken = None",
        "tests/aggregator/test_envelope_kinds.py::test_of_two_contradicting_contributions_the_first_wins",
    ),
    Mutant(
        1,
        "verdicts that no record carries are dropped at a rewind",
        _INDEX,
        "        if rewound:\n            drop_unanswered(session, lease)\n",
        "",
        "tests/ledger/test_fences.py::test_a_record_of_another_seal_rewinds_what_no_record_answered",
    ),
    Mutant(
        1,
        "the stream is read again after a rewind",
        _INDEX,
        'moved["position"] = START',
        'moved["waiting_reason"] = None',
        "tests/ledger/test_fences.py::test_a_record_of_another_seal_rewinds_what_no_record_answered",
    ),
    Mutant(
        1,
        "answers are written from the record",
        _INDEX,
        "        answer(session, ledger, record)\n",
        "",
        SIMULATOR,
    ),
    Mutant(
        1,
        "a missing payload is looked for again",
        _SEALING,
        "if earlier is not None and (fixed or not redecide or earlier not in REDECIDED):",
        "if earlier is not None:",
        "tests/aggregator/test_envelope_kinds.py"
        "::test_a_missing_payload_that_comes_later_is_accepted_at_re_delivery_in_the_same_round",
    ),
    Mutant(
        1,
        "ahead only after a definite 404",
        _INTAKE,
        "if self._record_exists(view.head + 1):",
        "if False:",
        "tests/aggregator/test_recovery.py"
        "::test_whoever_is_ahead_of_an_owner_whose_ledger_was_restored_is_ahead_of_nobody",
    ),
    Mutant(
        2,
        "a pending seal is closed as it is",
        _WORKER,
        "            return self._commit(lease, standing, sealed, Stages())\n",
        "            sealed = None\n",
        "tests/aggregator/test_kill_points.py",
    ),
    Mutant(
        2,
        "participants are in the order of learner ids",
        _SEALING,
        "key=lambda claim: claim.learner,",
        "key=lambda claim: claim.envelope,",
        SIMULATOR,
    ),
    Mutant(
        3,
        "after its PUT the record is read back",
        _CLOSER,
        "found = self.read_record(before)\n        if found is None:",
        "found = closed.record\n        if found is None:",
        "tests/aggregator/test_racing_records.py",
    ),
    Mutant(
        3,
        "a round is indexed at its base only",
        _INDEX,
        "if head != record.base:",
        "if False:",
        "tests/ledger/test_fences.py::test_a_round_is_indexed_once_and_only_by_its_owner",
    ),
    Mutant(
        3,
        "an owner looks for the record of head + 1",
        _WORKER,
        '            if self._adopt(lease, standing):\n                return "adopted"\n',
        "",
        SIMULATOR,
    ),
    Mutant(
        3,
        "an idle owner looks again",
        _WORKER,
        " or self._services.monotonic() >= self._probe_at",
        "",
        "tests/aggregator/test_recovery.py"
        "::test_an_owner_with_nothing_to_do_finds_the_record_that_a_paused_one_writes_late",
    ),
    Mutant(
        4,
        "the lease's token is compared",
        _LEASES,
        "        FragmentRow.lease_token == lease.token,\n    )\n    if at is not None:",
        "    )\n    if at is not None:",
        "tests/ledger/test_fences.py::test_a_transaction_without_the_token_changes_nothing",
    ),
    Mutant(
        4,
        "the position is compared",
        _LEASES,
        "            FragmentRow.position == at.position,\n",
        "",
        "tests/ledger/test_fences.py::test_a_transaction_that_started_from_elsewhere_changes_nothing",
    ),
    Mutant(
        5,
        "objects are uploaded before the record",
        _CLOSER,
        "[partial(put_verified, store, key, data) for key, data in closed.objects]",
        "[partial(len, data) for _, data in closed.objects]",
        SIMULATOR,
    ),
    Mutant(
        5,
        "objects are read back",
        f"{AGGREGATOR}/objects.py",
        "if info.size != len(data) or not found.same():",
        "if False:",
        "tests/aggregator/test_failing_store.py::test_no_record_names_an_object_that_does_not_read_back",
    ),
    Mutant(
        6,
        "a commit that was not announced is announced at the start",
        _WORKER,
        "            self._found_nothing()\n        self._announcer.announce(lease, standing)\n",
        "            self._found_nothing()\n",
        "tests/aggregator/test_announcing.py",
    ),
    Mutant(
        6,
        "announcements that Redis forgot are made again",
        f"{AGGREGATOR}/announcer.py",
        "if forgotten and standing.head > 0:",
        "if False:",
        "tests/aggregator/test_forgotten_announcements.py",
    ),
    Mutant(
        6,
        "learners look for the next record themselves",
        _COURIER,
        "            fragments |= silent\n",
        "",
        "tests/learner/test_faults.py"
        "::test_a_commit_whose_announcement_was_lost_is_found_by_a_learner_that_waits_for_nothing",
    ),
    Mutant(
        6,
        "the journal posts again until a record answers",
        _COURIER,
        "            if now < timer.at and not self._new_epoch(entry, epochs):\n                continue\n",
        "            continue\n",
        SIMULATOR,
    ),
    Mutant(
        7,
        "a record has to continue the head",
        _INDEX,
        "if record.previous != head_sha256:",
        "if False:",
        "tests/ledger/test_fences.py"
        "::test_a_record_that_does_not_continue_the_head_is_no_history_of_this_ledger",
    ),
    Mutant(
        7,
        "the attestation signs this record",
        f"{LIBRARY}/serialization/records.py",
        "if self.record != record_sha256:",
        "if False:",
        "tests/serialization/test_records.py",
    ),
    Mutant(
        7,
        "a record of unknown origin is vouched for before it is attested",
        _ATTESTING,
        'if origin in ("sealed", "unknown"):',
        "if False:",
        "tests/aggregator/test_recovery.py"
        "::test_a_record_that_a_stranger_put_into_the_bucket_is_never_attested",
    ),
    Mutant(
        7,
        "whoever adopts a record attests it",
        _CLOSER,
        "attestation = self._attester.attest(before, record, observations, origin)",
        "attestation = Attestation.make(record.sha256, observations, self._services.key)",
        SIMULATOR,
    ),
    Mutant(
        8,
        "learners refuse a record that does not follow the one seen",
        f"{LIBRARY}/learner/chain.py",
        "if record.previous != previous:",
        "if False:",
        "tests/learner/test_history.py"
        "::test_a_record_that_does_not_follow_the_one_seen_stops_the_learner_although_it_is_attested",
    ),
    Mutant(
        8,
        "learners refuse a bucket that went back",
        _FOLLOWING,
        "            self._check_seen(fragment, seen, seen_record)\n",
        "            pass\n",
        "tests/learner/test_history.py",
    ),
    Mutant(
        8,
        "learners follow attested records only",
        _FOLLOWING,
        "attestation.verify(record.sha256, self.aggregator_key)",
        "pass",
        "tests/learner/test_history.py::test_a_learner_follows_no_record_that_another_key_attests",
    ),
    Mutant(
        9,
        "an envelope's signature is verified",
        _INTAKE,
        "            if refused is not None:\n                return Uncounted(entry.id, refused.reason",
        "            if False:\n                return Uncounted(entry.id, refused.reason",
        SIMULATOR,
    ),
    Mutant(
        9,
        "a learner id belongs to the first key",
        f"{LIBRARY}/learner/claiming.py",
        '        raise SignatureRefused(\n            f"learner id',
        '        return None\n        raise SignatureRefused(\n            f"learner id',
        "tests/learner/test_refusals.py::test_a_learner_id_belongs_to_the_key_that_came_first",
    ),
    Mutant(
        10,
        "an envelope counts in its own run and fragment only",
        _INTAKE,
        "if (message.run, message.fragment) != (self._context.run, self._fragment):",
        "if False:",
        SIMULATOR,
    ),
    Mutant(
        10,
        "an old base is late or stale",
        _SEALING,
        "if message.version < self.head:",
        "if False:",
        SIMULATOR,
    ),
    Mutant(
        11,
        "leases are measured by the database's clock",
        _LEASES,
        "    with ledger.write() as session:\n        now = ledger.now(session)\n        free = [",
        "    with ledger.write() as session:\n"
        "        from datetime import UTC, datetime\n\n"
        "        now = datetime.now(UTC)\n        free = [",
        "tests/ledger/test_fences.py::test_a_lease_that_ran_out_or_was_given_back_is_free",
    ),
    Mutant(
        11,
        "no time passes for leases while the members stream is away",
        f"{AGGREGATOR}/members.py",
        "self._read_at = None  # what passes until the next success counts against nobody",
        "pass",
        "tests/aggregator/test_waiting.py::test_while_the_members_stream_is_away_nobody_s_lease_runs_out",
    ),
    Mutant(
        19,
        "a payload's hash is compared at intake",
        f"{AGGREGATOR}/transfers.py",
        "incoming.digest.digest() == ref.sha256",
        "incoming.digest.digest() != b''",
        "tests/aggregator/test_envelope_kinds.py",
    ),
    Mutant(
        19,
        "an object's hash is compared when a round is computed",
        f"{AGGREGATOR}/transfers.py",
        "incoming.digest.digest() == ref.sha256",
        "incoming.digest.digest() != b''",
        "tests/aggregator/test_generations.py::test_a_payload_with_other_bytes_after_the_seal_is_corrupt",
    ),
    Mutant(
        19,
        "a directory's object appears whole",
        f"{LIBRARY}/stores/directory.py",
        'temporary = os.path.join(self._temporary, f"{os.getpid()}-{secrets.token_hex(8)}")',
        "temporary = path",
        "tests/stores/test_directory.py",
    ),
)
