"""Each role may do to each object what its part needs, and nothing else: every area, verb by verb."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from typing import Any, get_args

import pytest
from botocore.exceptions import ClientError

from deltapost.serialization import names
from fixtures.rights import OTHER_RUN, RUN, Realm

pytestmark = pytest.mark.xdist_group("rights")

BUCKET = "deltapost"
SHA256 = secrets.token_bytes(32)

#: A key of each area; `deltas` and `learners` once as bob's and once as ada's.
KEYS: dict[str, str] = {
    "manifest": names.manifest_key(RUN),
    "aggregator": names.aggregator_object_key(RUN),
    "end": names.end_key(RUN),
    "genesis": names.genesis_key(RUN, 0, SHA256),
    "registry": f"{RUN}/registry/0000000001",
    "learners": names.learner_key(RUN, "bob"),
    "learners/ada": names.learner_key(RUN, "ada"),
    "deltas": names.delta_key(RUN, "bob", 0, 0, SHA256),
    "deltas/ada": names.delta_key(RUN, "ada", 0, 0, SHA256),
    "anchors": names.anchor_key(RUN, 0, 0, SHA256),
    "updates": names.update_key(RUN, 0, 0, SHA256),
    "outer": names.outer_key(RUN, 0, 0, SHA256),
    "records": names.record_key(RUN, 0, 1),
    "attestations": names.attestation_key(RUN, 0, 1),
    "retention": names.retention_key(RUN, 0, 1),
}
FOLLOWED = {
    "manifest", "aggregator", "end", "genesis", "registry", "anchors", "updates", "records", "attestations",
}  # fmt: skip
COMPUTED = {"anchors", "updates", "outer"}
DELTAS = {"deltas", "deltas/ada"}

#: Areas by user and verb: whatever is not named is refused.
MAY: dict[str, dict[str, set[str]]] = {
    "bob": {"read": FOLLOWED | {"learners", "deltas"}, "create": {"learners", "deltas"}},
    "ada": {
        "read": FOLLOWED | {"learners", "learners/ada", "deltas/ada"},
        "create": {"manifest", "genesis", "registry", "learners/ada", "deltas/ada"},
    },
    "eve": {},
    "aggregator": {
        "read": set(KEYS),
        "create": {"aggregator", "end", "records", "attestations", "retention"} | COMPUTED,
        "delete": COMPUTED | DELTAS,
    },
    "auditor": {"read": set(KEYS)},
}


def allowed(request: Callable[[], Any]) -> bool:
    """Whether the server did it, or would have: a 404 or 412 is no refusal of rights."""
    try:
        request()
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status not in (403, 404, 412):
            raise
        return bool(status != 403)
    return True


def test_every_kind_of_object_is_decided(realm: Realm) -> None:
    assert set(get_args(names.Area)) <= set(KEYS)


@pytest.mark.parametrize("user", sorted(MAY))
def test_a_role_reads_creates_and_deletes_what_is_its_part(realm: Realm, user: str) -> None:
    client = realm.client(user)
    found: dict[str, set[str]] = {"read": set(), "create": set(), "delete": set()}
    for area, key in KEYS.items():
        target = {"Bucket": BUCKET, "Key": f"runs/{key}"}
        if allowed(lambda target=target: client.put_object(**target, Body=b"x", IfNoneMatch="*")):
            found["create"].add(area)
        reads = [
            allowed(lambda target=target, verb=verb: verb(**target))
            for verb in (client.get_object, client.head_object)
        ]
        assert reads[0] == reads[1], area
        if reads[0]:
            found["read"].add(area)
        if allowed(lambda target=target: client.delete_object(**target)):
            found["delete"].add(area)
        batch = client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": target["Key"]}]})
        assert bool(batch.get("Errors")) == (area not in found["delete"]), area

    assert found == {verb: MAY[user].get(verb, set()) for verb in found}


@pytest.mark.parametrize("user", sorted(MAY))
def test_only_aggregators_and_auditors_list(realm: Realm, user: str) -> None:
    client = realm.client(user)
    lists = user in ("aggregator", "auditor")

    assert allowed(lambda: client.list_objects_v2(Bucket=BUCKET)) == lists
    assert allowed(lambda: client.list_objects(Bucket=BUCKET)) == lists
    assert (
        allowed(lambda: client.list_objects_v2(Bucket=BUCKET, Prefix=f"runs/{RUN}/deltas/{user}/")) == lists
    )
    assert allowed(lambda: client.head_bucket(Bucket=BUCKET)) == lists
    assert allowed(lambda: client.list_multipart_uploads(Bucket=BUCKET)) == (user == "aggregator")


@pytest.mark.parametrize("user", sorted(MAY))
def test_nobody_changes_the_bucket_or_what_others_may_do_in_it(realm: Realm, user: str) -> None:
    client = realm.client(user)
    own = {"Bucket": BUCKET, "Key": f"runs/{KEYS['deltas']}"}
    public = '{"Version": "2012-10-17", "Statement": []}'
    rules = {"Rules": [{"ID": "x", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 1}}]}
    requests: dict[str, Callable[[], Any]] = {
        "create a bucket": lambda: client.create_bucket(Bucket="another"),
        "delete the bucket": lambda: client.delete_bucket(Bucket=BUCKET),
        "read the policy": lambda: client.get_bucket_policy(Bucket=BUCKET),
        "write the policy": lambda: client.put_bucket_policy(Bucket=BUCKET, Policy=public),
        "delete the policy": lambda: client.delete_bucket_policy(Bucket=BUCKET),
        "write the bucket's ACL": lambda: client.put_bucket_acl(Bucket=BUCKET, ACL="public-read-write"),
        "write the life cycle": lambda: client.put_bucket_lifecycle_configuration(
            Bucket=BUCKET, LifecycleConfiguration=rules
        ),
        "delete the life cycle": lambda: client.delete_bucket_lifecycle(Bucket=BUCKET),
        "version the bucket": lambda: client.put_bucket_versioning(
            Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"}
        ),
        "open it to browsers": lambda: client.put_bucket_cors(
            Bucket=BUCKET,
            CORSConfiguration={"CORSRules": [{"AllowedMethods": ["GET"], "AllowedOrigins": ["*"]}]},
        ),
        "write an object's ACL": lambda: client.put_object_acl(**own, ACL="public-read"),
        "tag an object": lambda: client.put_object_tagging(**own, Tagging={"TagSet": []}),
        "list versions": lambda: client.list_object_versions(Bucket=BUCKET),
    }

    done = [what for what, request in requests.items() if allowed(request)]

    assert done == (
        ["list versions"] if user in ("aggregator", "auditor") and "list versions" in done else []
    )


def test_what_a_learner_sends_in_parts_is_its_own_too(realm: Realm) -> None:
    client = realm.client("bob")

    def whole(key: str, *, abort: bool) -> None:
        target = {"Bucket": BUCKET, "Key": f"runs/{key}"}
        upload = client.create_multipart_upload(**target)["UploadId"]
        part = client.upload_part(**target, UploadId=upload, PartNumber=1, Body=b"x")
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        if abort:
            client.abort_multipart_upload(**target, UploadId=upload)
        else:
            client.complete_multipart_upload(
                **target, UploadId=upload, MultipartUpload=parts, IfNoneMatch="*"
            )

    own = names.delta_key(RUN, "bob", 0, 0, secrets.token_bytes(32))
    assert allowed(lambda: whole(own, abort=False))
    assert allowed(lambda: whole(own + "0", abort=True))
    for key in (KEYS["deltas/ada"], KEYS["records"], KEYS["manifest"]):
        assert not allowed(lambda key=key: whole(key, abort=False))


def test_an_aggregator_aborts_the_parts_that_a_killed_learner_left(realm: Realm) -> None:
    target = {"Bucket": BUCKET, "Key": f"runs/{names.delta_key(RUN, 'bob', 0, 0, secrets.token_bytes(32))}"}
    upload = realm.client("bob").create_multipart_upload(**target)["UploadId"]
    client = realm.client("aggregator")

    assert upload in [each["UploadId"] for each in client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]]
    client.abort_multipart_upload(**target, UploadId=upload)

    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_nobody_gets_round_a_prefix_with_odd_keys_or_copies(realm: Realm) -> None:
    client = realm.client("bob")
    mine = f"runs/{RUN}/deltas/bob"
    odd = [
        f"{mine}-2/x", f"{mine}2/x", f"{mine}", f"runs/{RUN}/learners/bob/x", f"runs/{RUN}/learners/bob2",
        f"runs/{OTHER_RUN}/deltas/bob/x", f"{RUN}/deltas/bob/x", f"other/{RUN}/deltas/bob/x",
    ]  # fmt: skip
    for key in odd:
        assert not allowed(lambda key=key: client.put_object(Bucket=BUCKET, Key=key, Body=b"x")), key
    # SeaweedFS takes `//` for `/`, and compares policies without regard to case. No id of ours has a capital:
    # whatever it makes of these, it is bob's own.
    for key in (
        f"{mine}/../ada/x",
        f"{mine}/../../manifest",
        f"{mine}/%2e%2e/ada/x",
        f"runs//{RUN}/deltas/bob/x",
        f"runs/{RUN}/DELTAS/bob/x",
        f"runs/{RUN}/deltas/BOB/x",
        f"runs/{RUN}/learners/Bob",
    ):
        with contextlib.suppress(ClientError):
            client.put_object(Bucket=BUCKET, Key=key, Body=b"odd")
    auditor = realm.client("auditor")
    listed = [each["Key"] for each in auditor.list_objects_v2(Bucket=BUCKET, Prefix="runs/")["Contents"]]
    written = [key for key in listed if auditor.get_object(Bucket=BUCKET, Key=key)["Body"].read() == b"odd"]
    assert written
    assert {key.split("/")[3].lower() for key in written} == {"bob"}
    source = f"{BUCKET}/runs/{KEYS['outer']}"
    assert not allowed(lambda: client.copy_object(Bucket=BUCKET, Key=f"{mine}/copy", CopySource=source))


def test_an_overwrite_reaches_no_further_than_the_learners_own_objects(realm: Realm) -> None:
    """SeaweedFS has no policy for a missing `If-None-Match`: who speaks past our SDK may spoil its own."""
    client = realm.client("bob")
    own = {"Bucket": BUCKET, "Key": f"runs/{names.delta_key(RUN, 'bob', 0, 0, secrets.token_bytes(32))}"}
    client.put_object(**own, Body=b"first", IfNoneMatch="*")

    client.put_object(**own, Body=b"second")

    assert client.get_object(**own)["Body"].read() == b"second"
    for area, key in KEYS.items():
        if area not in MAY["bob"]["create"]:
            target = {"Bucket": BUCKET, "Key": f"runs/{key}"}
            assert not allowed(lambda target=target: client.put_object(**target, Body=b"x")), area


def test_strangers_and_the_unsigned_get_nothing(realm: Realm) -> None:
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    unsigned = boto3.session.Session().client(
        "s3",
        endpoint_url=realm.endpoint,
        region_name="us-east-1",
        config=Config(signature_version=UNSIGNED, s3={"addressing_style": "path"}),
    )
    target = {"Bucket": BUCKET, "Key": f"runs/{KEYS['manifest']}"}
    for request in (
        lambda: unsigned.get_object(**target),
        lambda: unsigned.put_object(**target, Body=b"x"),
        lambda: unsigned.list_objects_v2(Bucket=BUCKET),
        lambda: unsigned.delete_object(**target),
    ):
        assert not allowed(request)
