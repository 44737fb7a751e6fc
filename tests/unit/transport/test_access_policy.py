"""Who may connect where, without a key, with one, and with TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kvconnect.errors import ConfigError
from kvconnect.transport import Security
from kvconnect.transport.access_policy import AccessPolicy
from tests.links import make_certificates

KEYED = Security(key=b"k")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_proof(host: str) -> None:
    guard = AccessPolicy(Security())
    assert guard.admits(host)
    guard.check_listen(host)


@pytest.mark.parametrize("host", ["10.1.2.3", "8.8.8.8", "fe80::1", "::ffff:10.1.2.3"])
def test_other_addresses_need_a_key_or_a_listed_network(host: str) -> None:
    assert not AccessPolicy(Security()).admits(host)
    assert not AccessPolicy(Security(allowed=("10.1.3.0/24", "fd00::/8"))).admits(host)
    assert AccessPolicy(KEYED).admits(host)
    assert AccessPolicy(Security(allowed=("0.0.0.0/0", "::/0"))).admits(host)


@pytest.mark.parametrize(
    "host",
    [
        *("worker-3", "", "10.1.2", "10.1.2.3:80", "localhost"),
        *("::1%\0", "::1%é", "::1%lo", "fe80::1%eth0", "FD00::1", "0::1", "::1 "),
    ],
)
def test_only_addresses_are_talked_to(host: str) -> None:
    assert not AccessPolicy(KEYED).admits(host)
    with pytest.raises(ConfigError, match=r"listen=.*use an IP address"):
        AccessPolicy(KEYED).check_listen(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_a_wildcard_is_refused_even_with_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match=r"listen=.*that peers reach"):
        AccessPolicy(KEYED).check_listen(host)


def test_listening_beyond_loopback_without_proof_names_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"listen='10\.1\.2\.3'.*key_file"):
        AccessPolicy(Security()).check_listen("10.1.2.3")
    AccessPolicy(KEYED).check_listen("10.1.2.3")
    AccessPolicy(Security(allowed=("10.0.0.0/8",))).check_listen("10.1.2.3")


def test_a_wrong_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peers='10\.1\.2\.3/8'.*has host bits set"):
        AccessPolicy(Security(allowed=("10.1.2.3/8",)))


def test_both_tls_sides_demand_a_certificate(tmp_path: Path) -> None:
    guard = AccessPolicy(make_certificates(tmp_path))
    for context in (guard.tls(server=True), guard.tls(server=False)):
        assert context is not None
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert guard.admits("10.1.2.3")


@pytest.mark.parametrize("missing", ["tls_cert", "tls_key", "tls_ca"])
def test_tls_needs_all_three_files(tmp_path: Path, missing: str) -> None:
    files = vars(make_certificates(tmp_path)) | {missing: ""}
    with pytest.raises(ConfigError, match="tls_dir"):
        AccessPolicy(Security(**files))


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ours, theirs = make_certificates(tmp_path / "a"), make_certificates(tmp_path / "b")
    mixed = Security(tls_cert=ours.tls_cert, tls_key=theirs.tls_key, tls_ca=ours.tls_ca)
    with pytest.raises(ConfigError, match="PEM files that match"):
        AccessPolicy(mixed)


def test_a_key_does_not_show_in_a_repr() -> None:
    assert "secret" not in repr(Security(key=b"secret"))
