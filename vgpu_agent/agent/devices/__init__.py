"""The controllers of MPS daemons and MIG instances, by which containers get devices."""
