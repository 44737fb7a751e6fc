"""Identities of media: a client's are its own tenant's, however it writes them."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import msgspec
import pytest

from kvconnect.errors import Refused
from kvconnect.router.api_keys import ApiKey
from kvconnect.router.http.tenants import Tenants
from kvconnect.router.requests import media
from kvconnect.router.requests.body import read_body
from kvconnect.router.requests.json_parts import MOST_PARTS
from kvconnect.router.requests.media import with_own_media

IMAGE = {"type": "image_url", "image_url": None, "uuid": "cat"}
KEYS = (ApiKey("sk-0123456789abcdef"), ApiKey("sk-4a7f0c2be19d4e5f"))


def own(raw: bytes, tenant: str = "T") -> Any:
    return json.loads(msgspec.json.encode(with_own_media(read_body(raw), tenant)))


def test_each_identity_has_the_tenants_prefix() -> None:
    parts = [{"type": "text", "text": 'a "uuid": "x" in words'}, IMAGE, {**IMAGE, "uuid": None}]
    sent = {"messages": [{"role": "user", "content": parts}], "tools": [{"uuid": "kept"}]}
    found = own(json.dumps(sent).encode())
    text, image, none = found["messages"][0]["content"]
    assert (text, image["uuid"], none["uuid"]) == (parts[0], "T.cat", None)
    assert image == {**IMAGE, "uuid": "T.cat"} and found["tools"] == sent["tools"]


@pytest.mark.parametrize("name", ["content_hash", "content\\u005Fhash", "c\\u006fntent_hash"])
def test_hashes_of_contents_are_left_out(name: str) -> None:
    image = b'{"image_url":{"url":"u","%b":"sha256:00"},"n":1e400}' % name.encode()
    body = with_own_media(
        read_body(b'{"messages":[{"content":[%b]}],"image_data":%b}' % (image, image)), "T"
    )
    kept = b'{"image_url":{"url":"u"},"n":1e400}'
    assert msgspec.json.encode(body) == b'{"messages":[{"content":[%b]}],"image_data":%b}' % (
        kept,
        kept,
    )


@pytest.mark.parametrize("name", ["\\u0075uid", "uu\\u0069d", "\\u0075\\u0075\\u0069\\u0064"])
def test_an_escape_hides_no_identity(name: str) -> None:
    raw = b'{"messages":[{"content":[{"%b":"cat"}]}]}' % name.encode()
    assert own(raw)["messages"][0]["content"] == [{"uuid": "T.cat"}]


@pytest.mark.parametrize("value", [b"7", b"true", b'["cat"]', b'{"a":"cat"}', b'"\\u0063at"'])
def test_an_identity_of_another_type_is_the_tenants_too(value: bytes) -> None:
    (part,) = own(b'{"input":[{"uuid":%b}]}' % value)["input"]
    assert part["uuid"].startswith("T.") and isinstance(part["uuid"], str)


def test_two_tenants_have_different_entries_and_one_always_the_same() -> None:
    raw = json.dumps({"messages": [{"content": [IMAGE]}]}).encode()
    tenants = Tenants(KEYS, isolate=True)
    a, b = (tenants.find(key.key, "") for key in KEYS)
    assert a and b
    assert own(raw, a.id) == own(raw, a.id) != own(raw, b.id)


def test_numbers_and_other_fields_keep_their_bytes() -> None:
    raw = b'{"messages":[{"a":1e400,"b":12345678901234567890123,"uuid":"cat"}],"seed":1.0}'
    body = with_own_media(read_body(raw), "T")
    assert msgspec.json.encode(body) == raw.replace(b'"cat"', b'"T.cat"')


def test_a_field_with_too_many_parts_is_refused_before_it_is_decoded() -> None:
    many = b"[]," * MOST_PARTS
    with pytest.raises(Refused, match="too many parts"):
        own(b'{"messages":[%b{"uuid":"cat"}]}' % many)
    long = b'"' + b"[{," * MOST_PARTS + b'"'
    assert own(b'{"messages":[%b,{"uuid":"cat"}]}' % long)["messages"][1] == {"uuid": "T.cat"}


def peak_of(pattern: re.Pattern[bytes], raw: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most memory that a body takes while its identities are found."""
    monkeypatch.setattr(media, "_STRING", pattern)
    body = read_body(raw)
    tracemalloc.start()
    with_own_media(body, "T")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("text", [b"A" * 1_000_000, b"\\n" * 500_000])
def test_a_long_text_beside_an_identity_takes_little_memory(
    text: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b'{"messages":[{"uuid":"cat"},"%b"]}' % text
    assert peak_of(media._STRING, raw, monkeypatch) < 3 * len(raw)
    going_back = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)  # the control
    assert peak_of(going_back, raw, monkeypatch) > 30 * len(raw)


@pytest.mark.parametrize(("before", "after"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_an_identity_that_is_nested_deep_is_refused(before: bytes, after: bytes) -> None:
    part = b'{"uuid":"cat"}'
    levels = media._DEEPEST - 1  # the part is one, too
    kept = own(b'{"messages":%b%b%b}' % (before * levels, part, after * levels))
    assert '"uuid": "T.cat"' in json.dumps(kept)
    levels += 1
    with pytest.raises(Refused, match="below 16 lists and objects"):
        own(b'{"messages":%b%b%b}' % (before * levels, part, after * levels))
    deep = b'{"messages":%b"cat"%b}' % (before * levels, after * levels)
    assert own(deep) == json.loads(deep)  # without an identity


def test_vllm_keeps_the_images_of_tenants_apart() -> None:
    """With vLLM's own code: an identity alone decides which entry of its caches an image has."""
    inputs = pytest.importorskip("vllm.multimodal.processing.inputs")
    parse = pytest.importorskip("vllm.multimodal.parse")
    numpy, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")

    def entry(identity: str, shade: int) -> str:
        picture = image.fromarray(numpy.full((32, 32, 3), shade, numpy.uint8))
        made = inputs.ProcessorInputs(
            prompt=[1],
            mm_data_items=parse.MultiModalDataParser().parse_mm_data({"image": [picture]}),
            mm_uuid_items={"image": [identity]},
            hf_processor_mm_kwargs={},
        )
        (found,) = made.get_mm_hashes(model_id="m", hash_algorithm="blake3")["image"]
        return str(found)

    def sent(tenant: str) -> str:
        (part,) = own(json.dumps({"messages": [IMAGE]}).encode(), tenant)["messages"]
        return str(part["uuid"])

    assert entry(sent("a"), 7) == entry(sent("a"), 200) != entry(sent("b"), 7)
    # Control: without the router's prefix, another tenant's image is taken for this one.
    assert entry("cat", 7) == entry("cat", 200)
