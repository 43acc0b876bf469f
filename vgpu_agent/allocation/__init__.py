"""From kubelet's calls to the edits: whose ids are these, and what does their container get?"""
