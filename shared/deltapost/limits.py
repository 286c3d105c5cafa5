"""Every cap, with its unit and its reason. A manifest may lower some of them for its run, never raise one."""

from __future__ import annotations

from typing import Final

#: Bytes of a contribution message: its base64 (1,868) fits S3's 2 KB of user metadata beside a name.
MAX_CONTRIBUTION_BYTES: Final = 1_400

#: Bytes of any other message on a stream; a round's announcement and a member's message stay far below.
MAX_MESSAGE_BYTES: Final = 16 * 1024

#: Bytes of record and attestation together that an announcement carries: some forty participants. A round
#: with more is announced by its record's hash alone, and read from the bucket.
MAX_PROOF_BYTES: Final = 12 * 1024

#: Bytes of such announcements that a learner holds of rounds it has not followed yet, over all fragments.
MAX_HELD_PROOF_BYTES: Final = 4 * 1024 * 1024

#: Bytes of a manifest, record or attestation: 10,000 participants of about 250 bytes, with room.
MAX_DOCUMENT_BYTES: Final = 8 * 1024 * 1024

#: Entries of one map or array in a document: the most there can be of parameters, learners or envelopes.
MAX_DOCUMENT_ENTRIES: Final = 131_072

#: Fields that any one map of a document has: only one map, which counts by learner, may have more.
MAX_DOCUMENT_FIELDS: Final = 64

#: Bytes of a document for each map in it: a parameter takes 26, an answer 80. A map takes 232 in memory.
MIN_BYTES_PER_MAP: Final = 16

#: Bytes of a payload's JSON header. 5,000 entries of about 150 bytes; 400,000 empty ones took 5 s of CPU.
MAX_HEADER_BYTES: Final = 1024 * 1024

#: Bytes of one payload, anchor or outer-state object: a fragment of 1.3e9 fp32 parameters.
MAX_PAYLOAD_BYTES: Final = 5 * 1024**3

#: Named parameters in a schema.
MAX_PARAMETERS: Final = 100_000

#: Characters of a parameter name.
MAX_NAME_LENGTH: Final = 512

#: Dimensions of a parameter; numpy stops at 64, nothing real passes 8.
MAX_DIMENSIONS: Final = 16

#: Elements of one tensor: byte offsets stay exact in every language's JSON numbers (2**53).
MAX_ELEMENTS: Final = 2**48

#: Fragments of a run; each is a stream, a chain of records and a lease.
MAX_FRAGMENTS: Final = 1_024

#: Versions from one checkpoint of a fragment to the next. A new owner closes up to so many rounds again, and
#: a learner that joins reads so many updates. At this many, a round's share of a checkpoint (12 bytes a
#: parameter / 256) is a tenth of the smallest update (F4, 0.53 bytes): more would save nothing.
MAX_CHECKPOINT_EVERY: Final = 256

#: Characters of a run or learner id: the pattern is `[a-z0-9-]{1,64}`.
MAX_ID_LENGTH: Final = 64

#: Entries of a run's registry of learner keys: the whole history of its learners; bounds what is read.
MAX_REGISTRY_ENTRIES: Final = 100_000

#: Seconds between two looks at a run's registry: how soon a key that was added, rotated or revoked counts.
REGISTRY_POLL_SECONDS: Final = 15.0

#: Metrics a contribution may carry, and characters of each name: they must fit MAX_CONTRIBUTION_BYTES.
MAX_METRICS: Final = 16
MAX_METRIC_NAME_LENGTH: Final = 24

#: Steps a contribution may claim (default of the manifest): a week of 0.1 s steps.
MAX_STEPS: Final = 10_000_000

#: Tokens per step a contribution may claim (default of the manifest).
MAX_TOKENS_PER_STEP: Final = 1_000_000_000

#: Seconds that a step may be claimed to take: a day. The mean of such claims sizes the grace window.
MAX_STEP_SECONDS: Final = 86_400.0

#: Seconds of the longest grace window, whatever the learners' claims lead to.
MAX_GRACE_SECONDS: Final = 3_600.0

#: Any counter in a message: squares of tokens stay below float64's range (2**53 squared is 8e31).
MAX_COUNTER: Final = 2**53

#: Seconds between two looks for a next record that no message spoke of: by the owner of an idle fragment, and
#: by a learner of a silent one. A fragment whose rounds come faster costs no such request.
PROBE_SECONDS: Final = 5.0

#: Seconds between the two definite 404s that make a payload `missing`.
MISSING_RECHECK_SECONDS: Final = 1.0

#: Seconds between two decisions on one `missing` or `corrupt` envelope, however often it is delivered:
#: doubled each time, up to the second.
REDECIDE_SECONDS: Final = 2.0
LONGEST_REDECIDE_SECONDS: Final = 60.0

#: Seconds one object may fail while others are served before it counts as `missing`.
FAILING_OBJECT_SECONDS: Final = 60.0

#: Seconds between two new names for one stream that is lost again and again: doubled, up to the second.
FIRST_RESET_PAUSE_SECONDS: Final = 1.0
LONGEST_RESET_PAUSE_SECONDS: Final = 60.0

#: Seconds a fragment's lease lasts; renewed at a third of it.
LEASE_SECONDS: Final = 15.0

#: Threads of an aggregator that serve fragments: each holds the inputs and results of one round at most.
WORKER_THREADS: Final = 4

#: Bytes of a round's mapped inputs and outputs that a close looks at at once: more makes it no faster.
WINDOW_BYTES: Final = 32 * 1024 * 1024

#: Bytes of an aggregator's spool that are kept for later rounds: new files cost as much as the arithmetic.
RECYCLED_BYTES: Final = 2 * 1024**3

#: Objects that an aggregator fetches and writes side by side.
TRANSFER_THREADS: Final = 8

#: Seconds a fragment may be in one step, or ready for it, and keep its lease: 5 GiB up and back at 20 MB/s.
MAX_TURN_SECONDS: Final = 600.0

#: Seconds a learner stays live after its last message; it sends `alive` at a third of it.
LEARNER_LEASE_SECONDS: Final = 30.0

#: Envelopes, and payload bytes in multiples of a dense fp32 fragment, that one learner may post per version.
MAX_ENVELOPES_PER_VERSION: Final = 64
MAX_DENSE_SIZES_PER_VERSION: Final = 8

#: Bytes of the envelopes that one record lists or merges: with what it adds to each, and the counts of who is
#: over quota, it stays below MAX_DOCUMENT_BYTES. Made-up learners could keep a round from closing otherwise.
#: The last third is for learners that have posted nothing yet.
MAX_LISTED_BYTES: Final = 6 * 1024 * 1024

#: Starts of an owner that may end in the reading of one entry before it is skipped: operators and kernels
#: kill processes too, but not five times at the same entry.
MAX_STARTS_AT_ENTRY: Final = 5

#: Entries kept in a run's members and commits streams. At MAX_PROOF_BYTES each, a run's announcements take
#: 50 MB of Redis; with four participants, 8 MB.
MAX_MEMBERS_ENTRIES: Final = 20_000
MAX_COMMITS_ENTRIES: Final = 4_096

#: Bytes of one part of a multipart upload: S3 allows 10,000 parts, R2 needs all but the last to be equal.
UPLOAD_PART_BYTES: Final = 64 * 1024 * 1024

#: Seconds without a new part after which an upload belongs to no running put: one part takes minutes.
ABANDONED_UPLOAD_SECONDS: Final = 86_400.0

#: Seconds between two passes of garbage collection: about three listings a pass, and one for each learner.
GARBAGE_SECONDS: Final = 600.0
