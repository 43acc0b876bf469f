"""The status of every part, collected for `web`."""
