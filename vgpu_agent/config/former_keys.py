"""Keys of earlier versions, and what became of each.

A node that is upgraded has its configuration from before. It must start, so `reading` warns of such
a key and goes on without it.
"""

FORMER_KEYS = {
    "binding.allocateWaitSeconds": "an early Allocate waits 0.8 s for a pod that is not seen yet",
    "binding.podWaitSeconds": "a start waits 2 s for a pod that is not seen yet",
    "binding.refusedEventSeconds": "the pod gets an event after 30 s of refusals",
    "binding.startSeconds": "the proof of one start may take 20 s",
    "cdi.generateTimeoutSeconds": "the program that makes the spec may take 30 s",
    "cluster.backoffMaxSeconds": "failed requests and watches are tried again after at most 30 s",
    "cluster.backoffMinSeconds": "failed requests and watches are tried again after 0.8 s at first",
    "cluster.connectTimeoutSeconds": "a connection to the API server may take 5 s",
    "cluster.handshakeMinSeconds": "the handshake of old schedulers is answered every 15 s at most",
    "cluster.requestTimeoutSeconds": "a request to the API server may take 15 s",
    "cluster.startWaitSeconds": "the start waits 5 s for the first list of Node and pods",
    "cluster.watchSeconds": "a watch is asked to last 240 s to twice as long",
    "cluster.watchSilenceSeconds": "a watch may be silent for 60 s beyond its time",
    "configReloadSeconds": "the agent looks for new content every 2 s",
    "gpu.callTimeoutSeconds": "an NVML call that takes longer than 5 s is reported as hung",
    "gpu.eventWaitMilliseconds": "NVML events are waited for 0.5 s at a time",
    "gpu.hungUnhealthySeconds": "a GPU whose NVML call hangs for longer than 15 s is Unhealthy",
    "gpu.initRetrySeconds": "a driver that is missing is looked for every 30 s",
    "gpu.pollSeconds": "every GPU is asked for its state every 5 s, besides its events",
    "hamiCore.lockDirectory": (
        "containers share no lock directory of the node; a library that wants one gets its own in "
        "each container"
    ),
    "kubelet.coalesceSeconds": "changes within 0.1 s become one device list",
    "kubelet.drainSeconds": "a stop waits 3 s for calls in flight",
    "kubelet.podResourcesTimeoutSeconds": "a call to the pod-resources socket may take 5 s",
    "kubelet.registerTimeoutSeconds": "a Register call may take 15 s",
    "kubelet.reservationSeconds": "ids that the kubelet does not confirm stay booked for 60 s",
    "kubelet.retryMaxSeconds": "the agent waits at most 30 s between registrations",
    "kubelet.retryMinSeconds": "the agent waits 0.2 s after the first registration that failed",
    "kubelet.socketPollSeconds": (
        "the agent looks at kubelet.sock every 5 s, besides what the kernel tells it"
    ),
    "kubelet.streamOpenTimeoutSeconds": "the kubelet has 5 s to open ListAndWatch",
    "kubelet.verifySeconds": "the kubelet's records are read every 30 s",
    "mps.backoffMaxSeconds": "an MPS control daemon is started again after at most 30 s",
    "mps.backoffMinSeconds": "an MPS control daemon is started again after 1 s at first",
    "mps.commandTimeoutSeconds": "a command of the control daemon or of nvidia-smi may take 10 s",
    "mps.probeSeconds": "each control daemon is asked every 5 s whether it lives",
    "shutdownSeconds": "an orderly stop takes at most 10 s, and answers under way 10 s more",
    "tasks.backoffMaxSeconds": "a failed loop is started again after at most 30 s",
    "tasks.backoffMinSeconds": "a failed loop is started again after 0.5 s at first",
    "tasks.stuckSeconds": "a loop is stuck after 30 s without the heartbeat that it promised",
    "web.maxBodyBytes": "a request body has at most 65536 bytes",
    "web.requestTimeoutSeconds": "a request is answered with an error after 10 s",
}
