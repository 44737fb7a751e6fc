# What the examples share. MODEL, HOST_BYTES and FOLDER may be set from outside. offload.sh needs half as much
# host memory again as the device's KV cache; auto is a quarter of the machine's.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
HOST_BYTES=${HOST_BYTES:-auto}
FOLDER=${FOLDER:-/var/tmp/kvconnect-example}
servers=()

# start COMMAND...: a server that ends with the script.
start() {
  "$@" &
  servers+=($!)
}

# up PORT...: waits until all of them answer, or fails when a server has ended.
up() {
  local port pid
  for port; do
    until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
      for pid in "${servers[@]}"; do
        kill -0 "$pid" 2>/dev/null || { echo "a server ended, see above" >&2; exit 1; }
      done
      sleep 1
    done
  done
}

# stop: ends all servers.
stop() {
  ((${#servers[@]})) || return 0
  kill "${servers[@]}" 2>/dev/null || true
  wait "${servers[@]}" 2>/dev/null || true
  servers=()
}
trap stop EXIT

# ask PORT: sends a long prompt, the same each time.
ask() {
  curl -sf "http://127.0.0.1:$1/v1/completions" -H 'Content-Type: application/json' \
    -d "{\"model\": \"$MODEL\", \"prompt\": \"$(seq -s ' ' 300)\", \"max_tokens\": 4, \"temperature\": 0}"
  echo
}

# sum_of PORT PATTERN: the sum of the series of /metrics that match.
sum_of() {
  curl -sf "http://127.0.0.1:$1/metrics" | awk -v series="$2" '$0 ~ series {sum += $NF} END {print sum + 0}'
}

# written PORT: waits until blocks are written to a disk or store, and none is on its way.
written() {
  until [ "$(sum_of "$1" '^vllm:kvconnect_tier_written_blocks_total')" != 0 ] &&
    [ "$(sum_of "$1" '^vllm:kvconnect_tier_jobs_in_flight')" = 0 ]; do
    sleep 1
  done
}

# hits PORT TIER: prints how many tokens were loaded from a tier, and fails if none were.
hits() {
  local tokens
  tokens=$(sum_of "$1" "^vllm:kvconnect_hit_tokens_total{.*tier=\"$2\"")
  echo "$tokens tokens were loaded from: $2"
  [ "$tokens" != 0 ]
}

# connector ROLE SETTINGS: the value of --kv-transfer-config.
connector() {
  printf '{"kv_connector": "KVConnect", "kv_role": "%s", "kv_connector_extra_config": %s}' "$1" "$2"
}
