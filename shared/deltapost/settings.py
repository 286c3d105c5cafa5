"""Settings: one class per service, read from environment, file and flags; explicit arguments win.

`DELTAPOST_CONFIG` may name a TOML file; the environment (`DELTAPOST_…`) overrides it. Addresses that may
carry a password are SecretStr: they never show in repr, logs or error messages.
"""

from __future__ import annotations

import os
import socket
import tomllib
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from deltapost.errors import ConfigurationError

S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base of every service's settings. Build with `read`, which turns mistakes into ConfigurationError."""

    model_config = SettingsConfigDict(
        env_prefix="DELTAPOST_", frozen=True, extra="ignore", allow_inf_nan=False
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  pydantic-settings passes it
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources = [init_settings, env_settings]
        file = os.environ.get("DELTAPOST_CONFIG")
        if file:
            if not os.path.isfile(file):
                raise ConfigurationError(f"DELTAPOST_CONFIG names {file!r}, which is not a file")
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=file))
        return tuple(sources)

    @classmethod
    def read(cls: type[S], **explicit: Any) -> S:
        """The settings from `explicit` (None: not given), environment and file. Names what is wrong."""
        try:
            return cls(**{name: value for name, value in explicit.items() if value is not None})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigurationError(
                f"the file {os.environ.get('DELTAPOST_CONFIG')!r} cannot be read as TOML: {error}"
            ) from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = str(first["loc"][0]) if first["loc"] else "settings"
            raise ConfigurationError(
                f"setting {field!r}: {first['msg']}",
                hint=f"set DELTAPOST_{field.upper()}, or {field} in the file DELTAPOST_CONFIG names",
            ) from None


def listen(host: str, port: int, *, setting: str) -> socket.socket:
    """A listening TCP socket. Raises ConfigurationError, naming the setting of its port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", hint=f"set {setting} to a free port"
        ) from None


def reveal(secret: SecretStr) -> str:
    """The address behind a SecretStr, for the one call that opens it."""
    return secret.get_secret_value()
