"""Volcano's GPU share: `volcano.sh/gpu-memory` or `volcano.sh/gpu-number`."""
