"""Hand-offs of KV blocks from prefill to decode engines."""
