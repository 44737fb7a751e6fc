"""What is in ``deploy/`` is valid, and in words that KVConnect and Kubernetes understand."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvconnect.router.flags import add_flags, options_of
from kvconnect.router.fleet.sources.dns import DNS_EVERY_S
from kvconnect.settings import check_settings
from tests.boards import ALERTS, FOLDER

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
TARGETS = "targets/engines.yml"
KUBERNETES = ROOT / "deploy" / "kubernetes"
PLACES = ("prefill", "decode", "router")
CRDS = {"PodMonitor", "Kustomization"}  # whose schemas Kubernetes does not have


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return found


def manifests(name: str = "*") -> list[dict[str, Any]]:
    files = sorted(KUBERNETES.glob(f"{name}.yaml"))
    return [doc for file in files for doc in yaml.safe_load_all(file.read_text())]


def pod(name: str) -> dict[str, Any]:
    (deployment,) = (doc for doc in manifests(name) if doc["kind"] == "Deployment")
    template: dict[str, Any] = deployment["spec"]["template"]
    return template


# Compose ------------------------------------------------------------------------------------------


def test_compose_mounts_what_there_is_and_listens_on_loopback() -> None:
    services = compose()["services"]
    assert set(services) == {"prometheus", "grafana"}
    mounted = [volume.split(":") for service in services.values() for volume in service["volumes"]]
    sources = [(COMPOSE / source).resolve() for source, *_ in mounted if source.startswith(".")]
    assert all(source.exists() for source in sources)
    assert {ALERTS, FOLDER} <= set(sources)
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    grafana = services["grafana"]["environment"]
    assert grafana["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    home = Path(grafana["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    provider = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    assert str(home.parent) == provider["options"]["path"] in [target for _, target, *_ in mounted]
    assert (FOLDER / home.name).exists()
    source = yaml.safe_load((COMPOSE / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")


@pytest.mark.skipif(not shutil.which("docker"), reason="no Docker")
def test_compose_reads_its_file() -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("Docker without Compose")
    command = ["docker", "compose", "-f", COMPOSE / "compose.yaml", "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    for path, where in (
        (ALERTS, ALERTS.name),
        (COMPOSE / "prometheus.yml", "prometheus.yml"),
        (COMPOSE / TARGETS, TARGETS),
    ):
        (tmp_path / where).write_text(path.read_text().replace("/etc/prometheus", str(tmp_path)))
    check = ["promtool", "check", "config", tmp_path / "prometheus.yml"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and "rules found" in done.stdout, done
    # Controls: without the rules, and with a wrong word in the targets.
    (tmp_path / TARGETS).write_text("- label: {job: x}\n")
    assert subprocess.run(check, capture_output=True).returncode


def test_places_are_scraped_under_their_names() -> None:
    found = yaml.safe_load((COMPOSE / TARGETS).read_text())
    assert tuple(entry["labels"]["job"] for entry in found) == PLACES


# Kubernetes ---------------------------------------------------------------------------------------


def test_manifests_are_of_kubernetes_schema() -> None:
    checked = [doc for doc in manifests() if doc["kind"] not in CRDS]
    assert len(checked) == 2 * len(PLACES) + 3
    for doc in checked:
        kubernetes_validate.validate(doc, "1.32", strict=True)
    doc["spec"]["prts"] = []  # control
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(doc, "1.32", strict=True)


def unprivileged(template: dict[str, Any]) -> bool:
    """Whether nothing in a pod can be root or become it, or speak for it to Kubernetes."""
    spec = template["spec"]
    of_pod = spec.get("securityContext", {})
    return (
        spec.get("automountServiceAccountToken") is False
        and of_pod.get("runAsNonRoot") is True
        and of_pod.get("runAsUser", 0) > 0
        and of_pod.get("seccompProfile") == {"type": "RuntimeDefault"}
        and all(
            each["securityContext"]["allowPrivilegeEscalation"] is False
            and each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            for each in spec["containers"]
        )
    )


@pytest.mark.parametrize("name", PLACES)
def test_pods_are_unprivileged(name: str) -> None:
    template = pod(name)
    assert unprivileged(template)
    for key in ("runAsNonRoot", "runAsUser", "seccompProfile"):
        less = {k: v for k, v in template["spec"]["securityContext"].items() if k != key}
        assert not unprivileged({"spec": template["spec"] | {"securityContext": less}})


def test_images_are_of_one_version() -> None:
    (kustomization,) = manifests("kustomization")
    images = [f"{image['name']}:{image['newTag']}" for image in kustomization["images"]]
    images += [service["image"] for service in compose()["services"].values()]
    docker = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    images += [line.split()[1] for line in docker if line.startswith("FROM ")]
    assert len(images) == 5
    for image in images:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+(\.dev\d+)?", image), image
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert kustomization["images"] == [{"name": "kvconnect", "newTag": version}]


def context_of_images() -> set[str]:
    """Files of the checkout that may get into an image, as .dockerignore says: none but those that
    it names, and no built ones."""
    first, *others = (
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert first == "*", "what is not named stays out"
    return {line[1:] for line in others if line.startswith("!")}


def test_an_image_sees_nothing_but_what_it_is_built_from() -> None:
    named = context_of_images()
    assert all((ROOT / name).exists() for name in named), named
    for secret in (".git", "deploy", "deploy/compose/grafana-password", ".venv", "docs", "tests"):
        assert not any(secret == name or secret.startswith(f"{name}/") for name in named), secret
    for needed in ("pyproject.toml", "setup.py", "README.md", "kvconnect", "kernels"):
        assert needed in named


def set_up(files: Iterable[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Ask setup.py for its version in ``folder``, with these files of the checkout alone."""
    for name in files:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("*.so", "*.fatbin"))
        else:
            shutil.copy(ROOT / name, target)
    command = [sys.executable, "-I", "setup.py", "-q", "--version"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_an_image_sees_all_that_it_is_built_from(tmp_path: Path) -> None:
    named = context_of_images()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    made = set_up(named, tmp_path / "context")
    assert made.stdout.strip().endswith(version), made.stderr
    for needed in ("scripts/build_kernels.py", "scripts/index_page.py"):
        assert set_up(named - {needed}, tmp_path / needed).returncode, needed


def test_images_install_what_is_locked() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:install|wheel) [^&\n]*", text)
    assert len(installs) == 3
    for command in installs:
        assert "--no-deps" in command, "what is not in the lock"
        assert any(
            word in command for word in ("--require-hashes", "--no-index", "--no-build-isolation")
        ), command
    locked = lock("router")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["router"]]
    for requirement in map(Requirement, needed):
        assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    tested = lock("vllm")
    both = locked.keys() & tested.keys()
    assert both and {name: locked[name] for name in both} == {name: tested[name] for name in both}


def lock(name: str) -> dict[str, str]:
    """Package -> version in a lock; each has hashes."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    found = re.findall(r"^([\w.-]+)==([\w.]+)(.*?)\\\n    --hash=sha256:", text, re.M)
    assert len(found) == len(re.findall(r"^\w", text, re.M))
    return {canonicalize_name(package): version for package, version, _ in found}


def admitted(policy: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Which peers a policy lets in, by port."""
    return {str(rule["ports"][0]["port"]): list(rule["from"]) for rule in policy["spec"]["ingress"]}


def test_policies_admit_who_needs_to_and_nobody_else() -> None:
    engines, media, router = manifests("network")
    names = [pod(name)["metadata"]["labels"] for name in ("prefill", "decode")]
    (expression,) = engines["spec"]["podSelector"]["matchExpressions"]
    assert expression["values"] == [label["app.kubernetes.io/component"] for label in names]
    into = admitted(engines)
    assert set(into) == {"http", "14580", "5557"}
    for events in (into["http"][0], *into["5557"]):
        assert events["podSelector"]["matchLabels"] == pod("router")["metadata"]["labels"]
    assert into["14580"] == [{"podSelector": engines["spec"]["podSelector"]}]
    assert router["spec"]["podSelector"]["matchLabels"] == pod("router")["metadata"]["labels"]
    for policy in (engines, router):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for peers in admitted(policy).values():
            assert peers and all(peers), "an empty peer is everybody"
    assert media["spec"]["policyTypes"] == ["Egress"]
    assert media["spec"]["podSelector"] == engines["spec"]["podSelector"]
    (block,) = (
        to["ipBlock"] for rule in media["spec"]["egress"] for to in rule["to"] if "ipBlock" in to
    )
    assert {"169.254.0.0/16", "10.0.0.0/8"} <= set(block["except"]), "metadata and inner services"


@pytest.mark.parametrize("name", PLACES)
def test_a_pod_has_time_to_be_forgotten_and_to_finish(name: str) -> None:
    """Otherwise a rolling update cuts requests; a test of engines shows that this is enough."""
    spec = pod(name)["spec"]
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] > pause_of(container) + drain_of(container)
    assert pause_of(container) > DNS_EVERY_S + 5  # and what a name server may remember
    (deployment,) = (doc for doc in manifests(name) if doc["kind"] == "Deployment")
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


def pause_of(container: dict[str, Any]) -> float:
    """Seconds between a pod's leaving of its Service and SIGTERM."""
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return float(seconds)


def drain_of(container: dict[str, Any]) -> float:
    """Seconds that requests have after SIGTERM."""
    (flag,) = (arg for arg in container["args"] if re.match("--(shutdown|drain)-timeout=", arg))
    return float(flag.partition("=")[2])


@pytest.mark.parametrize("name", PLACES)
def test_services_and_the_monitor_find_the_pods(name: str) -> None:
    template = pod(name)
    labels = template["metadata"]["labels"]
    (service,) = (doc for doc in manifests(name) if doc["kind"] == "Service")
    (monitor,) = manifests("monitor")
    for selector in (service["spec"]["selector"], monitor["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    (container,) = template["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {service["spec"]["ports"][0]["targetPort"]} <= ports
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    assert labels[monitor["spec"]["jobLabel"]] == name


@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_engines_get_settings_that_exist(name: str, role: str) -> None:
    (container,) = pod(name)["spec"]["containers"]
    flag, text = container["args"][-2:]
    settings = json.loads(text.replace("$(POD_IP)", "10.1.2.3"))
    assert (flag, settings["kv_role"]) == ("--kv-transfer-config", role)
    config = check_settings(settings["kv_connector_extra_config"])
    address, port = config.listen.split(":")
    assert address == "10.1.2.3"
    assert int(port) in [port["containerPort"] for port in container["ports"]]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(Path(config.key_file).parent) in mounts


def test_the_router_is_given_keys_and_the_services_of_the_engines(tmp_path: Path) -> None:
    (container,) = pod("router")["spec"]["containers"]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef")
    (mount,) = container["volumeMounts"]
    args = [each.replace(mount["mountPath"], str(tmp_path)) for each in container["args"]]
    arguments = parser.parse_args(args)
    assert options_of(arguments).listening.api_keys
    for name, given in (("prefill", arguments.prefill_dns), ("decode", arguments.decode_dns)):
        (service,) = (doc for doc in manifests(name) if doc["kind"] == "Service")
        port = service["spec"]["ports"][0]["port"]
        assert given == [f"http://{service['metadata']['name']}:{port}"]
        assert service["spec"]["clusterIP"] == "None"


def test_the_alerts_are_a_rule_of_the_operator() -> None:
    """By the command that the documentation gives."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    command = text[text.index("{ printf") : text.index(" | kubectl apply -f -")]
    script = command.replace("boards/alerts.yaml", str(ALERTS))
    made = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    rule = yaml.safe_load(made.stdout)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
