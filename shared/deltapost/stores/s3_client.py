"""One boto3 client, and so one connection pool, per process and settings, however many stores use it."""

from __future__ import annotations

import functools
import os
from typing import Any

from deltapost.errors import ConfigurationError, MissingExtra
from deltapost.stores.settings import StoreSettings

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError
except ImportError:
    raise MissingExtra("s3", needed_for="an s3:// store") from None


def s3_client(settings: StoreSettings) -> Any:
    """This process's client, which is safe to use from several threads. Raises ConfigurationError."""
    return _connect(os.getpid(), settings)


# By process: a connection pool that a fork carried over would mix two processes' replies.
@functools.lru_cache(maxsize=32)
def _connect(process: int, settings: StoreSettings) -> Any:  # noqa: ARG001
    secrets = {
        "aws_access_key_id": settings.access_key_id,
        "aws_secret_access_key": settings.secret_access_key,
        "aws_session_token": settings.session_token,
    }
    config = Config(
        retries={"mode": "standard", "total_max_attempts": settings.attempts},
        connect_timeout=settings.connect_seconds,
        read_timeout=settings.read_seconds,
        max_pool_connections=settings.connections,
        tcp_keepalive=True,
        s3={"addressing_style": settings.addressing_style},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
    )
    try:
        # A session of its own: boto3's default one must not be used from several threads at once.
        session = boto3.session.Session(
            region_name=settings.region,
            **{name: secret.get_secret_value() for name, secret in secrets.items() if secret is not None},
        )
        return session.client(
            "s3",
            endpoint_url=settings.endpoint,
            config=config,
            verify=str(settings.ca_bundle) if settings.ca_bundle else None,
        )
    except (ValueError, BotoCoreError) as error:
        raise ConfigurationError(
            f"the S3 client cannot be set up: {type(error).__name__}: {error}"
        ) from error
