"""Keys, tokens and certificates that change while a router runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

import pytest

from kvconnect import changed_files
from kvconnect.router import credentials
from kvconnect.router.credentials import WatchedFiles, read_api_keys, take_certificate
from kvconnect.router.options import AdminAccess, Listening
from tests.fakes.engine import (
    ADMIN_TOKEN,
    ASK,
    Admin,
    Bench,
    FakeEngine,
    bench,
    decodes,
    on_loop,
    prefills,
    until,
)
from tests.links import make_certificates
from tests.servers import free_port

OLD, NEW = "sk-old-0123456789abcdef", "sk-new-0123456789abcdef"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "EVERY_S", 0.02)
    monkeypatch.setattr(changed_files, "LOOK_S", 0.0)


def _old_key(folder: Path) -> tuple[Path, Listening]:
    """Return a file with the former key, and a router's settings as read from it."""
    file = folder / "keys"
    file.write_text(OLD)
    return file, Listening(api_keys=read_api_keys(str(file)), api_key_file=str(file))


async def serves(router: Bench, key: str) -> bool:
    status = (await router.post(ASK, headers={"Authorization": f"Bearer {key}"})).status
    assert status in (200, 401)
    return status == 200


@on_loop
async def test_clients_keys_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, at = _old_key(tmp_path)
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], listening=at) as router:
        assert await serves(router, OLD) and not await serves(router, NEW)
        file.write_text(f"{OLD}\n{NEW}")
        await until(lambda: serves(router, NEW))
        assert await serves(router, OLD)
        # Control: a file without a valid key changes nothing.
        file.write_text("short")
        await until(lambda: "use a key of 16 characters" in caplog.text)
        assert await serves(router, OLD) and await serves(router, NEW)
        file.unlink()
        await until(lambda: "No such file" in caplog.text)
        file.write_text(NEW)
        await until(lambda: _refuses(router, OLD))
        assert await serves(router, NEW)


@on_loop
async def test_keys_that_changed_before_the_router_watched_them_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, at = _old_key(tmp_path)
    file.write_text(NEW)
    async with bench([FakeEngine(prefills)], [FakeEngine(decodes)], listening=at) as router:
        await until(lambda: serves(router, NEW))
        assert not await serves(router, OLD)
    # Control: nothing changed while it was watched.
    assert "was read again" not in caplog.text


async def _refuses(router: Bench, key: str) -> bool:
    return not await serves(router, key)


@on_loop
async def test_the_admin_token_is_read_again(tmp_path: Path) -> None:
    file, port = tmp_path / "token", free_port()
    file.write_text(ADMIN_TOKEN)
    access = AdminAccess(port=port, token=ADMIN_TOKEN, token_file=str(file))
    p, d = FakeEngine(prefills), FakeEngine(decodes)
    async with bench([p], [d], admin=access) as router:
        admin = Admin(router, port)
        assert (await admin.ask("GET"))[0] == 200
        file.write_text("another-0123456789")

        async def refused() -> bool:
            return (await admin.ask("GET"))[0] == 401

        await until(refused)
        admin.token = "another-0123456789"
        assert (await admin.ask("GET"))[0] == 200


@on_loop
async def test_new_connections_get_the_new_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (
        make_certificates(tmp_path / name, alternative="IP:127.0.0.1") for name in ("a", "b")
    )
    chain, key = tmp_path / "chain", tmp_path / "key"

    def put(made: Any) -> None:
        chain.write_text(Path(made.tls_cert).read_text())
        key.write_text(Path(made.tls_key).read_text())

    put(first)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain, key)
    files = WatchedFiles(
        (str(chain), str(key)), lambda: take_certificate(context, str(chain), str(key))
    )
    following = asyncio.create_task(credentials.follow([files]))
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)

    async def trusted(made: Any) -> bool:
        client = ssl.create_default_context(cafile=made.tls_ca)
        port = server.sockets[0].getsockname()[1]
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True

    assert await trusted(first) and not await trusted(second)
    put(second)
    await until(lambda: trusted(second))
    assert not await trusted(first)
    # Control: a certificate whose key is still the former one, or none, changes nothing.
    for file, text in ((chain, Path(first.tls_cert).read_text()), (key, "none")):
        caplog.clear()
        file.write_text(text)
        await until(lambda: "stays in use" in caplog.text)
        assert await trusted(second) and not await trusted(first)
    put(first)
    await until(lambda: trusted(first))
    assert not following.done()
    following.cancel()
    server.close()
