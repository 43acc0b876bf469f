"""From the kubelet's calls to the edits: the owner of the ids, and what its container gets."""
