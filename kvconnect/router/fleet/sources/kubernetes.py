"""Engines that are the ready endpoints of a Kubernetes service.

The official client blocks, so each service has its own thread. It lists the service's
EndpointSlices, watches them, and lists them again when the watch ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import urllib3
from kubernetes import client, config, watch

from kvconnect.router.engine_spec import engine_spec
from kvconnect.router.fleet.sources import EngineSource, OnRefused, at_addresses
from kvconnect.router.metrics import InputKind
from kvconnect.router.policy.fleet_view import Role
from kvconnect.threads import ThreadKind, make

logger = logging.getLogger(__name__)

WATCH_S = 300  # length of a watch
PAUSE_S = 1.0  # between a watch and the next list
_GONE = 410  # HTTP status: the list is too old to watch from
_ANSWER_S = 30.0
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FAILED = (
    *(client.ApiException, config.ConfigException, urllib3.exceptions.HTTPError),
    *(OSError, ValueError),  # no kubeconfig; an invalid response
)


async def follow(role: Role, name: str, refuse: OnRefused) -> EngineSource:
    """Follow the service that is the host in ``name``, an engine as on the command line."""
    model, loop = engine_spec("kubernetes", name), asyncio.get_running_loop()
    found: asyncio.Queue[set[str]] = asyncio.Queue()
    closed = threading.Event()

    def on_loop(function: Callable[..., None], *args: object) -> None:
        if not closed.is_set():
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(function, *args)

    def work() -> None:
        slices = Slices(lambda text: on_loop(refuse, InputKind.KUBERNETES, f"{name}: {text}"))
        while not closed.is_set():
            try:
                service, namespace = _service(model.hostname)
                for addresses in _watch(service, namespace, slices):
                    on_loop(found.put_nowait, addresses)
                    if closed.is_set():
                        return
            except _FAILED as error:
                if getattr(error, "status", None) != _GONE:
                    logger.warning("Kubernetes service %s: %s", name, str(error).strip())
            closed.wait(PAUSE_S)

    # A daemon thread: at exit it may be in the middle of a watch.
    make(
        ThreadKind.SOURCE,
        "kvconnect-kubernetes",
        work,
        again=True,
        stopped=closed.is_set,
    ).start()
    try:
        while True:
            addresses = sorted(await found.get())
            yield {role: at_addresses(model, addresses, InputKind.KUBERNETES, refuse)}
    finally:
        closed.set()


def _service(host: str) -> tuple[str, str]:
    """Return name and namespace of the service in a host such as ``decode.serving``."""
    name, _, rest = host.partition(".")
    namespace = rest.partition(".")[0]
    if not namespace and _NAMESPACE.exists():
        namespace = _NAMESPACE.read_text().strip()
    return name, namespace or "default"


class _Conditions(msgspec.Struct):
    ready: bool | None = None


class _Target(msgspec.Struct):
    uid: str | None = None


class _Endpoint(msgspec.Struct):
    addresses: Annotated[list[str], msgspec.Meta(min_length=1)]
    conditions: _Conditions | None = None
    target_ref: _Target | None = None

    @property
    def pod(self) -> str:
        """What is the same in the slices of both families of a dual-stack service."""
        return (self.target_ref and self.target_ref.uid) or self.addresses[0]


class _Metadata(msgspec.Struct):
    name: str


class _Slice(msgspec.Struct):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None


class Slices:
    """A service's EndpointSlices. An invalid one stays as it was; ``refuse`` gets the reason."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self._refuse = refuse
        self._known: dict[str, _Slice] = {}

    def listed(self, slices: Iterable[object]) -> None:
        """Replace all slices."""
        before, self._known = self._known, {}
        for each in slices:
            self.changed(each)
            name = _name(each)
            if name in before:
                self._known.setdefault(name, before[name])

    def changed(self, raw: object) -> None:
        """Add or replace a slice."""
        try:
            parsed = msgspec.convert(raw, _Slice, from_attributes=True)
        except msgspec.ValidationError as error:
            self._refuse(f"an EndpointSlice that makes no sense: {error}")
        else:
            self._known[parsed.metadata.name] = parsed

    def deleted(self, raw: object) -> None:
        """Remove a slice."""
        self._known.pop(_name(raw), None)

    def ready(self) -> set[str]:
        """Return one address of each ready endpoint, of IPv4 where a pod has both; its other
        addresses lead to the same engine. An endpoint without the condition is ready."""
        found: dict[str, str] = {}
        for each in sorted(self._known.values(), key=lambda each: each.address_type):
            for endpoint in each.endpoints or ():
                if endpoint.conditions is None or endpoint.conditions.ready is not False:
                    found.setdefault(endpoint.pod, endpoint.addresses[0])
        return set(found.values())


def _name(raw: object) -> str:
    return str(getattr(getattr(raw, "metadata", None), "name", ""))


def _watch(name: str, namespace: str, slices: Slices) -> Iterator[set[str]]:
    """Yield the addresses of a service's ready endpoints, at once and after each change of a
    slice, until the watch ends."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    api = client.DiscoveryV1Api()
    which = {"namespace": namespace, "label_selector": f"kubernetes.io/service-name={name}"}
    listed = api.list_namespaced_endpoint_slice(**which, _request_timeout=_ANSWER_S)
    slices.listed(listed.items)
    yield slices.ready()
    events = watch.Watch().stream(
        api.list_namespaced_endpoint_slice,
        **which,
        resource_version=listed.metadata.resource_version,
        timeout_seconds=WATCH_S,
        _request_timeout=WATCH_S + _ANSWER_S,
    )
    for event in events:
        if event["type"] == "DELETED":
            slices.deleted(event["object"])
        else:
            slices.changed(event["object"])
        yield slices.ready()
