"""Engines that are the ready endpoints of a Kubernetes service.

The official client blocks, so each service is followed by a thread of its own: it lists the
service's EndpointSlices, watches them, and lists them again when the watch ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config, watch

from kvconnect.router.options import Worker, worker_of
from kvconnect.router.sources import Source
from kvconnect.router.view import Role

logger = logging.getLogger(__name__)

WATCH_S = 300  # then the slices are listed again
PAUSE_S = 1.0  # before that
_GONE = 410  # what was listed is too old to watch from
_ANSWER_S = 30.0
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_FAILED = (
    *(client.ApiException, config.ConfigException, urllib3.exceptions.HTTPError),
    *(OSError, ValueError),  # no kubeconfig; an answer that makes no sense
)


async def follow(role: Role, name: str) -> Source:
    """Follow the service in ``name``, a worker as on the command line."""
    model, loop = worker_of("kubernetes", name), asyncio.get_running_loop()
    found: asyncio.Queue[tuple[Worker, ...]] = asyncio.Queue()
    closed = threading.Event()

    def tell(addresses: Iterable[str]) -> None:
        workers = tuple(map(model.on_host, sorted(addresses)))
        if not closed.is_set():
            loop.call_soon_threadsafe(found.put_nowait, workers)

    def work() -> None:
        while not closed.is_set():
            try:
                for addresses in _watch(*_service(model.hostname)):
                    tell(addresses)
                    if closed.is_set():
                        return
            except _FAILED as error:
                if getattr(error, "status", None) != _GONE:
                    logger.warning("Kubernetes service %s: %s", name, str(error).strip())
            closed.wait(PAUSE_S)

    # The process does not wait for it: it may be in the middle of a watch.
    threading.Thread(target=work, name="kvconnect-kubernetes", daemon=True).start()
    try:
        while True:
            yield {role: await found.get()}
    finally:
        closed.set()


def _service(host: str) -> tuple[str, str]:
    """Return name and namespace of the service that a host such as ``decode.serving`` names."""
    name, _, rest = host.partition(".")
    namespace = rest.partition(".")[0]
    if not namespace and _NAMESPACE.exists():
        namespace = _NAMESPACE.read_text().strip()
    return name, namespace or "default"


def _watch(name: str, namespace: str) -> Iterator[set[str]]:
    """Yield the addresses of a service's ready endpoints, now and whenever they change, until the
    watch ends."""
    try:
        config.load_incluster_config()
    except config.ConfigException:
        config.load_kube_config()
    api = client.DiscoveryV1Api()
    which = {"namespace": namespace, "label_selector": f"kubernetes.io/service-name={name}"}
    listed = api.list_namespaced_endpoint_slice(**which, _request_timeout=_ANSWER_S)
    slices: dict[str, Any] = {each.metadata.name: each for each in listed.items}
    yield _ready(slices.values())
    events = watch.Watch().stream(
        api.list_namespaced_endpoint_slice,
        **which,
        resource_version=listed.metadata.resource_version,
        timeout_seconds=WATCH_S,
        _request_timeout=WATCH_S + _ANSWER_S,
    )
    for event in events:
        if event["type"] == "DELETED":
            slices.pop(event["object"].metadata.name, None)
        else:
            slices[event["object"].metadata.name] = event["object"]
        yield _ready(slices.values())


def _ready(slices: Iterable[Any]) -> set[str]:
    """Return an address of each endpoint that is ready; one that does not say is. Further addresses
    of an endpoint lead to the same engine."""
    return {
        address
        for each in slices
        for endpoint in each.endpoints or ()
        if endpoint.conditions is None or endpoint.conditions.ready is not False
        for address in endpoint.addresses[:1]
    }
