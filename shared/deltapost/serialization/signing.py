"""Ed25519 keys: whoever holds the key file is the learner or the aggregator; nobody else can sign as it.

Every signature covers a domain and the exact bytes, so that one made for one purpose never verifies for
another (RFC 8032; deterministic, so equal messages have equal bytes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from deltapost.errors import ConfigurationError, SignatureRefused

Domain = Literal["message", "attestation", "registry", "retention", "end"]
_PREFIX: Final = b"deltapost/1/"


class SigningKey:
    """An Ed25519 private key. Its repr shows the public half only."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.public: bytes = self._private.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()})"

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(os.urandom(32))

    @classmethod
    def load(cls, path: str | Path) -> SigningKey:
        """Reads the 64 hexadecimal digits that `save` wrote. Raises ConfigurationError naming the file."""
        try:
            text = Path(path).read_text(encoding="ascii").strip()
            seed = bytes.fromhex(text)
            if len(seed) != 32:
                raise ValueError
        except OSError as error:
            raise ConfigurationError(
                f"signing key file {str(path)!r} cannot be read: {error.strerror}",
                hint="make one with: deltapost keys generate FILE",
            ) from None
        except ValueError:
            raise ConfigurationError(
                f"signing key file {str(path)!r} does not hold 64 hexadecimal digits",
                hint="make one with: deltapost keys generate FILE",
            ) from None
        return cls(seed)

    def save(self, path: str | Path) -> None:
        """Writes a new file with mode 0600; an existing one is left alone (FileExistsError)."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._seed.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load_or_create(cls, path: str | Path) -> SigningKey:
        """The key in `path`; a new one is made there when there is no such file."""
        if not Path(path).exists():
            try:
                cls.generate().save(path)
            except FileExistsError:  # another process was faster: its key counts
                pass
            except OSError as error:
                raise ConfigurationError(
                    f"signing key file {str(path)!r} cannot be created: {error.strerror}"
                ) from None
        return cls.load(path)

    def sign(self, domain: Domain, data: bytes) -> bytes:
        """64 bytes over the domain and `data`."""
        return self._private.sign(_PREFIX + domain.encode() + b"\0" + data)


def verify(public_key: bytes, domain: Domain, data: bytes, signature: bytes, *, who: str) -> None:
    """Raises SignatureRefused, naming `who` should have signed, unless the signature verifies."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature, _PREFIX + domain.encode() + b"\0" + data)
    except (InvalidSignature, ValueError):
        raise SignatureRefused(
            f"the signature is not {who}'s (public key {public_key.hex()[:16]}…)"
        ) from None
