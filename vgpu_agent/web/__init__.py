"""HTTP: metrics, probes, the overview page and debug JSON.
The only package that imports aiohttp and prometheus_client.
"""
