"""``kvconnect router``: sends each request to a prefill and a decode engine.

- ``app``, ``admin``, ``apis``: the HTTP server, the admin API, and the paths that clients see.
- ``exchange``: one client request, with its attempts and its deadline.
- ``body``: what routing reads in a request body.
- ``http/``: admission of requests, connections and requests to engines, replies to clients.
- ``policy/``: chooses engines and ranks. Pure: time and randomness are arguments.
- ``fleet/``: the engines: membership, health, load, cached prefixes, pairs that hand over.
- ``options``, ``flags``: what a user sets. ``metrics``, ``tracing``, ``supervisor``: observability.
"""
