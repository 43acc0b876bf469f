"""The API server: what is watched there, what is written there, and how it is reached. Wired by `agent`; knows no other adapter."""
