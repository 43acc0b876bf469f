/* What every NVML entry point of the simulator shares: the mapped node, handles, faults, tracing.
 *
 * An entry point reads: ENTER (or ENTER_LOOKUP) with its handle and a check of its arguments, its
 * answer, LEAVE.
 */
#ifndef VGPU_AGENT_SIM_CORE_H
#define VGPU_AGENT_SIM_CORE_H

#include "state.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NVML_API __attribute__((visibility("default")))

typedef int nvmlReturn_t;

enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

/* What a handle stands for; an entry point names the kinds it takes. */
enum {
    NO_HANDLE = 0,
    GPU = 1,
    MIG = 2,
    GPU_INSTANCE = 4,
    COMPUTE_INSTANCE = 8,
    ANY_DEVICE = GPU | MIG,
};

/* Handles point at memory of ours that outlives nvmlShutdown, because clients keep them. */
struct sim_handle {
    uint32_t magic;
    uint32_t kind;
    uint32_t gpu;
    uint32_t mig; /* slot within the GPU; meaningless for kind GPU */
};

/* One call on its way through an entry point. */
struct sim_call {
    const char *function;
    uint32_t gpu; /* SIM_NONE while unknown */
    struct sim_node *node;
    struct sim_gpu *device;
    struct sim_mig_device *mig; /* NULL unless the handle is of a MIG device or instance */
};

nvmlReturn_t sim_begin(struct sim_call *call, const char *function, const void *handle,
                       uint32_t kinds, bool arguments_ok);
nvmlReturn_t sim_begin_lookup(struct sim_call *call, const char *function, bool arguments_ok);
nvmlReturn_t sim_found(struct sim_call *call, uint32_t gpu, struct sim_handle *handle, void **out);
nvmlReturn_t sim_end(const struct sim_call *call, nvmlReturn_t result);

/* Starts a call: refuses before nvmlInit, wrong handles and arguments, faults, lost GPUs. */
#define ENTER(handle, kinds, arguments_ok)                                                    \
    struct sim_call call;                                                                     \
    do {                                                                                      \
        nvmlReturn_t refused = sim_begin(&call, __func__, (handle), (kinds), (arguments_ok)); \
        if (refused != NVML_SUCCESS) return sim_end(&call, refused);                          \
    } while (0)

/* Starts a call that finds a device: faults and loss are decided by sim_found, once it is known
 * which GPU is meant. */
#define ENTER_LOOKUP(arguments_ok)                                                \
    struct sim_call call;                                                         \
    do {                                                                          \
        nvmlReturn_t refused = sim_begin_lookup(&call, __func__, (arguments_ok)); \
        if (refused != NVML_SUCCESS) return sim_end(&call, refused);              \
    } while (0)

#define LEAVE(result) return sim_end(&call, (result))

/* An entry point that answers with one number, or with NVML_ERROR_NOT_SUPPORTED where `supported`
 * is false. */
#define NUMBER(name, kinds, type, supported, expression)   \
    NVML_API nvmlReturn_t name(void *handle, type *value)  \
    {                                                      \
        ENTER(handle, kinds, value != NULL);               \
        if (!(supported)) LEAVE(NVML_ERROR_NOT_SUPPORTED); \
        *value = (type)(expression);                       \
        LEAVE(NVML_SUCCESS);                               \
    }

/* The client's view: which GPUs this initialisation found, in NVML's order. */
uint32_t sim_visible_count(void);
uint32_t sim_visible_gpu(uint32_t index);
uint32_t sim_index_of(uint32_t gpu);

struct sim_handle *sim_gpu_handle(uint32_t gpu);
struct sim_handle *sim_mig_handle(uint32_t gpu, uint32_t mig);
struct sim_handle *sim_gpu_instance_handle(uint32_t gpu, uint32_t mig);
struct sim_handle *sim_compute_instance_handle(uint32_t gpu, uint32_t mig);
/* The GPU behind a device handle, or SIM_NONE when the pointer is no handle of ours. */
uint32_t sim_gpu_of(const void *handle);

bool sim_initialized(void);
int sim_descriptor(void);

nvmlReturn_t sim_copy_string(char *to, uint32_t size, const char *from);
uint64_t sim_monotonic_ns(void);
uint64_t sim_realtime_us(void);
void sim_sleep_ns(uint64_t nanoseconds);

/* Sizes that NVML writes into the `version` member: the struct's size and its version in the top
 * byte. */
#define STRUCT_VERSION(type, number) ((uint32_t)(sizeof(type) | ((uint32_t)(number) << 24)))

#endif
