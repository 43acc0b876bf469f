"""The way from the kubelet's calls to edits: the owner of the ids, and what its container gets."""
