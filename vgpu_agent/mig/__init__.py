"""Dividing GPUs into MIG instances: the host tool ``nvidia-mig-parted`` behind one adapter."""
