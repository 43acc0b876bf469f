"""A stand-in for Volcano's scheduler."""
