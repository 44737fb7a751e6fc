#!/usr/bin/env bash
# Prefill on one SGLang server, decode on another, KVConnect's router in front.
. "$(dirname "$0")/common.sh"

CUDA_VISIBLE_DEVICES=0 start python -m sglang.launch_server --model-path "$MODEL" --port 30001 \
  --disaggregation-mode prefill --disaggregation-transfer-backend kvconnect \
  --disaggregation-bootstrap-port 8998 --enable-metrics
CUDA_VISIBLE_DEVICES=1 start python -m sglang.launch_server --model-path "$MODEL" --port 30002 \
  --disaggregation-mode decode --disaggregation-transfer-backend kvconnect --enable-metrics
up 30001 30002
start kvconnect router --prefill http://127.0.0.1:30001,engine=sglang,bootstrap=8998 \
  --decode http://127.0.0.1:30002,engine=sglang
up 8000
ask 8000
kvconnect try --router http://127.0.0.1:8000
