#!/usr/bin/env bash
# Prefill on one vLLM engine, decode on another, KVConnect's router in front.
. "$(dirname "$0")/common.sh"

CUDA_VISIBLE_DEVICES=0 start vllm serve "$MODEL" --port 8001 \
  --kv-transfer-config "$(connector kv_producer "{\"host_bytes\": \"$HOST_BYTES\"}")"
CUDA_VISIBLE_DEVICES=1 start vllm serve "$MODEL" --port 8002 \
  --kv-transfer-config "$(connector kv_consumer "{\"host_bytes\": \"$HOST_BYTES\"}")"
start kvconnect router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
up 8001 8002 8000
ask 8000
kvconnect try --router http://127.0.0.1:8000
