#!/usr/bin/env bash
# Two engines share a store: what one has computed, the other loads. REMOTE names the store.
. "$(dirname "$0")/common.sh"

# A folder, for a try on one machine. Others: {"kind": "valkey", "address": "10.1.2.3:6379"},
# {"kind": "object", "url": "s3://bucket/kv"}.
REMOTE=${REMOTE:-"{\"kind\": \"object\", \"url\": \"file://$FOLDER/store\"}"}
settings="{\"host_bytes\": \"$HOST_BYTES\", \"load_when\": \"always\", \"remote\": $REMOTE}"
mkdir -p "$FOLDER/store"

CUDA_VISIBLE_DEVICES=0 start vllm serve "$MODEL" --port 8001 \
  --kv-transfer-config "$(connector kv_both "$settings")"
CUDA_VISIBLE_DEVICES=1 start vllm serve "$MODEL" --port 8002 \
  --kv-transfer-config "$(connector kv_both "$settings")"
up 8001 8002
ask 8001
written 8001
ask 8002
hits 8002 remote
