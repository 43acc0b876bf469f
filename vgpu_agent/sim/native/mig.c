/* MIG: which instances a GPU is cut into, and into which it could be. Instances are set in the
 * state file, not through NVML. */
#include "core.h"

#include <stdio.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER(handle, GPU, current != NULL && pending != NULL);
    if (!call.device->mig_capable) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *current = call.device->mig_current;
    *pending = call.device->mig_pending;
    LEAVE(NVML_SUCCESS);
}

enum { MAXIMUM_INSTANCES = 7 };

NUMBER(nvmlDeviceGetMaxMigDeviceCount, GPU, unsigned, true,
       call.device->mig_capable ? MAXIMUM_INSTANCES : 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, ANY_DEVICE, unsigned, true, call.mig != NULL)
NUMBER(nvmlDeviceGetGpuInstanceId, MIG, unsigned, true, call.mig->gpu_instance)
NUMBER(nvmlDeviceGetComputeInstanceId, MIG, unsigned, true, call.mig->compute_instance)

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig)
{
    ENTER(handle, GPU, mig != NULL);
    if (!call.device->mig_capable) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    if (index >= MAXIMUM_INSTANCES) LEAVE(NVML_ERROR_INVALID_ARGUMENT);
    if (!call.device->mig_current || !call.device->mig_devices[index].used)
        LEAVE(NVML_ERROR_NOT_FOUND);
    *mig = sim_mig_handle(call.gpu, index);
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig, void **handle)
{
    ENTER(mig, MIG, handle != NULL);
    *handle = sim_gpu_handle(call.gpu);
    LEAVE(NVML_SUCCESS);
}

struct attributes {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_instance_slices,
        compute_instance_slices;
    unsigned long long memory_mib;
};

static nvmlReturn_t attributes_of(const char *function, void *handle, struct attributes *attributes)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, MIG, attributes != NULL);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    const struct sim_mig_device *mig = call.mig;
    *attributes = (struct attributes){
        .multiprocessors = mig->multiprocessors,
        .copy_engines = mig->copy_engines,
        .decoders = mig->decoders,
        .encoders = mig->encoders,
        .jpegs = mig->jpegs,
        .ofas = mig->ofas,
        .gpu_instance_slices = mig->gpu_instance_slices,
        .compute_instance_slices = mig->compute_instance_slices,
        .memory_mib = mig->memory_mib,
    };
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes(void *handle, struct attributes *out)
{
    return attributes_of(__func__, handle, out);
}
NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out)
{
    return attributes_of(__func__, handle, out);
}

/* ---- instances ---- */

struct placement {
    unsigned start, size;
};

struct gpu_instance_info {
    void *device;
    unsigned id, profile;
    struct placement placement;
};

struct compute_instance_info {
    void *device, *gpu_instance;
    unsigned id, profile;
    struct placement placement;
};

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(void *handle, unsigned id, void **instance)
{
    ENTER(handle, GPU, instance != NULL);
    for (uint32_t mig = 0; mig < SIM_MIG_DEVICES; mig++) {
        if (!call.device->mig_devices[mig].used || call.device->mig_devices[mig].gpu_instance != id)
            continue;
        *instance = sim_gpu_instance_handle(call.gpu, mig);
        LEAVE(NVML_SUCCESS);
    }
    LEAVE(NVML_ERROR_NOT_FOUND);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(void *handle, unsigned profile, void **instances,
                                                unsigned *count)
{
    ENTER(handle, GPU, instances != NULL && count != NULL);
    *count = 0;
    for (uint32_t mig = 0; mig < SIM_MIG_DEVICES; mig++) {
        const struct sim_mig_device *device = &call.device->mig_devices[mig];
        if (device->used && device->gpu_instance_profile == profile)
            instances[(*count)++] = sim_gpu_instance_handle(call.gpu, mig);
    }
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(void *instance, struct gpu_instance_info *info)
{
    ENTER(instance, GPU_INSTANCE, info != NULL);
    *info = (struct gpu_instance_info){
        .device = sim_gpu_handle(call.gpu),
        .id = call.mig->gpu_instance,
        .profile = call.mig->gpu_instance_profile,
        .placement = {call.mig->placement_start, call.mig->placement_size},
    };
    LEAVE(NVML_SUCCESS);
}

/* Each GPU instance here holds one compute instance, in the same slot. */
static uint32_t slot_of(const struct sim_call *call)
{
    return (uint32_t)(call->mig - call->device->mig_devices);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(void *instance, unsigned id,
                                                            void **compute_instance)
{
    ENTER(instance, GPU_INSTANCE, compute_instance != NULL);
    if (call.mig->compute_instance != id) LEAVE(NVML_ERROR_NOT_FOUND);
    *compute_instance = sim_compute_instance_handle(call.gpu, slot_of(&call));
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(void *instance, unsigned profile,
                                                         void **instances, unsigned *count)
{
    ENTER(instance, GPU_INSTANCE, instances != NULL && count != NULL);
    *count = 0;
    if (call.mig->compute_instance_profile == profile) {
        instances[0] = sim_compute_instance_handle(call.gpu, slot_of(&call));
        *count = 1;
    }
    LEAVE(NVML_SUCCESS);
}

static nvmlReturn_t compute_instance_info(const char *function, void *instance,
                                          struct compute_instance_info *info)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, instance, COMPUTE_INSTANCE, info != NULL);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    *info = (struct compute_instance_info){
        .device = sim_gpu_handle(call.gpu),
        .gpu_instance = sim_gpu_instance_handle(call.gpu, slot_of(&call)),
        .id = call.mig->compute_instance,
        .profile = call.mig->compute_instance_profile,
        .placement = {0, call.mig->compute_instance_slices},
    };
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo(void *instance, struct compute_instance_info *info)
{
    return compute_instance_info(__func__, instance, info);
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(void *instance,
                                                    struct compute_instance_info *info)
{
    return compute_instance_info(__func__, instance, info);
}

/* ---- profiles ---- */

struct profile_info {
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs,
        ofas;
    unsigned long long memory_mib;
};

struct profile_info_v2 {
    unsigned version, id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders,
        jpegs, ofas;
    unsigned long long memory_mib;
    char name[96];
};

enum { GPU_INSTANCE_PROFILES = 18 };

static const struct sim_mig_profile *profile_of(const struct sim_call *call, unsigned profile)
{
    if (!call->device->mig_capable || profile >= SIM_PROFILES) return NULL;
    const struct sim_mig_profile *known = &call->device->profiles[profile];
    return known->valid ? known : NULL;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(void *handle, unsigned profile,
                                                          struct profile_info *info)
{
    ENTER(handle, GPU, info != NULL && profile < GPU_INSTANCE_PROFILES);
    const struct sim_mig_profile *known = profile_of(&call, profile);
    if (known == NULL) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *info = (struct profile_info){
        .id = known->id,
        .slices = known->slices,
        .instances = known->instances,
        .multiprocessors = known->multiprocessors,
        .copy_engines = known->copy_engines,
        .decoders = known->decoders,
        .encoders = known->encoders,
        .jpegs = known->jpegs,
        .ofas = known->ofas,
        .memory_mib = known->memory_mib,
    };
    LEAVE(NVML_SUCCESS);
}

/* Version 3 replaces isP2pSupported by capability bits (0 here) and keeps the layout. */
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(void *handle, unsigned profile,
                                                           struct profile_info_v2 *info)
{
    ENTER(handle, GPU, info != NULL && profile < GPU_INSTANCE_PROFILES);
    unsigned version = info->version;
    if (version != STRUCT_VERSION(struct profile_info_v2, 2) &&
        version != STRUCT_VERSION(struct profile_info_v2, 3)) {
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    }
    const struct sim_mig_profile *known = profile_of(&call, profile);
    if (known == NULL) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *info = (struct profile_info_v2){
        .version = version,
        .id = known->id,
        .slices = known->slices,
        .instances = known->instances,
        .multiprocessors = known->multiprocessors,
        .copy_engines = known->copy_engines,
        .decoders = known->decoders,
        .encoders = known->encoders,
        .jpegs = known->jpegs,
        .ofas = known->ofas,
        .memory_mib = known->memory_mib,
    };
    snprintf(info->name, sizeof info->name, "MIG %.80s", known->name);
    LEAVE(NVML_SUCCESS);
}

static nvmlReturn_t possible_placements(const char *function, void *handle, unsigned id,
                                        struct placement *placements, unsigned *count)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, GPU, count != NULL);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    for (uint32_t profile = 0; profile < SIM_PROFILES; profile++) {
        const struct sim_mig_profile *known = profile_of(&call, profile);
        if (known == NULL || known->id != id) continue;
        unsigned room = placements != NULL ? *count : known->placement_count;
        *count = known->placement_count;
        if (*count > room) return sim_end(&call, NVML_ERROR_INSUFFICIENT_SIZE);
        for (unsigned i = 0; placements != NULL && i < *count; i++) {
            placements[i] = (struct placement){known->placement_start[i], known->placement_size};
        }
        return sim_end(&call, NVML_SUCCESS);
    }
    return sim_end(&call, NVML_ERROR_NOT_SUPPORTED);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(
    void *handle, unsigned id, struct placement *out, unsigned *count)
{
    return possible_placements(__func__, handle, id, out, count);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    void *handle, unsigned id, struct placement *out, unsigned *count)
{
    return possible_placements(__func__, handle, id, out, count);
}

/* ---- compute instance profiles ---- */

struct compute_profile_info {
    unsigned id, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, ofas;
};

struct compute_profile_info_v2 {
    unsigned version;
    struct compute_profile_info profile;
    char name[96];
};

enum { COMPUTE_INSTANCE_PROFILES = 9 };

/* False when a GPU instance of this size cannot hold a compute instance of that profile. */
static bool compute_profile(const struct sim_mig_device *mig, unsigned profile,
                            struct compute_profile_info *info)
{
    static const uint32_t slices_of[COMPUTE_INSTANCE_PROFILES] = {1, 2, 3, 4, 7, 8, 6};
    uint32_t slices = slices_of[profile];
    if (slices == 0 || slices > mig->gpu_instance_slices) return false;
    *info = (struct compute_profile_info){
        .id = profile,
        .slices = slices,
        .instances = mig->gpu_instance_slices / slices,
        .multiprocessors = slices * (mig->multiprocessors / mig->compute_instance_slices),
        .copy_engines = mig->copy_engines,
        .decoders = mig->decoders,
        .encoders = mig->encoders,
        .jpegs = mig->jpegs,
        .ofas = mig->ofas,
    };
    return true;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(
    void *instance, unsigned profile, unsigned engine, struct compute_profile_info *info)
{
    ENTER(instance, GPU_INSTANCE,
          info != NULL && profile < COMPUTE_INSTANCE_PROFILES && engine == 0);
    LEAVE(compute_profile(call.mig, profile, info) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(
    void *instance, unsigned profile, unsigned engine, struct compute_profile_info_v2 *info)
{
    ENTER(instance, GPU_INSTANCE,
          info != NULL && profile < COMPUTE_INSTANCE_PROFILES && engine == 0);
    if (info->version != STRUCT_VERSION(struct compute_profile_info_v2, 2))
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (!compute_profile(call.mig, profile, &info->profile)) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    const char *whole = strstr(call.mig->name, "MIG ");
    snprintf(info->name, sizeof info->name, "%s", whole != NULL ? whole : call.mig->name);
    LEAVE(NVML_SUCCESS);
}
