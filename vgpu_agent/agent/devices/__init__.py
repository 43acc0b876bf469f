"""The controllers of MPS daemons, of MIG divisions, and of services for libraries in containers."""
