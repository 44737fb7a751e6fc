"""LoRA adapters that are loaded, replaced and loaded again while the server runs."""

from __future__ import annotations

from pathlib import Path

from tests.engines.adapters import LORA, RUNTIME, load, write
from tests.engines.models import prompt_tokens
from tests.engines.scenario import FULL, HOST, NEW, PROMPT, assert_nothing_leaks, disk, settle
from tests.engines.server import Answer, Server, kv_transfer


def ask(server: Server, name: str) -> Answer:
    """Ask with nothing in the device's own cache."""
    settle(server)
    server.post("/reset_prefix_cache")
    return server.complete(prompt_tokens(PROMPT), NEW, model=name)


def test_an_adapter_never_gets_the_kv_of_its_former_weights(tmp_path: Path) -> None:
    """Neither removed and loaded again, nor loaded again in place. Controls: before the change, and
    after a reset of the connector, its KV is found; the base model's is found throughout. The disk
    names blocks by an adapter's weights: it has them from the adapters of other names."""
    poet = write(tmp_path / "poet", 1)
    connector = kv_transfer(host_bytes=HOST, disk=disk(tmp_path / "disk"), load_when="always")
    with Server("llama", connector, args=LORA, env=RUNTIME) as server:
        for name, seed in (("first", 1), ("second", 2)):  # the same weights under other names
            load(server, name, write(tmp_path / name, seed))
        base, first, second = (ask(server, name) for name in ("model", "first", "second"))
        assert len({base.tokens, first.tokens, second.tokens}) == 3
        assert base.cached == second.cached == 0

        load(server, "poet", poet)
        for number, (new, old) in enumerate([(second, first), (first, second)]):
            for _ in range(2):
                assert ask(server, "poet") == Answer(old.tokens, FULL)
            write(tmp_path / "poet", 2 - number)
            if number:
                load(server, "poet", poet, load_inplace=True)
            else:
                server.post("/v1/unload_lora_adapter", {"lora_name": "poet"})
                load(server, "poet", poet)
            for _ in range(2):
                assert ask(server, "poet") == Answer(new.tokens, 0)
            assert ask(server, "model") == Answer(base.tokens, FULL)
            settle(server)
            server.post("/reset_prefix_cache?reset_external=true")
            assert ask(server, "model") == Answer(base.tokens, FULL)
        assert ask(server, "poet") == Answer(first.tokens, FULL)
        assert_nothing_leaks(server)
