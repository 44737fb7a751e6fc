"""Pages of HiCache's host pools as records that any engine reads, byte by byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.utils import get_hash_str

from kvconnect.cache.layout import SLOT_ALIGNMENT
from kvconnect.cache.record_format import page_names
from kvconnect.engines.sglang import shared_records, storage_backends
from kvconnect.errors import ConfigError, Incompatible
from kvconnect.offload.host_arena import HostArena
from kvconnect.protocol.identity import Identity
from kvconnect.settings import Settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import DiskSettings, MemorySettings
from kvconnect.tiers.backends.memory import MemoryStore
from tests.engines.models import model_dir
from tests.sglang.linker_bench import PAGE
from tests.sglang.storage_bench import RANKS, host_pool, serving

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def test_sglang_names_pages_as_we_do() -> None:
    tokens = list(range(7, 7 + 4 * 32 + 5))
    assert get_hash_str(tokens[: 4 * 32], None, 32) == [n.hex() for n in page_names(tokens, 32)]
    assert get_hash_str(tokens[: 4 * 32], None, 32) != [n.hex() for n in page_names(tokens, 16)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's files, and what SGLang reads of them."""
    shutil.copy(model_dir("llama") / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(bytes(9000))
    read = SimpleNamespace(to_json_string=(tmp_path / "config.json").read_text)
    known = SimpleNamespace(dtype=torch.float32, get_total_num_kv_heads=lambda: 4, hf_config=read)
    args = SimpleNamespace(from_server_args=lambda _: known)
    monkeypatch.setattr(shared_records, "ModelConfig", args)
    return tmp_path


def test_every_layout_and_rank_has_the_same_bytes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a record are head by head, token by token, K and then V."""
    for layout in LAYOUTS:
        pool = host_pool(monkeypatch, layout)
        _, nh = pool.layer_num, pool.head_num
        monkeypatch.setattr(
            shared_records.ModelConfig.from_server_args(None),
            "get_total_num_kv_heads",
            lambda n=nh: 2 * n,
        )
        monkeypatch.setattr(shared_records.ModelConfig.from_server_args(None), "dtype", pool.dtype)
        ranks = dataclasses.replace(RANKS, tp_rank=1, tp_size=2)
        with serving(str(model)):
            form, found, _ = shared_records.records_for_all({PoolName.KV: pool}, ranks)
        width = pool.head_dim * pool.dtype.itemsize
        assert (form.heads, form.tokens, form.row) == (2 * nh, PAGE, (width, width))
        assert [unit.number * form.unit for unit in found] == list(range(nh, 2 * nh, form.unit))
        page = pool.get_data_page(PAGE, flat=True)
        flat = bytes(page.view(torch.uint8).numpy())
        own = canonical(page, pool)
        for place, unit in enumerate(found):
            heads = own[:, place * form.unit : (place + 1) * form.unit]
            wanted = bytes(heads.contiguous().flatten().view(torch.uint8).numpy())
            read = b"".join(flat[at : at + length] for at, length in unit.runs)
            assert read == wanted, layout
        if layout != "layer_first":
            assert flat[: len(wanted)] != wanted, "control: a page as it lies is no record"


def canonical(page: torch.Tensor, pool: Any) -> torch.Tensor:
    """Return [layers, heads, tokens, K or V, values] of a flat page."""
    sizes = {"L": pool.layer_num, "N": PAGE, "H": pool.head_num}
    axes = shared_records._AXES[pool.layout]
    shaped = page.view(2, *(sizes[axis] for axis in axes), pool.head_dim)
    return shaped.permute(*(1 + axes.index(axis) for axis in "LHN"), 0, 4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"load_format": "dummy"}, "weights without files"),
        ({"load_format": "remote"}, "weights of other files or servers"),
        ({"quantization": "fp8"}, "quantized weights"),
        ({"speculative_algorithm": "NGRAM"}, "a draft model"),
        ({"enable_lora": True}, "adapters"),
    ],
)
def test_what_only_sglang_can_use(
    model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], why: str
) -> None:
    pools = {PoolName.KV: host_pool(monkeypatch)}
    with serving(str(model), **settings), pytest.raises(Incompatible, match=why):
        shared_records.records_for_all(pools, RANKS)
    with serving(str(model)), pytest.raises(Incompatible, match="several pools"):
        shared_records.records_for_all({**pools, PoolName.MAMBA: object()}, RANKS)
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_scaling": {"rope_type": "longrope"}}
    (model / "config.json").write_text(json.dumps(config | rope))
    with serving(str(model)), pytest.raises(Incompatible, match="LongRoPE"):
        shared_records.records_for_all(pools, RANKS)
    (model / "model.safetensors").unlink()
    with serving(str(model)), pytest.raises(Incompatible, match="no weight files"):
        shared_records.records_for_all(pools, RANKS)


def test_pages_that_peers_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of SGLang is one page there: it has no names for parts of it."""
    pools = {PoolName.KV: host_pool(monkeypatch)}
    monkeypatch.setattr(
        shared_records.ModelConfig.from_server_args(None), "dtype", pools[PoolName.KV].dtype
    )
    memory: Any = None
    monkeypatch.setattr(storage_backends.weights, "identity", Identity)
    with serving(str(model)):
        records = shared_records.records_for_all(pools, RANKS)
    for tokens in (0, PAGE):
        sharing = PeerSettings(ask=("10.0.0.1:1",), page_tokens=tokens)
        for form, found in ((records, records.units), (None, None)):
            shared = storage_backends._shared_blocks(sharing, {}, form, memory, pools)
            ((page,),) = shared.layouts
            assert page == found if found is not None else len(page) == 1
    sharing = PeerSettings(ask=("10.0.0.1:1",), page_tokens=PAGE // 2)
    with pytest.raises(ConfigError, match=f"page_tokens={PAGE // 2} .*use the page size, {PAGE}"):
        storage_backends._shared_blocks(sharing, {}, records, memory, pools)


def test_a_page_on_disk_lies_as_in_its_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So other layouts do not find it; a record on a server is the same for all."""
    names: dict[str, list[bytes]] = {"disk": [], "memory": []}

    def make(kind: str, settings: Any, fingerprint: bytes) -> MemoryStore:
        names[kind].append(fingerprint)
        return MemoryStore(1 << 20)

    monkeypatch.setattr(
        storage_backends,
        "make_disk",
        lambda settings, owner, fields, name: make("disk", settings, name),
    )
    monkeypatch.setattr(
        storage_backends, "make_remote", lambda settings, name, keys: make("memory", settings, name)
    )
    disk = DiskSettings(path="/nowhere", capacity=1 << 30)
    settings = Settings(disk=disk, remote=MemorySettings(capacity=1 << 20))
    for layout in (*LAYOUTS, LAYOUTS[0]):
        pool = host_pool(monkeypatch, layout)
        monkeypatch.setattr(
            shared_records.ModelConfig.from_server_args(None),
            "get_total_num_kv_heads",
            lambda n=pool.head_num: n,
        )
        monkeypatch.setattr(shared_records.ModelConfig.from_server_args(None), "dtype", pool.dtype)
        with serving(str(model)):
            found = shared_records.records_for_all({PoolName.KV: pool}, RANKS)
            memory, pools = HostArena(1, SLOT_ALIGNMENT, "off"), {PoolName.KV: pool}
            storage_backends.make_stores(settings, RANKS, found, memory, pools)
    assert len(set(names["memory"])) == 1
    assert len(set(names["disk"])) == len(LAYOUTS) and names["disk"][0] == names["disk"][-1]


def test_another_model_has_another_format(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = {PoolName.KV: host_pool(monkeypatch)}
    known = shared_records.ModelConfig.from_server_args(None)
    pool = pools[PoolName.KV]
    monkeypatch.setattr(known, "get_total_num_kv_heads", lambda: pool.head_num)
    monkeypatch.setattr(known, "dtype", pool.dtype)

    def form(**settings: Any) -> bytes:
        with serving(str(model), **settings):
            return shared_records.records_for_all(pools, RANKS).form.fingerprint

    first = form()
    assert form() == first
    assert form(json_model_override_args='{"rope_theta": 1}') != first
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    second = form()
    assert second != first
    (model / "model.safetensors").write_bytes(bytes(9001))
    assert form() not in (first, second)
    monkeypatch.setattr(known, "dtype", torch.float64)
    with pytest.raises(Incompatible, match=r"computed as torch\.float64"):
        form()
