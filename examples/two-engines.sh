#!/usr/bin/env bash
# Two engines read blocks from one another's host memory, without a store between them.
. "$(dirname "$0")/common.sh"

# settings PORT: each engine has a port at which the other one reads.
settings() {
  printf '{"host_bytes": "%s", "load_when": "always", "listen": "127.0.0.1:%s",
    "cache_peers": {"serve": true, "ask": ["127.0.0.1:14580", "127.0.0.1:14590"]}}' "$HOST_BYTES" "$1"
}

CUDA_VISIBLE_DEVICES=0 start vllm serve "$MODEL" --port 8001 \
  --kv-transfer-config "$(connector kv_both "$(settings 14580)")"
CUDA_VISIBLE_DEVICES=1 start vllm serve "$MODEL" --port 8002 \
  --kv-transfer-config "$(connector kv_both "$(settings 14590)")"
up 8001 8002
ask 8001
ask 8002
hits 8002 peer
