"""Share scarce places between tenants: one queue class for everything that requests wait for."""
