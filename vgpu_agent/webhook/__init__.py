"""The admission webhook: a process of its own that completes and checks the pods that users create,
for families whose pods a scheduler places.
"""
