"""Where engines come from while a router runs, beside its flags and its administrators.

A source is an asynchronous generator that ends only when it is closed. Each value names *all*
engines of the roles in it; the router adds and removes what differs. A source that cannot be read
says so in the log, yields nothing, and tries again: what it named before stays. An entry that
makes no sense is refused by itself: its engine stays as it was, and the others are not affected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial

from kvconnect.errors import ConfigError
from kvconnect.router.metrics import InputKind
from kvconnect.router.options import Sources, Worker, worker_of
from kvconnect.router.policy.loads import Role

NamedEngines = Mapping[Role, tuple[Worker, ...]]
EngineSource = AsyncGenerator[NamedEngines, None]
OnRefused = Callable[[InputKind, str], None]
"""Is told what an entry was that could not be used: counts and logs it."""


def configured_sources(
    sources: Sources,
) -> Iterator[tuple[str, Callable[[OnRefused], EngineSource]]]:
    """Yield the name of each source that was asked for, and what opens it. What a source needs is
    imported only if it is used."""
    if sources.file:
        from kvconnect.router.fleet.sources import local

        yield "file", partial(local.follow_file, sources.file)
    for role in Role:
        for name in sources.dns.get(role, ()):
            from kvconnect.router.fleet.sources import local

            yield f"DNS {name}", partial(local.follow_dns, role, name)
        for name in sources.services.get(role, ()):
            from kvconnect.router.fleet.sources import kubernetes

            yield f"Kubernetes service {name}", partial(kubernetes.follow, role, name)
    if sources.etcd:
        from kvconnect.router.fleet.sources import etcd

        yield "etcd", partial(etcd.follow, sources.etcd)


def at_addresses(
    model: Worker, addresses: Iterable[str], what: InputKind, refuse: OnRefused
) -> tuple[Worker, ...]:
    """Return ``model`` at each address that can stand in a URL; ``refuse`` is told of others."""
    found = []
    for address in addresses:
        worker = model.on_host(address)
        try:
            worker_of(what.value, worker.url)
        except ConfigError as error:
            refuse(what, str(error))
        else:
            found.append(worker)
    return tuple(found)
