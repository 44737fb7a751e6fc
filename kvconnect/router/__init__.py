"""``kvconnect router``: sends each request to a prefill and a decode engine.

From top to bottom; imports point down only:

- ``app``, ``admin``, ``cache_admin``: the HTTP server and the admin API.
- ``http/``: client requests over HTTP: admission, attempts, calls of engines, replies.
- ``tracing``: spans of requests.
- ``fleet/``: the engines: membership, health, load, cached prefixes, pairs that hand over.
- ``connections/``: HTTP/1.1 connections to engines.
- ``decision``: what is decided about one request: its engines, their bodies, another attempt. Pure:
  apart from HTTP, so that any front can use it.
- ``options``, ``flags``: what a user sets. ``metrics``, ``supervisor``: what is counted.
- ``requests/``: what clients ask, and what engines are asked for them and answer. Pure.
- ``policy/``: chooses engines and ranks. Pure: time and randomness are arguments.

An engine is an ``EngineSpec`` as a user names it, an ``Engine`` while the router runs, and an
``EngineView`` to policies. A ``Target`` is one data-parallel rank of it. A worker is the process of
one rank.
"""
