# Read by the shell that runs `ray start` on each node: . deploy/ray/environment.sh
# Ray's processes take it over, and so do the gateways: their BATON_* variables belong here too.

# Ray sends nothing home.
export RAY_USAGE_STATS_ENABLED=0

# Ray would start gateways and engines with less priority than everything else on the machine (nice 15).
export RAY_worker_niceness=0

# HAProxy shares requests out, and talks to the replicas itself.
export RAY_SERVE_ENABLE_HA_PROXY=1
# With its statistics, metrics and admin socket closed to others: see docs/how-to/ray-serve.md.
RAY_SERVE_HAPROXY_BINARY_PATH=$(command -v baton-haproxy) || echo 'baton-haproxy: not found; pip install "vllm-baton[ray]"' >&2
export RAY_SERVE_HAPROXY_BINARY_PATH
# The same X-Session-Id comes to the same replica.
export RAY_SERVE_HAPROXY_BALANCE_ALGORITHM='hdr(x-session-id)'
# Streams that run when replicas come or go stay with the HAProxy that they came by, for so long at most (120 s
# unless set): as long as your longest answer.
export RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=3600
# A replica that ends is still reached for so long: as `drain_delay_s`.
export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=5
