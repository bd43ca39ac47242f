#!/usr/bin/env bash
# Let Envoy finish its requests before it is stopped: SIGTERM alone cuts every stream. Needs bash and cat, as Envoy's image has.
#   drain.sh [ADMIN_PORT] [SECONDS_IN_ALL] [SECONDS_FOR_WHO_PROBES]
set -euo pipefail
port=${1:-9901} wait_s=${2:-60} probes_s=${3:-5}

admin() { # METHOD PATH: the answer of Envoy's admin port, which must be a 200
  local answer
  exec 3<>"/dev/tcp/127.0.0.1/$port" || return 1
  printf '%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n' "$1" "$2" >&3
  answer=$(cat <&3)
  exec 3>&-
  [[ $answer == "HTTP/1.1 200"* ]] || { echo "drain.sh: $2: ${answer%%$'\r'*}" >&2; return 1; }
  printf '%s\n' "$answer"
}

running() { # how many requests of clients are under way
  local answer
  answer=$(admin GET '/stats?filter=%5Ehttp.clients.downstream_rq_active$') || return 1
  [[ $answer =~ downstream_rq_active:\ ([0-9]+) ]] && echo "${BASH_REMATCH[1]}"
}

admin POST /healthcheck/fail >/dev/null # /envoy/ready says 503: who stands before Envoy takes it out
sleep "$probes_s"
admin POST /drain_listeners >/dev/null # no new connections
while left=$(running) && [ "$left" != 0 ]; do
  [ "$SECONDS" -lt "$wait_s" ] || { echo "drain.sh: $left requests are cut" >&2; exit 1; }
  sleep 0.2
done
