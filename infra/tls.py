"""TLS for the HTTP side: a certificate that is checked before the first client comes, and can be
read again while clients are there."""

from __future__ import annotations

import ssl
from pathlib import Path

from schemas.errors import ConfigError

_CERT, _KEY = "bridge.tls_cert", "bridge.tls_key"


class Tls:
    """A server's certificate chain and key, PEM files.

    Args:
        key: None: it stands in ``cert``, behind the chain.

    Raises:
        ConfigError: a file is missing, can't be read or is no PEM; the key is encrypted, or is
            that of another certificate. ``param`` is the setting's key.
    """

    def __init__(self, cert: Path, key: Path | None = None) -> None:
        self._cert = cert
        self._key = key or cert
        self._key_setting = _KEY if key else _CERT
        self.context = self._load()
        self.context.set_alpn_protocols(["http/1.1"])

    def reload(self) -> None:
        """Read the files again: connections from now on get what is in them.

        Raises:
            ConfigError: as at the start; then all stays as it is.
        """
        self._load()  # a pair that does not fit must not get halfway into the one in use
        self.context.load_cert_chain(self._cert, self._key)

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _check_pem(self._cert, "CERTIFICATE", _CERT)
        _check_pem(self._key, "PRIVATE KEY", self._key_setting)
        try:
            context.load_cert_chain(self._cert, self._key, password=self._no_password)
        except ssl.SSLError as error:
            raise self._explained(error) from error
        return context

    def _no_password(self) -> str:
        raise ConfigError(
            f"the key in {self._key} is encrypted; give one that is not", param=self._key_setting
        )

    def _explained(self, error: ssl.SSLError) -> ConfigError:
        if error.reason == "KEY_VALUES_MISMATCH":
            return ConfigError(
                f"the key in {self._key} is not that of the certificate in {self._cert}",
                param=self._key_setting,
            )
        return ConfigError(
            f"{self._cert} and {self._key} are no certificate chain and key: {error.reason}",
            param=_CERT,
        )


def _check_pem(file: Path, word: str, setting: str) -> None:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}", param=setting) from error
    if f"{word}-----".encode() not in text:
        raise ConfigError(f"{file} has no {word.lower()} in PEM form", param=setting)
