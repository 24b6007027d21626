"""Places, leases, durable writes and published outputs."""
