"""HTTP: metrics, probes, the overview page and debug JSON, by aiohttp and prometheus_client."""
