"""HTTPS: certificates that can't be used are told at the start, good ones are read again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from infra.http_protocol import HttpBounds
from infra.http_server import bind, http_server
from infra.tls import Tls
from schemas.errors import ConfigError

AUTHORITY = trustme.CA()


class Files:
    """A certificate and its key in files."""

    def __init__(self, folder: Path, name: str = "a") -> None:
        self.cert, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        self.renew()

    def renew(self) -> None:
        issued = AUTHORITY.issue_cert("localhost")
        self.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(self.key))

    @property
    def der(self) -> bytes:
        first = self.cert.read_text().partition("-----END CERTIFICATE-----")
        return ssl.PEM_cert_to_DER_cert(first[0] + first[1] + "\n")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def refusal(cert: Path, key: Path | None) -> tuple[str, str | None]:
    with pytest.raises(ConfigError) as raised:
        Tls(cert, key)
    return raised.value.message, raised.value.param


def test_what_is_no_certificate_and_key_is_told(files: Files, tmp_path: Path) -> None:
    """Missing, unreadable, no PEM, another's key, an encrypted one: which file and what is wrong
    with it."""
    other, none = Files(tmp_path, "b"), tmp_path / "none"
    assert refusal(none, None) == (
        f"can't read {none}: No such file or directory", "bridge.tls_cert"
    )  # fmt: skip
    assert refusal(files.cert, none)[1] == "bridge.tls_key"
    assert "Is a directory" in refusal(tmp_path, files.key)[0]
    assert "has no certificate in PEM form" in refusal(files.key, files.key)[0]
    assert "has no private key in PEM form" in refusal(files.cert, None)[0]
    message, param = refusal(files.cert, other.key)
    assert message == f"the key in {other.key} is not that of the certificate in {files.cert}"
    assert param == "bridge.tls_key"
    other.key.write_text("-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n")
    assert "no certificate chain and key" in refusal(files.cert, other.key)[0]


def test_an_encrypted_key_is_refused_without_asking(files: Files) -> None:
    """Nobody sits there who could type the password."""
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(files.key.read_bytes(), None)
    locked = pem.BestAvailableEncryption(b"secret")
    form = pem.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(pem.Encoding.PEM, form, locked))
    assert "is encrypted" in refusal(files.cert, files.key)[0]


def test_both_may_stand_in_one_file(files: Files) -> None:
    """The key behind the chain."""
    files.cert.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    assert Tls(files.cert).context.minimum_version is ssl.TLSVersion.TLSv1_2


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def serving(tls: Tls, handshake_s: float = 60.0) -> AsyncIterator[int]:
    bound = bind("127.0.0.1", 0, key="port")
    bounds = HttpBounds(head_s=handshake_s)
    async with http_server(hello, bound, bounds=bounds, tls=tls.context):
        yield bound.getsockname()[1]


async def ask(port: int) -> tuple[bytes, bytes]:
    """The certificate that was shown, and the answer."""
    trusted = ssl.create_default_context()
    AUTHORITY.configure_trust(trusted)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusted, server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = await reader.read()
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
    return shown, answer


async def test_a_renewed_certificate_is_shown_and_a_bad_one_is_not_taken(files: Files) -> None:
    """While the server runs: halfway through a renewal the old pair stays whole."""
    tls = Tls(files.cert, files.key)
    async with serving(tls) as port:
        first = files.der
        shown, answer = await ask(port)
        assert shown == first
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"https" in answer
        old_key = files.key.read_bytes()
        files.renew()
        new_key = files.key.read_bytes()
        files.key.write_bytes(old_key)
        with pytest.raises(ConfigError):
            tls.reload()
        assert (await ask(port))[0] == first
        files.key.write_bytes(new_key)
        tls.reload()
        assert (await ask(port))[0] == files.der != first


async def test_who_does_not_shake_hands_is_closed(files: Files) -> None:
    """Silence, or another protocol; the next client is served."""
    async with serving(Tls(files.cert, files.key), handshake_s=1.0) as port:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(data)
                peer.settimeout(60)
                await asyncio.to_thread(read_to_the_end, peer)
    async with serving(Tls(files.cert, files.key)) as port:
        with socket.create_connection(("127.0.0.1", port)):
            assert b"200" in (await ask(port))[1]


def read_to_the_end(peer: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        while peer.recv(4096):
            pass
