"""The records of handoffs: in memory, on disk, shared by the gateways over one store."""
