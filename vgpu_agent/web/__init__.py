"""HTTP: metrics, probes, the overview page and debug JSON, with aiohttp and prometheus_client."""
