"""Commands of SGLang in the documentation: its parsers take them, and ours the settings in them."""

from __future__ import annotations

import argparse
import json
import re

import pytest
from sglang.srt.environ import envs
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang_router.launch_router import parse_router_args
from sglang_router.router_args import RouterArgs

from kvconnect.engines.sglang.linker import KVConnectLinker
from kvconnect.engines.sglang.settings_flags import storage_settings
from kvconnect.engines.sglang.storage import KVConnectStorage
from kvconnect.settings import find_settings
from tests.documents import PAGES, ROOT, Command, commands, commands_of

HERE = [command for command in commands() if command.words[:2] == ("python", "-m")
        and command.words[2].startswith("sglang")]  # fmt: skip


def check(command: Command) -> None:
    """Raise if SGLang, or KVConnect in it, would refuse the command."""
    module, *flags = command.words[2:]
    if module == "sglang_router.launch_router":
        parse_router_args(flags)
        return
    assert module == "sglang.launch_server"
    load_plugins()  # as the launcher does before it parses
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(flags)
    if linker := arguments.unified_cache_external_linker_config:  # parsed already
        assert linker["linker"] == KVConnectLinker.__name__
        assert linker["linker_module_path"] == KVConnectLinker.__module__
        find_settings(linker["linker_extra_config"], {})
    if text := arguments.hicache_storage_backend_extra_config:
        storage = json.loads(text)
        assert storage["class_name"] == KVConnectStorage.__name__
        assert storage["module_path"] == KVConnectStorage.__module__
        find_settings(storage_settings(storage), {})


@pytest.mark.parametrize("command", HERE, ids=lambda command: f"{command.place} {command.line}")
def test_sglang_takes_its_flags(command: Command) -> None:
    check(command)


def test_there_are_commands() -> None:
    modules = [command.words[2] for command in HERE]
    assert modules.count("sglang.launch_server") > 8
    assert "sglang_router.launch_router" in modules


def test_flags_and_variables_in_the_text_exist() -> None:
    pages = [page.read_text() for page in PAGES if "sglang" in page.name]
    pages.append((ROOT / "docs/migration.md").read_text().partition("## SGLang")[2])
    text = "\n".join(pages)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    theirs = {word.replace("--router-", "--") for word in parser._option_string_actions}
    theirs |= set(parser._option_string_actions)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", text))
    assert len(flags) > 20
    assert flags - theirs - {"--help"} == set()
    variables = set(re.findall(r"\bSGLANG_[A-Z_]+[A-Z]\b", text))
    assert len(variables) > 2
    assert [name for name in variables if not hasattr(envs, name)] == []


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model-path M --disaggregation-transfer-backend kvconect",
        "python -m sglang.launch_server --model-pth M",
        "python -m sglang_router.launch_router --pd-disagregation",
        """python -m sglang.launch_server --model-path M --unified-cache-external-linker-config '{
          "linker": "KVConnectLinker", "linker_module_path": "kvconnect.engines.sglang.linker",
          "linker_extra_config": {"host_byte": 1}}'""",
    ],
)
def test_a_wrong_command_is_refused(text: str) -> None:
    with pytest.raises((SystemExit, ValueError)):
        check(next(commands_of(text, "")))
