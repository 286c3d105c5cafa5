"""Mutants at the edges: what the bucket keeps, who may do what, what strangers and failing objects cost."""

from __future__ import annotations

from mutants.mutant import AGGREGATOR, LIBRARY, Mutant

_S3 = f"{LIBRARY}/stores/s3.py"
_GARBAGE = f"{AGGREGATOR}/garbage.py"
_FLOODS = "tests/hostile/test_floods.py"
_BUCKET = "tests/rights/test_bucket_rights.py"

MUTANTS = (
    Mutant(
        3,
        "an object in a bucket is written once",
        _S3,
        'put_object(**target, Body=body, Metadata=metadata, IfNoneMatch="*")',
        "put_object(**target, Body=body, Metadata=metadata)",
        "tests/stores/test_conformance.py",
    ),
    Mutant(
        3,
        "a file in a directory is written once",
        f"{LIBRARY}/stores/directory.py",
        "os.link(temporary, path)",
        "os.replace(temporary, path)",
        "tests/stores/test_conformance.py",
    ),
    Mutant(
        4,
        "garbage is only what an attested record of its round does not name",
        _GARBAGE,
        "            if not isinstance(found, Attested):\n                return None\n",
        "            if not isinstance(found, Attested):\n                return frozenset()\n",
        "tests/aggregator/test_garbage.py",
    ),
    Mutant(
        4,
        "what a record names goes only with a retention note",
        _GARBAGE,
        "return released is not None and released.covers(parsed.area, base)",
        "return released is None or released.covers(parsed.area, base)",
        "tests/aggregator/test_garbage.py",
    ),
    Mutant(
        9,
        "who is new does not make a quorum",
        f"{AGGREGATOR}/policy.py",
        "return {learner for learner in view.slots if not self._context.counts(learner, view.head)}",
        "return set()",
        "tests/aggregator/test_waiting.py"
        "::test_an_id_first_seen_at_a_version_does_not_make_its_quorum_and_is_merged_all_the_same",
    ),
    Mutant(
        9,
        "the registry's entries are its creator's",
        f"{LIBRARY}/serialization/registry.py",
        'verify(manifest.creator_key, "registry", signed.entry, signed.signature, who="the run\'s creator")',
        "pass",
        "tests/keys",
    ),
    Mutant(
        18,
        "no store takes a key that leads elsewhere",
        f"{LIBRARY}/stores/keys.py",
        "if len(key) > MAX_KEY_LENGTH or _KEY.fullmatch(key) is None:",
        "if len(key) > MAX_KEY_LENGTH:",
        "tests/stores/test_conformance.py::test_a_hostile_key_is_refused_by_every_verb",
    ),
    Mutant(
        19,
        "the parts of an upload that failed are aborted",
        _S3,
        "client.abort_multipart_upload(**target, UploadId=upload_id)",
        "pass",
        "tests/stores/test_s3.py::test_parts_of_an_upload_that_failed_are_aborted",
    ),
    Mutant(
        20,
        "a learner's password opens nothing else in Redis",
        "docker/rights/redis.acl",
        "user learner on #PASSWORD resetkeys resetchannels -@all +ping",
        "user learner on #PASSWORD resetkeys resetchannels +@all +ping",
        "tests/rights/test_redis_rights.py",
    ),
    Mutant(
        20,
        "a learner writes below its own prefix only",
        "docker/rights/learner.json",
        '"arn:aws:s3:::STORE/RUN/deltas/${aws:username}/*"',
        '"arn:aws:s3:::STORE/RUN/deltas/*"',
        _BUCKET,
    ),
    Mutant(
        20,
        "the auditor writes nothing",
        "docker/rights/auditor.json",
        '"Action": "s3:GetObject"',
        '"Action": ["s3:GetObject", "s3:PutObject"]',
        _BUCKET,
    ),
    Mutant(
        20,
        "what may not be listed reads as what is not there",
        f"{LIBRARY}/stores/heads.py",
        "except (ObjectMissing, NotReadable):",
        "except ObjectMissing:",
        "tests/rights/test_whole_round.py",
    ),
    Mutant(
        22,
        "an owner that lost its lease over an entry takes its note back",
        f"{AGGREGATOR}/caution.py",
        "survived = self._context.noted.get(self._fragment)",
        "survived = None",
        "tests/hostile/test_poison.py::test_an_owner_that_loses_its_lease_again_and_again_blames_no_entry",
    ),
    Mutant(
        22,
        "an outage is not the fault of the entry that is read",
        f"{AGGREGATOR}/caution.py",
        "self._services.store.head(manifest_key(self._context.run))",
        "pass",
        "tests/hostile/test_poison.py::test_restarts_while_the_store_is_away_are_held_against_no_entry",
    ),
    Mutant(
        23,
        "an object that fails alone is given up",
        f"{AGGREGATOR}/failing.py",
        "if self.note(name) < seconds:",
        "if self.note(name) < float('inf'):",
        "tests/aggregator/test_failing_store.py",
    ),
    Mutant(
        23,
        "one learner's failing objects hold up others once",
        f"{AGGREGATOR}/payloads.py",
        "seconds=0.0 if just_before else FAILING_OBJECT_SECONDS",
        "seconds=FAILING_OBJECT_SECONDS",
        f"{_FLOODS}"
        "::test_objects_of_one_learner_that_fail_one_after_the_other_hold_up_others_for_a_minute_in_all",
    ),
    Mutant(
        23,
        "a batch of strangers costs one request",
        f"{AGGREGATOR}/keyring.py",
        "return frozenset() if self._too_many_listed else frozenset(unknown - found)",
        "return frozenset()",
        _FLOODS,
    ),
)
