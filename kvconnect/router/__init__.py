"""``kvconnect router``: sends each request to a prefill and a decode engine.

- ``app``, ``admin``: the HTTP server and the admin API.
- ``exchange``: one client request, with its attempts and its deadline.
- ``http/``: admission of requests, calls of engines, replies to clients.
- ``fleet/``: the engines: membership, health, load, cached prefixes, pairs that hand over.
- ``connections/``: HTTP/1.1 connections to engines.
- ``options``, ``flags``: what a user sets. ``metrics``, ``tracing``, ``supervisor``: observability.
- ``requests/``: what clients ask, and what engines are asked for them and answer. Pure.
- ``policy/``: chooses engines and ranks. Pure: time and randomness are arguments.

An engine is an ``EngineSpec`` as a user names it, an ``Engine`` while the router runs, and an
``EngineView`` to policies. A ``Target`` is one data-parallel rank of it. A worker is the process of
one rank.
"""
