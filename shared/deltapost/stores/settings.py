"""S3's settings, from arguments, then from `DELTAPOST_S3_…` variables; secrets never show."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field, FilePath, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from deltapost.errors import ConfigurationError
from deltapost.limits import MAX_DOCUMENT_BYTES, UPLOAD_PART_BYTES

_MIB: Final = 1024 * 1024


class StoreSettings(BaseSettings):
    """How to reach an S3 store. A field `endpoint` is the variable `DELTAPOST_S3_ENDPOINT`; arguments win.

    What is left out is boto3's: credentials and region come from the AWS variables, files and roles.
    """

    model_config = SettingsConfigDict(
        env_prefix="DELTAPOST_S3_",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    endpoint: str | None = Field(
        None, description="URL of an S3-compatible server; unset: AWS", pattern="^https?://"
    )
    region: str | None = Field(None, description="region that requests are signed for")
    access_key_id: SecretStr | None = Field(None, description="credentials; unset: boto3's usual places")
    secret_access_key: SecretStr | None = Field(None, description="goes with access_key_id")
    session_token: SecretStr | None = Field(None, description="of temporary credentials")
    ca_bundle: FilePath | None = Field(
        None, description="PEM file of the CA that signed the server's certificate"
    )
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="bucket in the path or in the host name; auto: in the path where an endpoint is given",
    )
    checksums: Literal["when_supported", "when_required"] = Field(
        "when_supported", description="when_required: for servers that do not know S3's newer checksums"
    )
    part_bytes: int = Field(
        UPLOAD_PART_BYTES,
        # A record must be one PUT: where several multipart uploads race, some servers let more than one win.
        ge=MAX_DOCUMENT_BYTES,
        le=5 * 1024 * _MIB,
        description="above this size an upload has parts",
    )
    connect_seconds: float = Field(5.0, gt=0, description="time-out of a connection")
    read_seconds: float = Field(60.0, gt=0, description="time-out between two pieces of a reply")
    attempts: int = Field(4, ge=1, le=20, description="how often a request is tried in all")
    connections: int = Field(32, ge=1, le=1024, description="size of the connection pool")


def read_settings(**options: object) -> StoreSettings:
    """The settings, `options` first. Raises ConfigurationError, which names fields and never shows values."""
    try:
        settings = StoreSettings(**options)  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigurationError(f"S3 settings cannot be used: {problems}") from None
    if (settings.access_key_id is None) != (settings.secret_access_key is None):
        raise ConfigurationError(
            "S3 settings have one of access_key_id and secret_access_key, and not the other"
        )
    return settings
