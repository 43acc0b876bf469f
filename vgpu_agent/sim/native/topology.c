/* Where a GPU sits: CPUs and memory next to it, other GPUs around it, NVLinks, fabric. */
#include "core.h"
#include "pci.h"

#include <string.h>

/* ---- NUMA ---- */

static void copy_cpus(const struct sim_gpu *device, unsigned words, unsigned long *set)
{
    for (unsigned word = 0; word < words; word++)
        set[word] = word < SIM_CPU_WORDS ? device->cpus[word] : 0;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *set)
{
    ENTER(handle, ANY_DEVICE, set != NULL && words > 0);
    copy_cpus(call.device, words, set);
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(void *handle, unsigned words,
                                                          unsigned long *set, unsigned scope)
{
    ENTER(handle, ANY_DEVICE, set != NULL && words > 0 && scope < 2);
    copy_cpus(call.device, words, set);
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(void *handle, unsigned words, unsigned long *set,
                                                  unsigned scope)
{
    ENTER(handle, ANY_DEVICE, set != NULL && words > 0 && scope < 2);
    uint32_t numa = call.device->numa_node;
    if (numa == SIM_NONE) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    memset(set, 0, words * sizeof *set);
    if (numa / 64 < words) set[numa / 64] = 1ul << (numa % 64);
    LEAVE(NVML_SUCCESS);
}

/* Only boards that share memory with the CPU coherently (Grace) answer; the NUMA node of a PCIe or
 * SXM card is in sysfs. */
NUMBER(nvmlDeviceGetNumaNodeId, GPU, unsigned, false, 0)

NVML_API nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned cpu, unsigned *count, void **handles)
{
    ENTER(NULL, NO_HANDLE, count != NULL);
    unsigned found = 0;
    for (uint32_t index = 0; index < sim_visible_count(); index++) {
        uint32_t gpu = sim_visible_gpu(index);
        if (cpu >= SIM_CPU_WORDS * 64 ||
            (call.node->gpus[gpu].cpus[cpu / 64] >> (cpu % 64) & 1) == 0)
            continue;
        if (handles != NULL && found < *count) handles[found] = sim_gpu_handle(gpu);
        found++;
    }
    *count = found;
    LEAVE(NVML_SUCCESS);
}

/* ---- distance between GPUs ---- */

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other,
                                                          unsigned *level)
{
    ENTER(handle, GPU, level != NULL && sim_gpu_of(other) != SIM_NONE);
    *level = call.node->common_ancestor[call.gpu][sim_gpu_of(other)];
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(void *handle, unsigned level,
                                                       unsigned *count, void **handles)
{
    ENTER(handle, GPU, count != NULL);
    unsigned found = 0;
    for (uint32_t index = 0; index < sim_visible_count(); index++) {
        uint32_t gpu = sim_visible_gpu(index);
        if (gpu == call.gpu || call.node->common_ancestor[call.gpu][gpu] != level) continue;
        if (handles != NULL && found < *count) handles[found] = sim_gpu_handle(gpu);
        found++;
    }
    *count = found;
    LEAVE(NVML_SUCCESS);
}

enum { LINK_TO_GPU = 0, LINK_TO_SWITCH = 2, P2P_NVLINK = 2, P2P_LAST_INDEX = 5, LEVEL_NODE = 40 };
enum { P2P_OK = 0, P2P_CHIPSET_NOT_SUPPORTED = 1, P2P_NOT_SUPPORTED = 5 };

static bool linked(const struct sim_gpu *from, const struct sim_gpu *to)
{
    for (uint32_t link = 0; link < from->link_count; link++) {
        const struct sim_link *known = &from->links[link];
        if (!known->up) continue;
        if (known->remote_type == LINK_TO_SWITCH && to->link_count > 0 && to->links[0].up)
            return true;
        if (known->remote_type == LINK_TO_GPU && known->remote_domain == to->domain &&
            known->remote_bus == to->bus)
            return true;
    }
    return false;
}

/* Over NVLink always, over PCIe within one NUMA node, never with a GPU that is cut into MIG
 * instances. */
NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(void *handle, void *other, unsigned index,
                                             unsigned *status)
{
    ENTER(handle, GPU, status != NULL && sim_gpu_of(other) != SIM_NONE && index <= P2P_LAST_INDEX);
    const struct sim_gpu *peer = &call.node->gpus[sim_gpu_of(other)];
    bool joined = linked(call.device, peer);
    if (call.device->mig_current || peer->mig_current) {
        *status = P2P_NOT_SUPPORTED;
    } else if (index == P2P_NVLINK) {
        *status = joined ? P2P_OK : P2P_NOT_SUPPORTED;
    } else {
        bool near = call.node->common_ancestor[call.gpu][sim_gpu_of(other)] <= LEVEL_NODE;
        *status = joined || near ? P2P_OK : P2P_CHIPSET_NOT_SUPPORTED;
    }
    LEAVE(NVML_SUCCESS);
}

/* ---- NVLink: a link that the GPU does not have is an argument error beyond NVML's maximum ---- */

enum { NVML_NVLINK_MAX_LINKS = 36 };

#define LINK_NUMBER(name, expression)                                         \
    NVML_API nvmlReturn_t name(void *handle, unsigned link, unsigned *value)  \
    {                                                                         \
        ENTER(handle, GPU, value != NULL && link < NVML_NVLINK_MAX_LINKS);    \
        if (link >= call.device->link_count) LEAVE(NVML_ERROR_NOT_SUPPORTED); \
        const struct sim_link *known = &call.device->links[link];             \
        *value = (expression);                                                \
        LEAVE(NVML_SUCCESS);                                                  \
    }

LINK_NUMBER(nvmlDeviceGetNvLinkState, known->up)
LINK_NUMBER(nvmlDeviceGetNvLinkVersion, known->version)
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, known->remote_type)

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(void *handle, unsigned link,
                                                    unsigned capability, unsigned *value)
{
    ENTER(handle, GPU, value != NULL && link < NVML_NVLINK_MAX_LINKS && capability < 6);
    if (link >= call.device->link_count) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *value = call.device->links[link].capabilities >> capability & 1;
    LEAVE(NVML_SUCCESS);
}

static nvmlReturn_t remote_pci_info(const char *function, void *handle, unsigned link,
                                    struct sim_pci_info *info)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, GPU,
                                     info != NULL && link < NVML_NVLINK_MAX_LINKS);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    const struct sim_link *known = &call.device->links[link < SIM_LINKS ? link : 0];
    if (link >= call.device->link_count || !known->up)
        return sim_end(&call, NVML_ERROR_NOT_SUPPORTED);
    *info = sim_pci_info(known->remote_domain, known->remote_bus, known->remote_device,
                         known->remote_pci_device_id, 0);
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(void *handle, unsigned link,
                                                       struct sim_pci_info *info)
{
    return remote_pci_info(__func__, handle, link, info);
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link,
                                                          struct sim_pci_info *info)
{
    return remote_pci_info(__func__, handle, link, info);
}

/* ---- fabric: GPUs of Hopper and later behind NVSwitches register with a fabric manager ---- */

struct fabric_info {
    unsigned char cluster_uuid[16];
    nvmlReturn_t status;
    uint32_t clique;
    unsigned char state;
};

struct fabric_info_v3 {
    unsigned version;
    unsigned char cluster_uuid[16];
    nvmlReturn_t status;
    uint32_t clique;
    unsigned char state;
    uint32_t health_mask;
    unsigned char health_summary; /* since version 3 */
};

enum { FABRIC_HEALTHY = 1 };

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(void *handle, struct fabric_info *info)
{
    ENTER(handle, GPU, info != NULL);
    if (call.device->fabric_state == 0) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    memcpy(info->cluster_uuid, call.device->fabric_uuid, sizeof info->cluster_uuid);
    info->status = (nvmlReturn_t)call.device->fabric_status;
    info->clique = call.device->fabric_clique;
    info->state = (unsigned char)call.device->fabric_state;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_info_v3 *info)
{
    ENTER(handle, GPU, info != NULL);
    unsigned version = info->version >> 24;
    if (version != 2 && version != 3) LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (call.device->fabric_state == 0) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    memcpy(info->cluster_uuid, call.device->fabric_uuid, sizeof info->cluster_uuid);
    info->status = (nvmlReturn_t)call.device->fabric_status;
    info->clique = call.device->fabric_clique;
    info->state = (unsigned char)call.device->fabric_state;
    info->health_mask = call.device->fabric_health_mask;
    if (version == 3) info->health_summary = FABRIC_HEALTHY;
    LEAVE(NVML_SUCCESS);
}
