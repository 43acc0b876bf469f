"""Controllers of what containers are given devices by: CDI specs, MPS daemons, MIG instances."""
