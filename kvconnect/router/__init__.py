"""``kvconnect router``: sends each request to a prefill and a decode engine.

Read in this order: ``options`` (what a user chooses), ``legs`` (what each engine is asked),
``view`` and ``policy`` (which engines, and how), ``upstreams`` (who is up), ``client`` (one request
to one engine), ``reply`` (what the client is answered), ``exchange`` (one client request, with its
retries and deadline), ``app`` (routes).
"""
