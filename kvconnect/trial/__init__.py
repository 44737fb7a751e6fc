"""``kvconnect try``: asks running engines for prompts, and says what KVConnect gains.

- ``http_client``: requests that end by a deadline.
- ``engine_api``: what vLLM and SGLang are asked and answer.
- ``plain_words``: prompts.
- ``counters``: an engine's metrics, before and after.
- ``eviction``: empties the device's cache of prompts.
- ``offload_trial``, ``handoff_trial``: what is asked in which order, and measured.
- ``verdicts``: why nothing is gained. ``results``: lines, JSON and the report.
"""
