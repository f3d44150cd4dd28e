"""API keys: from the environment or the system's keyring, and never anywhere else.

They are removed from the environment when they are read, so that no child process inherits them, and from every text
that could reach a log.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from hashlib import sha256
from urllib.parse import quote

from tailguard.errors import ConfigError

HIDDEN = "***"
SHORTEST = 4
"""Shorter secrets are not replaced in texts: they would stand in many words."""


@dataclass(frozen=True)
class Credentials:
    """The keys of one account. Its text shows nothing of them."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    password: str = field(default="", repr=False)
    """What some exchanges want besides."""

    @property
    def fingerprint(self) -> str:
        """Tells accounts apart and reveals nothing: the begin of a hash of the key, which is not the secret."""
        return sha256(b"tailguard account\n" + self.key.encode()).hexdigest()[:12]

    def hide(self, text: str) -> str:
        """The text without keys, without signatures, and without the queries of addresses."""
        for secret in (self.key, self.secret, self.password):
            if len(secret) >= SHORTEST:
                for form in (secret, quote(secret, safe=""), repr(secret)[1:-1]):
                    text = text.replace(form, HIDDEN)
        text = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", text)
        return re.sub(r"(signature=)[^&\s'\"]+", rf"\1{HIDDEN}", text)


class HidingFilter(logging.Filter):
    """Hides keys in the records of a logger."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__()
        self.credentials = credentials

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.credentials.hide(record.getMessage()), ()
        if record.exc_info:
            # A traceback shows messages that nobody has looked through.
            record.exc_info, record.exc_text = None, None
        return True


def variables(exchange: str) -> tuple[str, str, str]:
    """Names of the environment's variables for an exchange: key, secret and password."""
    stem = f"TAILGUARD_{exchange.upper()}"
    return f"{stem}_KEY", f"{stem}_SECRET", f"{stem}_PASSWORD"


def read_credentials(exchange: str, environment: MutableMapping[str, str] | None = None) -> Credentials:
    """The keys for an exchange, from the environment or else from the keyring."""
    place = os.environ if environment is None else environment
    names = variables(exchange)
    key, secret, password = (place.pop(name, "").strip() for name in names)
    if bool(key) != bool(secret):
        missing = names[1] if key else names[0]
        raise ConfigError(f"{missing} is not set, and {names[0] if key else names[1]} is; set both")
    if not key:
        key, secret, password = _from_keyring(exchange)
    if not key or not secret:
        raise ConfigError(
            f"no API keys for {exchange}: set {names[0]} and {names[1]} in the environment, or store them in the "
            f"keyring: keyring set tailguard:{exchange} key, and the same with secret"
        )
    return Credentials(key, secret, password)


def _from_keyring(exchange: str) -> tuple[str, str, str]:
    """Key, secret and password from the system's keyring; empty where there is none."""
    try:
        import keyring
        import keyring.errors
    except ImportError:
        return "", "", ""
    try:
        key, secret, password = (
            keyring.get_password(f"tailguard:{exchange}", name) or "" for name in ("key", "secret", "password")
        )
    except keyring.errors.KeyringError as error:
        raise ConfigError(
            f"the keyring cannot be read: {type(error).__name__}. Unlock it, or use the environment"
        ) from None
    return key, secret, password
