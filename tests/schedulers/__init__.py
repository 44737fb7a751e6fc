"""vLLM's real schedulers with both halves of KVConnect, and a model that is only a fingerprint.

Real: ``Scheduler`` and ``AsyncScheduler`` with their block pool and KV-cache managers, the
connector of the scheduler and of each worker, copy threads, host tier, disk, the agents of
hand-offs and of shared memory over TCP and from a neighbour's memory. Not real: the model and its
runner. The model writes a fingerprint of all that a token's KV depends on (weights, adapter, salt,
tokens before it) for each layer and head, and checks each one that attention or a state would
read. In the end the answers are compared with those of an engine without caches, and nothing may
be left over.

Covered at random (``workload``, ``fleets``): asynchronous scheduling, two ranks, full attention,
with windows and with Mamba states, drafts, chunked prefill, preemption by blocks and by priority,
aborts between and during steps, pauses, resets with new weights with and without running requests,
hints and receipts, salts, adapters, prompt embeddings, requests that skip the cache, all digests
and policies, loads inside the step, failing and late copies, a failing disk, two engines that
share (also with block sizes of 16 and 32 by ``page_tokens``), hand-offs by pull and push between
engines of other ranks and block sizes. ``controls`` breaks KVConnect on purpose.

Not covered: GPUs (streams, graphs), processes of their own for ranks, pipeline, data and context
parallelism, routed experts, draft models with KV of their own, images, sessions that go on with
more input, sleep, remote stores, NIXL, ``MultiConnector``, more than two engines, connections that
break.

``other_version`` runs the same with the version of vLLM that is not installed.

A seed decides what happens, but not when threads run. ``python -m tests.schedulers.fuzz`` runs as
many seeds as one likes.
"""
