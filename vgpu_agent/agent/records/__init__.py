"""The kubelet's records, and all that follows from them:
the ledger's verification, pods that end, files of grants.
"""
