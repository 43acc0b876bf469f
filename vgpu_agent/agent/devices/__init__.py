"""The controllers of CDI specs, MPS daemons and MIG instances, by which containers get devices."""
