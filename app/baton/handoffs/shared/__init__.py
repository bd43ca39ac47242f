"""Share handoffs between gateways on several machines, through a Valkey (or Redis) server."""
