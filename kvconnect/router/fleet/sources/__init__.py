"""Sources of engines that a router follows while it runs.

A source is an asynchronous generator that ends only when it is closed. Each value contains *all*
engines of its roles; the router adds and removes the difference. A source that cannot be read logs
the failure, yields nothing and tries again: its engines stay. An invalid entry is refused alone:
its engine stays as it was, and the others are not affected.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from functools import partial

from kvconnect.errors import ConfigError
from kvconnect.router.engine_spec import EngineSpec, engine_spec
from kvconnect.router.metrics import InputKind
from kvconnect.router.options import Sources
from kvconnect.router.policy.fleet_view import Role

NamedEngines = Mapping[Role, tuple[EngineSpec, ...]]
EngineSource = AsyncGenerator[NamedEngines, None]
OnRefused = Callable[[InputKind, str], None]
"""Counts and logs an invalid entry: the kind of input, and the reason."""


def configured_sources(
    sources: Sources,
) -> Iterator[tuple[str, Callable[[OnRefused], EngineSource]]]:
    """Yield name and generator function of each configured source. The packages that a source
    needs are imported only if it is configured."""
    if sources.file:
        from kvconnect.router.fleet.sources import file

        yield "file", partial(file.follow, sources.file)
    for role in Role:
        for name in sources.dns.get(role, ()):
            from kvconnect.router.fleet.sources import dns

            yield f"DNS {name}", partial(dns.follow, role, name)
        for name in sources.services.get(role, ()):
            from kvconnect.router.fleet.sources import kubernetes

            yield f"Kubernetes service {name}", partial(kubernetes.follow, role, name)
    if sources.etcd:
        from kvconnect.router.fleet.sources import etcd

        yield "etcd", partial(etcd.follow, sources.etcd)


def at_addresses(
    model: EngineSpec, addresses: Iterable[str], what: InputKind, refuse: OnRefused
) -> tuple[EngineSpec, ...]:
    """Return ``model`` at each address that is valid in a URL; ``refuse`` gets the others."""
    found = []
    for address in addresses:
        spec = model.on_host(address)
        try:
            engine_spec(what.value, spec.url)
        except ConfigError as error:
            refuse(what, str(error))
        else:
            found.append(spec)
    return tuple(found)
