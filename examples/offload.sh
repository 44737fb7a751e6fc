#!/usr/bin/env bash
# One vLLM engine keeps KV blocks in host memory; kvconnect try says what that gains.
. "$(dirname "$0")/common.sh"

start vllm serve "$MODEL" \
  --kv-transfer-config "$(connector kv_both "{\"host_bytes\": \"$HOST_BYTES\"}")"
up 8000
kvconnect try http://127.0.0.1:8000
