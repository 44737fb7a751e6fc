"""SGLang's real schedulers with both halves of KVConnect, and a model that is only a fingerprint.

Real: each rank is a process with SGLang's ``Scheduler``, its queues of the two halves
(``PrefillBootstrapQueue``, ``DecodePreallocQueue``, ``DecodeTransferQueue``), its radix cache,
allocators and event loops, SGLang's bootstrap server, and KVConnect's backend and agents over TCP.
Not real: the model and the HTTP servers with their tokenizer processes. The test stands where a
scheduler looks for requests: it gives requests, aborts and pauses to one engine or the other and
lets one iteration of its loop run. The model writes into the KV of each token, layer and head what
it is of, checks all that attention would read before each step, and its next token follows from the
prompt alone, so that each answer is known. In the end each request has its tokens or a failure that
the test caused, and no rank holds a page, a row, a room or a queued request.

Covered at random (``workload``, ``modes``): overlap on and off, chunked prefill, prefixes that
prefill or decode has, early sends of them, pages sent layer by layer, two tensor-parallel ranks on
either side, two pipeline stages on prefill, decode without memory and its retractions, retractions
of everything and their recomputation, two samples in one room, aborts at either engine or both at
any point, engines that stand still. ``test_rooms`` has the rare orders of events, one by one.
``breakages`` breaks KVConnect and the engines on purpose.

Not covered: GPUs (streams, graphs), NIXL, data and context parallelism, MLA, windows, states,
drafts, adapters, images, HiCache and the linker, optimistic prefill, more than two engines,
connections that break, processes that die.

A seed decides what happens, but not when threads run. ``python -m tests.sglang.schedulers.fuzz``
runs as many seeds as one likes.
"""
