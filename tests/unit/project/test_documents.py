"""The documentation: every command and setting in it is one that works, and the site builds.

Commands of vLLM are given to its parser in ``tests/engines/test_operator.py``, where ``curl`` and
``kvconnect top`` are run, too; SGLang's in ``tests/sglang/test_documents.py``.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kvconnect import cli, errors
from kvconnect.errors import ConfigError
from kvconnect.observability.metrics.catalog import CATALOG, SGLANG, VLLM, families
from kvconnect.router.flag_sources import add_elsewhere
from kvconnect.router.flags import add_flags, options_of
from kvconnect.settings import Settings, check_settings, find_settings
from kvconnect.settings.sharing import PeerSettings
from kvconnect.settings.stores import DiskSettings, MooncakeSettings, ObjectSettings, ValkeySettings
from kvconnect.tiers.backends.base import BlockOutcome
from kvconnect.types import FailureCause
from scripts import headlines, reference, site_pages
from scripts.gpu.command import parse
from tests.documents import PAGES, ROOT, SHELL, Command, blocks, blocks_of, commands, commands_of

COMMANDS = commands()
REMOTE = (ValkeySettings, ObjectSettings, MooncakeSettings)

# Commands ---------------------------------------------------------------------------------------


def check_kvconnect(command: Command) -> None:
    words = [word.strip("[]") for word in command.words[1:]]
    # FILTERS are flags of a table, dots what was there before.
    arguments = cli.make_parser().parse_args([w for w in words if w not in ("FILTERS", "...")])
    if arguments.command == "router" and "..." not in words and not arguments.config:
        options_of(arguments)


def check_vllm(command: Command) -> None:
    for word in command.words:
        if word.startswith("{"):
            check_transfer_config(json.loads(word))


def check_transfer_config(config: Mapping[str, Any]) -> None:
    if config["kv_connector"] == "KVConnect":
        find_settings(config.get("kv_connector_extra_config", {}), {})


def check_pip(command: Command) -> None:
    assert command.words[1] in ("install", "download")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in command.words[2:]:
        if word in ("--no-deps", "--dest=build"):
            continue
        here = word == "." or word.startswith(".[")  # the checkout
        wanted = Requirement(word.replace(".", "kvconnect", 1) if here else word)
        if wanted.name == "kvconnect":
            assert wanted.extras <= set(extras)


def check_make(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in command.words[1:] if "=" not in word]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target
    for word in command.words[1:]:
        name, is_set, _ = word.partition("=")
        assert not is_set or f"$({name})" in makefile


def check_python(command: Command) -> None:
    assert command.words[1] == "-m"
    module = command.words[2]
    if not module.startswith("sglang"):
        assert importlib.util.find_spec(module), module


def check_mooncake(command: Command) -> None:
    program = Path(sys.executable).with_name(command.words[0])
    if not program.exists():
        pytest.skip(f"no {command.words[0]}")
    done = subprocess.run([program, "--helpfull"], capture_output=True, text=True, timeout=60)
    flags = [word.lstrip("-").partition("=")[0] for word in command.words if word[0] == "-"]
    assert flags
    assert [flag for flag in flags if f"-{flag} " not in done.stdout + done.stderr] == []


def check_grep(command: Command) -> None:
    pattern = command.words[-1]
    exposed = [family.exposed for prefix in (VLLM, SGLANG) for family in families(prefix)]
    assert any(re.search(pattern, name) for name in exposed)


def run_it(command: Command, folder: Path) -> None:
    subprocess.run(command.words, cwd=folder, check=True, capture_output=True, timeout=60)


def check_cluster(command: Command) -> None:
    """Needs a daemon or a cluster: the words are known, and what it reads is there."""
    program, verb = command.words[:2]
    assert verb in CLUSTER[program]
    for word in command.words[2:]:
        assert not word.startswith("deploy/") or (ROOT / word).exists(), word


def check_folder(command: Command) -> None:
    assert (ROOT / command.words[1]).is_dir()


def check_gpu_run(command: Command) -> None:
    parse(list(command.words[1:]))


def check_wheel_tests(command: Command) -> None:
    """It takes a place and a wheel for it; what it does then takes minutes and another system."""
    _, place, wheel = command.words
    assert wheel == {"arm": "dist/*aarch64.whl", "python3.14": "dist/*x86_64.whl"}[place]
    for wrong in (["elsewhere", __file__], []):
        ran = subprocess.run([ROOT / command.words[0], *wrong], capture_output=True, text=True)
        assert ran.returncode and "usage: scripts/wheel_tests arm|python3.14" in ran.stderr


def check_example(command: Command) -> None:
    """Run by ``tests/engines/test_pasted.py`` and ``tests/sglang/test_pasted.py``."""
    assert os.access(ROOT / command.words[0], os.X_OK)


def check_program(command: Command) -> None:
    """Text tools: that their block is right shell is tested apart."""
    assert shutil.which(command.words[0])


def check_elsewhere(command: Command) -> None:
    """Run by ``tests/engines/test_operator.py``."""
    assert any("://" in word for word in command.words)


CLUSTER = {
    "docker": ("build", "compose"),
    "kubectl": ("apply", "create", "label"),
    "kustomize": ("edit",),
}
CHECKS: dict[str, Callable[..., None]] = {
    "kvconnect": check_kvconnect,
    "vllm": check_vllm,
    "pip": check_pip,
    "make": check_make,
    "python": check_python,
    "mooncake_master": check_mooncake,
    "mooncake_client": check_mooncake,
    "grep": check_grep,
    "openssl": run_it,
    "chmod": run_it,
    "cd": check_folder,
    "docker": check_cluster,
    "kubectl": check_cluster,
    "kustomize": check_cluster,
    "scripts/gpu_run": check_gpu_run,
    "scripts/wheel_tests": check_wheel_tests,
    "printf": check_program,
    "sed": check_program,
    "diff": check_program,
    "curl": check_elsewhere,
    **{f"examples/{path.name}": check_example for path in (ROOT / "examples").glob("*.sh")},
}
"""First word of a command -> what checks it."""


def check(command: Command, folder: Path) -> None:
    """Raise if the command would not work."""
    if "KVCONNECT_CONFIG" in command.variables:
        find_settings({}, command.variables)
    if command.words:
        named = CHECKS[command.words[0]]
        needs_folder = "folder" in inspect.signature(named).parameters
        named(*((command, folder) if needs_folder else (command,)))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.place} {command.line}")
def test_a_command_works(command: Command, tmp_path: Path) -> None:
    (tmp_path / "kvconnect.key").touch()
    check(command, tmp_path)


def test_blocks_are_right_shell() -> None:
    texts = [block.text for block in blocks() if block.language in SHELL]
    subprocess.run(["bash", "-n"], input="\n".join(texts), text=True, check=True, timeout=60)
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["bash", "-n"], input="{ a", text=True, check=True, capture_output=True)


def test_other_blocks_are_what_they_say(tmp_path: Path) -> None:
    names = {row.name for row in CATALOG}
    checked = {"json": 0, "promql": 0, "python": 0, "text": 0, "yaml": 0}
    for block in blocks():
        if block.language in SHELL:
            continue
        checked[block.language] += 1  # a language that nobody checks is an error
        if block.language == "json":
            check_settings(json.loads(block.text))
        elif block.language == "yaml":
            path = tmp_path / "router.yaml"
            path.write_text(block.text)
            arguments = cli.make_parser().parse_args(["router", "--config", str(path)])
            assert add_elsewhere(arguments, {}, add_flags)
            options_of(arguments)
        elif block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "promql":
            for name in re.findall(r"kvconnect_(\w+)", block.text):
                plain = re.sub(r"_(total|bucket|sum|count)$", "", name)
                assert {plain, name} & names, f"{block.place}: {name}"
    assert all(checked.values()), checked


@pytest.mark.parametrize(
    "text",
    [
        "kvconnect top --onse a:1",
        "kvconnect router --prefil http://a:1",
        "kvconnect router --prefill ftp://a --decode http://b:1",
        "kvconnect cache stats DIR [--modell NAME]",
        """vllm serve M --kv-transfer-config '{"kv_connector": "KVConnect",
          "kv_connector_extra_config": {"host_byte": 1}}'""",
        """vllm serve M --kv-transfer-config '{"kv_connector": "KVConnect",
          "kv_connector_extra_config": {"disk": {"path": "/x", "capacty": 1}}}'""",
        "vllm serve M --kv-transfer-config '{'",
        "pip install kvconnect[vlm]",
        "pip install .[vlm]",
        "make tset",
        "python -m benchmarks.no_such",
        "mooncake_master -rpc_adress 10.1.2.3",
        "curl -s 127.0.0.1 | grep -E kvconnect_hits_total",
        "openssl rnad -hex 32",
        "export KVCONNECT_CONFIG='{\"listn\": 1}'",
        "rm -rf /",
        "cd no-such-folder",
        "docker biuld .",
        "docker build -f deploy/no-such-file .",
    ],
)
def test_a_wrong_command_is_found(text: str, tmp_path: Path) -> None:
    block = next(blocks_of(f"Text.\n\n```sh\n{text}\n```\n", "page.md"))
    with pytest.raises((Exception, SystemExit, pytest.skip.Exception)) as found:
        for command in commands_of(block.text, block.place):
            check(command, tmp_path)
    assert not isinstance(found.value, pytest.skip.Exception) or "mooncake" in text


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "A=1 x 'two\nlines' # don't\n{ y \\\n  -z > out; } | grep a\nexport B='b c'\n"
    read = [(found.words, found.variables) for found in commands_of(text, "")]
    assert read == [
        (("x", "two\nlines"), {"A": "1"}),
        (("y", "-z"), {}),
        (("grep", "a"), {}),
        ((), {"B": "b c"}),
    ]
    with pytest.raises(ValueError, match="without an end"):
        list(commands_of("x 'y", ""))


# Pages that are made or held to the code --------------------------------------------------------


def test_generated_tables_are_those_of_the_code() -> None:
    used = set()
    for page in reference.pages():
        text = page.read_text()
        assert reference.filled(text) == text, f"{page.name}: run python -m scripts.reference"
        used |= set(re.findall(r"<!-- generated: ([\w-]+) -->", text))
    assert used == set(reference.TABLES)
    assert "\nold\n" not in reference.filled("<!-- generated: sizing -->\nold\n<!-- end -->")


def test_the_plot_shows_the_committed_results() -> None:
    drawn = headlines.PLOT.read_text(encoding="utf-8")
    assert drawn == headlines.plot(), "run python -m scripts.reference"
    assert len(headlines.HEADLINES) <= 10
    row = headlines.HEADLINES[0]._replace(limit=0.5, higher=False)
    assert headlines.meets(row, 0.504)  # as it is shown
    assert not headlines.meets(row, 0.506)
    assert headlines.meets(row._replace(higher=True), 0.506)
    assert not headlines.meets(row._replace(higher=True), 0.494)


def test_the_site_is_made_with_the_tool_that_tests_have() -> None:
    (tool,) = re.findall(r"^SITE := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert f'"{tool}"' in (ROOT / "pyproject.toml").read_text()


# Paths and layout -------------------------------------------------------------------------------

_PATH = re.compile(r"`([\w.-]+(?:/[\w.-]*)+)`|\]\(([\w.-]+(?:/[\w.-]+)*)(?:#[\w-]+)?\)")


def named_paths(text: str) -> list[str]:
    """Paths in backquotes, and targets of links."""
    return [first or second for first, second in _PATH.findall(text)]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_paths_that_a_page_names_exist(page: str) -> None:
    found = named_paths((ROOT / page).read_text())
    assert len(found) > 15
    made = ("build/site",)
    assert [path for path in found if path not in made and not (ROOT / path).exists()] == []


def test_a_path_is_recognised() -> None:
    text = "`a/b.py`, [c](d/e.md#f) and ![g](h.svg), not `x`, [i](https://j/k), [l](#m)"
    assert named_paths(text) == ["a/b.py", "d/e.md", "h.svg"]


def test_contributing_names_every_folder() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    layout = next(block.text for block in blocks_of(text, "") if block.language == "text")
    inside = set(re.findall(r"^  (\w+)/", layout, re.M))
    there = {path.parent.name for path in (ROOT / "kvconnect").glob("*/__init__.py")}
    assert inside == there | {"native"}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def unseparated_lists(text: str) -> list[str]:
    """First items of lists that follow a line of text: the site shows these as one paragraph."""
    plain = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    return re.findall(r"^(?!\s*(?:[-*#|]|\d+\.|$)|  )[^\n]*\n((?:-|\*|\d+\.) [^\n]*)", plain, re.M)


def test_lists_are_lists_on_the_site() -> None:
    found = [line for page in PAGES for line in unseparated_lists(page.read_text())]
    assert found == []
    assert unseparated_lists("Text\n- a\n- b\n") == ["- a"]
    assert unseparated_lists("Text\n\n- a\n  more\n- b\n\n1. c\n2. d\n") == []


# Settings and failures --------------------------------------------------------------------------


def test_every_setting_has_a_row() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    structs = (Settings, DiskSettings, PeerSettings, *REMOTE)
    for name in (name for struct in structs for name in struct.__struct_fields__):
        assert f"| `{name}` |" in text


def test_every_variable_has_a_row() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    sources = [*(ROOT / "kvconnect").rglob("*.py"), ROOT / "setup.py"]
    named = {
        name
        for source in sources
        for name in re.findall(r'"(KVCONNECT_[A-Z_]+)"', source.read_text())
    }
    assert len(named) >= 5
    assert [name for name in sorted(named) if f"| `{name}` |" not in text] == []


def test_a_token_of_a_model_takes_what_its_blocks_take() -> None:
    llama, *_, deepseek = reference.MODELS
    assert reference.token_bytes(llama) == 2 * 32 * 8 * 128 * 2
    assert reference.token_bytes(deepseek) == 61 * (512 + 64) * 2
    few_heads = next(model for model in reference.MODELS if model.kv_heads == 4)
    for ranks, each in ((1, (1, 1, 1)), (8, (1, 2, 8)), (16, (2, 4, 16))):
        models = (llama, few_heads, deepseek)
        assert tuple(reference.copies(model, ranks) for model in models) == each
    assert "| 977,906 | 119 | 122,238 |" in reference.sizing()


def rows(page: str, heading: str) -> set[str]:
    """First cells of the table under a heading."""
    text = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2]
    return set(re.findall(r"^\| `(\w+)` \|", text.partition("\n## ")[0], re.M))


def test_every_failure_has_a_row() -> None:
    classes = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    in_log = rows("failures.md", "Errors in the log")
    assert rows("failures.md", "The start ends with one line") | in_log == classes
    assert rows("failures.md", "Causes") == {cause.value for cause in FailureCause}
    labels = {row.name: row.label.values for row in CATALOG if row.label}
    assert rows("failures.md", "Refused") == set(labels["handoff_refused"])
    tier_rows = rows("failures.md", "Secondary tiers")
    assert tier_rows == set(labels["store_failed_blocks"])
    assert tier_rows == {outcome.value for outcome in BlockOutcome} - {"ok", "absent"}


# The site ---------------------------------------------------------------------------------------


def built(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", target],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = built(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stderr
    return target


def test_pages_from_elsewhere_are_there(site: Path) -> None:
    for page in site_pages.PAGES.values():
        shown = site / page if page.endswith(".json") else (site / page).with_suffix(".html")
        assert shown.exists()
    assert "Twelve questions" in (site / "contributing.html").read_text()


def loaded(text: str) -> Iterator[str]:
    """What a browser fetches of other servers to show a page, links that one clicks excepted."""
    for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text):
        yield from re.findall(r'(?:src|href)="((?:https?:)?//[^"]*)"', tag)


def test_nothing_comes_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    assert [found for page in pages for found in loaded(page.read_text())] == []
    assert list(loaded('<link rel="stylesheet" href="https://fonts.example/x.css">'))


def test_a_link_to_nowhere_fails(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    text = (ROOT / "mkdocs.yml").read_text()
    hook = ROOT / "scripts" / "site_pages.py"
    (tmp_path / "mkdocs.yml").write_text(text.replace("scripts/site_pages.py", str(hook)))
    concepts = tmp_path / "docs" / "concepts.md"
    concepts.write_text(concepts.read_text() + "\n[x](no-such.md) [y](tiers.md#no-such)\n")
    done = built(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "no-such.md" in done.stderr
    assert "#no-such" in done.stderr


def test_links_lead_to_pages_of_the_site() -> None:
    text = "[a](../README.md#use) [b](tiers.md) [c](../kvconnect/cli.py) [d](https://e) [f](#g)"
    found = site_pages.site_links(text, "docs/sglang.md")
    assert found == "[a](index.md#use) [b](tiers.md) c [d](https://e) [f](#g)"
    assert site_pages.site_links("[a](docs/tiers.md)", "README.md") == "[a](tiers.md)"


def test_unknown_settings_are_refused_by_the_check() -> None:
    with pytest.raises(ConfigError):
        check_settings({"remote": {"kind": "valkey", "adress": "a:1"}})
