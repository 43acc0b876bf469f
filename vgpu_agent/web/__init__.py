"""HTTP: metrics, probes, the overview page and debug JSON. The only room that imports aiohttp and prometheus_client."""
