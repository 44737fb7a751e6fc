"""What is the same for all agents of a worker that talk to workers of other engines.

There are two: for hand-offs (:mod:`kvconnect.disaggregation.agent`) and for sharing
(:mod:`kvconnect.tiers.peers.peer_agent`). They share a port, the handshake, sessions, the kind of
ticket and the check of weights. Each has its own connections, queues and thread: whatever a reader
of shared blocks does, and whatever its questions cost, no message of a hand-off waits behind it.

Only sharing keeps connections (:mod:`kvconnect.peers.dialling`): workers that share are known for
good and tried until they are there. A hand-off's worker is that of one ticket of one start of an
engine, and its request decides whether it is tried again.
"""
