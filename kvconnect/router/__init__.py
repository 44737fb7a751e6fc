"""``kvconnect router``: sends each request to a prefill and a decode engine.

Pure, in this order: ``view`` (what a decision looks at), ``loads`` (tokens per rank), ``prefixes``,
``kvevents`` and ``history`` (what is cached where), ``breaker``, ``pairing`` (between which engines
KV moves), ``pick`` (one of several targets), ``policy`` (both legs of a request), ``legs`` (what
each engine is asked), ``reports`` (what engines say of themselves).

On the event loop: ``http1`` and ``pool`` (requests to engines), ``upstreams`` (the engines as last
seen), ``watch``, ``subscribe`` and ``probe`` (what is always done for them), ``membership`` (which
there are), ``roles`` (changing them), ``client`` (one leg), ``reply`` (what the client is
answered), ``exchange`` (one request, with its retries and deadline), ``admission``, ``caches``,
``admin``, ``app`` (routes). ``options`` and ``flags`` are what a user chooses.
"""
