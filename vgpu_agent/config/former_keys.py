"""Configuration keys of earlier versions that are not settings any more.

An upgraded node still has its old configuration, and the agent must start with it. So the module
`reading`, which reads the configuration file, ignores such a key and warns; the warning says what
the agent does now. Each family declares its own.
"""

from vgpu_agent.config import families

FORMER_KEYS = {
    "binding.allocateWaitSeconds": "Allocate waits 0.8 s for a pod that is not known yet",
    "binding.podWaitSeconds": "a start waits 2 s for a pod that is not known yet",
    "binding.refusedEventSeconds": "the pod gets an event after 30 s of refusals",
    "binding.startSeconds": "finding the pod of one start may take 20 s",
    "cdi.generateTimeoutSeconds": "the program that makes the CDI spec may take 30 s",
    "cluster.backoffMaxSeconds": (
        "failed requests and watches are tried again after at most 30 s, refused ones after 300 s"
    ),
    "cluster.backoffMinSeconds": (
        "failed requests and watches are tried again after at most 0.8 s at first"
    ),
    "cluster.connectTimeoutSeconds": "a connection to the API server may take 5 s",
    # handshake: an annotation of the Node by which schedulers ask whether the plugin is alive
    "cluster.handshakeMinSeconds": "handshakes of old schedulers are answered every 15 s at most",
    "cluster.requestTimeoutSeconds": "a request to the API server may take 15 s",
    "cluster.startWaitSeconds": "the start waits 5 s for the first list of Node and pods",
    "cluster.startsFirstSeconds": (
        "annotations that only show a pod's progress wait 10 s at most for pods being started"
    ),
    "cluster.watchSeconds": "a watch is asked to last 240 s to 480 s",
    "cluster.watchSilenceSeconds": "a watch is broken off after its time and 60 s of silence",
    "configReloadSeconds": "the configuration file is checked for changes every 2 s",
    "gpu.callTimeoutSeconds": "an NVML call that takes longer than 5 s is reported as hung",
    "gpu.eventWaitMilliseconds": "one call waits at most 0.5 s for NVML events",
    "gpu.hungUnhealthySeconds": "a GPU whose NVML call hangs for longer than 15 s is Unhealthy",
    "gpu.initRetrySeconds": "a missing driver is looked for every 30 s",
    "gpu.pollSeconds": "the state of every GPU is read every 5 s, besides its events",
    "gpu.recovery.flapWindowSeconds": (
        "a GPU that fails again within 3600 s must be quiet for twice as long as before"
    ),
    "gpu.recovery.maxQuietSeconds": "flapping leads to a quiet time of 3600 s at most",
    "gpu.sysfsRoot": "sysfs is read at /sys, where every container has the node's",
    "hamiCore.lockDirectory": (
        "containers share no lock directory of the node; a library that wants one gets its own in "
        "each container"
    ),
    "kubelet.coalesceSeconds": "changes within 0.1 s become one device list",
    "kubelet.drainSeconds": "a stop waits 3 s for calls in flight",
    "kubelet.messageBudgetBytes": (
        "a device list has at most 3670016 bytes, because the kubelet refuses 4 MiB"
    ),
    "kubelet.podResourcesTimeoutSeconds": "a call to the pod-resources socket may take 5 s",
    "kubelet.registerTimeoutSeconds": "a Register call may take 15 s",
    "kubelet.reservationSeconds": "ids that the kubelet does not confirm stay booked for 60 s",
    "kubelet.retryMaxSeconds": "the agent waits at most 30 s between registrations",
    "kubelet.retryMinSeconds": "the agent waits 0.2 s after the first registration that failed",
    "kubelet.socketPollSeconds": (
        "kubelet.sock is checked every 5 s, besides the inotify events of its directory"
    ),
    "kubelet.streamOpenTimeoutSeconds": "the kubelet has 5 s to open ListAndWatch",
    "kubelet.verifySeconds": "the kubelet's records are read every 30 s",
    "mps.backoffMaxSeconds": "an MPS control daemon is started again after at most 30 s",
    "mps.backoffMinSeconds": "an MPS control daemon is started again after 1 s at first",
    "mps.commandTimeoutSeconds": "a command of the control daemon or of nvidia-smi may take 10 s",
    "mps.containerRoot": (
        "the directory of MPS is /mps in the agent's container and in those of its clients"
    ),
    "mps.controlBinary": "nvidia-cuda-mps-control is looked for in the agent's PATH",
    "mps.probeSeconds": "each MPS control daemon is checked every 5 s",
    "mps.smiBinary": "nvidia-smi is looked for in the agent's PATH",
    "shutdownSeconds": "an orderly stop takes at most 10 s, and open HTTP requests get 10 s more",
    "tasks.backoffMaxSeconds": "a failed loop is started again after at most 30 s",
    "tasks.backoffMinSeconds": "a failed loop is started again after 0.5 s at first",
    "tasks.stuckSeconds": "a loop counts as stuck after 30 s without a heartbeat",
    "web.maxBodyBytes": "a request body has at most 65536 bytes",
    "web.requestTimeoutSeconds": "a request is answered with an error after 10 s",
}


def former_keys() -> dict[str, str]:
    """Return every key of an earlier version, with what the agent does now."""
    return FORMER_KEYS | {
        key: instead for family in families.DECLARED for key, instead in family.former_keys.items()
    }
