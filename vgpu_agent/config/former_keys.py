"""Keys of earlier versions, and what became of each.

A node that is upgraded has its configuration from before. It must start, so `reading` warns of such
a key and goes on without it.
"""

FORMER_KEYS = {
    "configReloadSeconds": "the agent looks for new content every 2 s",
    "hamiCore.lockDirectory": (
        "containers share no lock directory of the node; a library that wants one gets its own in "
        "each container"
    ),
    "shutdownSeconds": "an orderly stop takes at most 10 s, and answers under way 10 s more",
    "tasks.backoffMaxSeconds": "a failed loop is started again after at most 30 s",
    "tasks.backoffMinSeconds": "a failed loop is started again after 0.5 s at first",
    "tasks.stuckSeconds": "a loop is stuck after 30 s without the sign of life that it promised",
    "web.maxBodyBytes": "a request body has at most 65536 bytes",
    "web.requestTimeoutSeconds": "a request is answered with an error after 10 s",
}
