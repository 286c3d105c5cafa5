"""Closes rounds from payload files with gradientmail 0.0.2, each checked and read as its `fetch` does."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from gradientmail.serialization import pack, unpack
from round_gradientmail import aggregator, contributions, state
from serving import GIVEN, serve

workers = ThreadPoolExecutor(GIVEN["threads"])


def written(contribution):
    """The path and the hash of a learner's payload."""
    data = pack(contribution.tensors)
    path = Path(GIVEN["directory"]) / f"gradientmail-{contribution.learner}"
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def verified(path, sha256):
    """The tensors of a payload."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{path} has other bytes than were written")
    return unpack(data)


files = [written(one) for one in contributions]
contributions = [replace(one, tensors={}) for one in contributions]


def close():
    payloads = workers.map(verified, *zip(*files, strict=True))
    given = [replace(one, tensors=tensors) for one, tensors in zip(contributions, payloads, strict=True)]
    return aggregator.close_round(state, given)


serve(close)
