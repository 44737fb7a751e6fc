"""Where engines come from while a router runs, beside its flags and its administrators.

A source is an asynchronous generator that ends only when it is closed. Each value names *all*
engines of the roles in it; the router adds and removes what differs. A source that cannot be read,
or not understood, says so in the log, yields nothing, and tries again: what it named before stays.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping

from kvconnect.router.options import Sources, Worker
from kvconnect.router.view import Role

Named = Mapping[Role, tuple[Worker, ...]]
Source = AsyncGenerator[Named, None]


def opened(sources: Sources) -> Iterator[tuple[str, Source]]:
    """Yield the name of each source that was asked for, and the source. What a source needs is
    imported only if it is used."""
    if sources.file:
        from kvconnect.router.sources import file

        yield "file", file.follow(sources.file)
    for role in Role:
        for name in sources.dns.get(role, ()):
            from kvconnect.router.sources import dns

            yield f"DNS {name}", dns.follow(role, name)
        for name in sources.services.get(role, ()):
            from kvconnect.router.sources import kubernetes

            yield f"Kubernetes service {name}", kubernetes.follow(role, name)
    if sources.etcd:
        from kvconnect.router.sources import etcd

        yield "etcd", etcd.follow(sources.etcd)
