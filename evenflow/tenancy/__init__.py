"""Who the callers are: tenants, their groups and keys."""
