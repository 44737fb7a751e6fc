#!/usr/bin/env bash
# Blocks on a disk survive a restart of the engine.
. "$(dirname "$0")/common.sh"

settings="{\"host_bytes\": \"$HOST_BYTES\", \"load_when\": \"always\",
  \"disk\": {\"path\": \"$FOLDER/disk\", \"capacity\": \"1GiB\"}}"

start vllm serve "$MODEL" --kv-transfer-config "$(connector kv_both "$settings")"
up 8000
ask 8000
written 8000
stop

start vllm serve "$MODEL" --kv-transfer-config "$(connector kv_both "$settings")"
up 8000
ask 8000
hits 8000 disk
