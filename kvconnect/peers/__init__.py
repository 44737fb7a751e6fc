"""What the agents of a worker have in common that talk to workers of other engines.

There are two: for hand-offs (:mod:`kvconnect.disaggregation.agent`) and for sharing
(:mod:`kvconnect.tiers.peers.peer_agent`). They share a port, the handshake, the kind of ticket and
the check of weights, and keep queues, connections and threads of their own: whatever a reader of
shared blocks does, and whatever its questions cost, no message of a hand-off waits behind it.
"""
