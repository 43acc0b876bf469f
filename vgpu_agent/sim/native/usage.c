/* Who uses a GPU and how much: memory, running processes, utilisation.
 *
 * A live process holds a slot and a POSIX lock on one byte of the state file. Asking F_GETLK who is
 * in the way makes the kernel name the holder in the asker's own pid namespace (0 when it is not
 * visible there), and the lock dies with its process. So pids come translated as a real driver
 * translates them, and a killed process leaves no ghost.
 */
#define _GNU_SOURCE
#include "usage.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- slots ---- */

static uint64_t own_pid_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? (uint64_t)status.st_ino : 0;
}

enum { SLOT_EMPTY = -1, SLOT_NOT_VISIBLE = 0 };

/* The slot's pid as this process sees it, SLOT_NOT_VISIBLE for one in another namespace, SLOT_EMPTY
 * for a free or dead one. */
static int slot_pid(const struct sim_call *call, int slot)
{
    const struct sim_process *process = &call->device->processes[slot];
    if (process->kind == SIM_PROCESS_FIXED) return (int)process->pid;
    if (process->kind != SIM_PROCESS_LIVE) return SLOT_EMPTY;
    struct flock lock = {
        .l_type = F_WRLCK,
        .l_whence = SEEK_SET,
        .l_start = SIM_LOCK_BASE + (off_t)call->gpu * SIM_PROCESSES + slot,
        .l_len = 1,
    };
    if (fcntl(sim_descriptor(), F_GETLK, &lock) != 0) return SLOT_EMPTY;
    if (lock.l_type != F_UNLCK) return lock.l_pid;
    /* A process's own locks are never in its way: then the slot is ours, or its holder is dead. */
    bool ours = process->pid == (uint32_t)getpid() && process->pid_namespace == own_pid_namespace();
    return ours ? (int)process->pid : SLOT_EMPTY;
}

static bool belongs(const struct sim_call *call, const struct sim_process *process)
{
    return call->mig == NULL ||
           (process->gpu_instance == call->mig->gpu_instance &&
            process->compute_instance == call->mig->compute_instance);
}

/* ---- memory ---- */

struct memory {
    uint64_t total, reserved, used;
};

static struct memory memory_of(const struct sim_call *call)
{
    struct memory memory = {
        .total = call->mig != NULL ? call->mig->memory_mib << 20 : call->device->memory_total,
        .reserved = call->mig != NULL ? 0 : call->device->memory_reserved,
        .used = call->mig != NULL ? 0 : call->device->memory_unaccounted,
    };
    for (int slot = 0; slot < SIM_PROCESSES; slot++) {
        const struct sim_process *process = &call->device->processes[slot];
        /* A process in another namespace is not listed, but its memory is gone all the same. */
        if (belongs(call, process) && slot_pid(call, slot) != SLOT_EMPTY)
            memory.used += process->memory_bytes;
    }
    if (memory.used + memory.reserved > memory.total) memory.used = memory.total - memory.reserved;
    return memory;
}

struct memory_v1 {
    unsigned long long total, free, used;
};

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

/* Version 1 counts what the driver reserves as used, which is why an idle GPU shows hundreds of MiB
 * there. */
NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(void *handle, struct memory_v1 *info)
{
    ENTER(handle, ANY_DEVICE, info != NULL);
    struct memory memory = memory_of(&call);
    info->total = memory.total;
    info->used = memory.used + memory.reserved;
    info->free = memory.total - info->used;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *info)
{
    ENTER(handle, ANY_DEVICE, info != NULL);
    if (info->version != STRUCT_VERSION(struct memory_v2, 2))
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    struct memory memory = memory_of(&call);
    info->total = memory.total;
    info->reserved = memory.reserved;
    info->used = memory.used;
    info->free = memory.total - memory.reserved - memory.used;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(void *handle, struct memory_v1 *info)
{
    ENTER(handle, ANY_DEVICE, info != NULL);
    info->total = call.device->bar1_total;
    info->used = call.device->bar1_used;
    info->free = info->total - info->used;
    LEAVE(NVML_SUCCESS);
}

/* ---- running processes ---- */

struct process_v1 {
    unsigned pid;
    unsigned long long memory;
};

struct process_v2 {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

enum { COMPUTE = 0, GRAPHICS = 1, MPS = 2, EVERY_TYPE = 3 };

/* Fills `rows` up to `room` and returns how many there are. */
static unsigned visible_processes(const struct sim_call *call, uint32_t type,
                                  struct process_v2 *rows, unsigned room)
{
    unsigned found = 0;
    for (int slot = 0; slot < SIM_PROCESSES; slot++) {
        const struct sim_process *process = &call->device->processes[slot];
        if ((type != EVERY_TYPE && process->type != type) || !belongs(call, process)) continue;
        int pid = slot_pid(call, slot);
        if (pid <= SLOT_NOT_VISIBLE) continue;
        if (found < room) {
            rows[found] = (struct process_v2){(unsigned)pid, process->memory_bytes,
                                              process->gpu_instance, process->compute_instance};
        }
        found++;
    }
    return found;
}

static nvmlReturn_t list_processes(const char *function, void *handle, uint32_t type,
                                   unsigned *count, void *out, bool with_instances)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, ANY_DEVICE,
                                     count != NULL && (out != NULL || *count == 0));
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    struct process_v2 rows[SIM_PROCESSES];
    unsigned room = *count;
    unsigned found = visible_processes(&call, type, rows, SIM_PROCESSES);
    *count = found;
    if (found > room) return sim_end(&call, NVML_ERROR_INSUFFICIENT_SIZE);
    if (with_instances) {
        if (found > 0) memcpy(out, rows, found * sizeof rows[0]);
    } else {
        /* The unversioned call has 16-byte rows; writing the wider ones there garbles the caller's
         * list. */
        struct process_v1 *narrow = out;
        for (unsigned row = 0; row < found; row++)
            narrow[row] = (struct process_v1){rows[row].pid, rows[row].memory};
    }
    return sim_end(&call, NVML_SUCCESS);
}

#define PROCESS_LIST(name, type, with_instances)                                             \
    NVML_API nvmlReturn_t name(void *handle, unsigned *count, void *processes)               \
    {                                                                                        \
        return list_processes(__func__, handle, (type), count, processes, (with_instances)); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, COMPUTE, false)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, COMPUTE, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, COMPUTE, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, GRAPHICS, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, GRAPHICS, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, MPS, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, MPS, true)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, MPS, true)

struct process_detail {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
    unsigned long long protected_memory;
};

struct process_detail_list {
    unsigned version, mode, count;
    struct process_detail *rows;
};

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(void *handle,
                                                            struct process_detail_list *list)
{
    ENTER(handle, ANY_DEVICE, list != NULL && list->mode < EVERY_TYPE);
    if (list->version != STRUCT_VERSION(struct process_detail_list, 1))
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    struct process_v2 rows[SIM_PROCESSES];
    unsigned room = list->rows != NULL ? list->count : 0;
    unsigned found = visible_processes(&call, list->mode, rows, SIM_PROCESSES);
    list->count = found;
    if (found > room) LEAVE(NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned row = 0; row < found; row++) {
        list->rows[row] = (struct process_detail){rows[row].pid, rows[row].memory,
                                                  rows[row].gpu_instance,
                                                  rows[row].compute_instance, 0};
    }
    LEAVE(NVML_SUCCESS);
}

/* ---- utilisation ---- */

struct load {
    uint32_t sm, memory;
};

static struct load load_of(const struct sim_call *call)
{
    struct load load = {0, 0};
    for (int slot = 0; slot < SIM_PROCESSES; slot++) {
        const struct sim_process *process = &call->device->processes[slot];
        if (slot_pid(call, slot) == SLOT_EMPTY) continue;
        load.sm += process->sm_percent;
        load.memory += process->memory_percent;
    }
    if (call->device->utilisation != SIM_NONE) load.sm = call->device->utilisation;
    if (call->device->memory_utilisation != SIM_NONE)
        load.memory = call->device->memory_utilisation;
    if (load.sm > 100) load.sm = 100;
    if (load.memory > 100) load.memory = 100;
    return load;
}

uint32_t sim_utilisation(const struct sim_call *call) { return load_of(call).sm; }

struct utilisation {
    unsigned gpu, memory;
};

/* A GPU in MIG mode does not answer these. */
NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(void *handle, struct utilisation *rates)
{
    ENTER(handle, ANY_DEVICE, rates != NULL);
    if (call.mig != NULL || call.device->mig_current) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    struct load load = load_of(&call);
    *rates = (struct utilisation){load.sm, load.memory};
    LEAVE(NVML_SUCCESS);
}

enum { CODEC_SAMPLING_US = 167000 };

#define CODEC_UTILISATION(name, field)                                                 \
    NVML_API nvmlReturn_t name(void *handle, unsigned *percent, unsigned *sampling_us) \
    {                                                                                  \
        ENTER(handle, GPU, percent != NULL && sampling_us != NULL);                    \
        if (call.device->mig_current) LEAVE(NVML_ERROR_NOT_SUPPORTED);                 \
        *percent = call.device->field;                                                 \
        *sampling_us = CODEC_SAMPLING_US;                                              \
        LEAVE(NVML_SUCCESS);                                                           \
    }

CODEC_UTILISATION(nvmlDeviceGetEncoderUtilization, encoder_utilisation)
CODEC_UTILISATION(nvmlDeviceGetDecoderUtilization, decoder_utilisation)

struct process_sample {
    unsigned pid;
    unsigned long long timestamp_us;
    unsigned sm, memory, encoder, decoder;
};

struct process_sample_v1 {
    unsigned long long timestamp_us;
    unsigned pid, sm, memory, encoder, decoder, jpeg, ofa;
};

struct process_samples {
    unsigned version, count;
    unsigned long long last_seen_us;
    struct process_sample_v1 *rows;
};

/* One sample for each process that did any work; an idle one has none, as reported of drivers. */
static unsigned samples_of(const struct sim_call *call, struct process_sample_v1 *rows)
{
    unsigned found = 0;
    uint64_t now = sim_realtime_us();
    for (int slot = 0; slot < SIM_PROCESSES; slot++) {
        const struct sim_process *process = &call->device->processes[slot];
        if ((process->sm_percent | process->memory_percent | process->encoder_percent |
             process->decoder_percent) == 0)
            continue;
        int pid = slot_pid(call, slot);
        if (pid <= SLOT_NOT_VISIBLE) continue;
        rows[found++] = (struct process_sample_v1){
            .timestamp_us = now,
            .pid = (unsigned)pid,
            .sm = process->sm_percent,
            .memory = process->memory_percent,
            .encoder = process->encoder_percent,
            .decoder = process->decoder_percent,
        };
    }
    return found;
}

/* The answer's code, given what was found and what the caller has room for; sets `count` as NVML
 * does. */
static nvmlReturn_t sample_count(unsigned found, const void *rows, unsigned *count)
{
    unsigned room = *count;
    *count = rows == NULL ? SIM_PROCESSES : found;
    if (rows == NULL) return NVML_ERROR_INSUFFICIENT_SIZE;
    if (found == 0) return NVML_ERROR_NOT_FOUND;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(void *handle, struct process_sample *rows,
                                                      unsigned *count,
                                                      unsigned long long last_seen_us)
{
    ENTER(handle, GPU, count != NULL);
    /* shares of work are constant here, so every moment since then had the same */
    (void)last_seen_us;
    if (call.device->mig_current) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    struct process_sample_v1 found[SIM_PROCESSES];
    nvmlReturn_t result = sample_count(samples_of(&call, found), rows, count);
    for (unsigned row = 0; result == NVML_SUCCESS && row < *count; row++) {
        rows[row] = (struct process_sample){
            .pid = found[row].pid,
            .timestamp_us = found[row].timestamp_us,
            .sm = found[row].sm,
            .memory = found[row].memory,
            .encoder = found[row].encoder,
            .decoder = found[row].decoder,
        };
    }
    LEAVE(result);
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(void *handle,
                                                            struct process_samples *samples)
{
    ENTER(handle, GPU, samples != NULL);
    if (samples->version != STRUCT_VERSION(struct process_samples, 1))
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (call.device->mig_current) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    struct process_sample_v1 found[SIM_PROCESSES];
    nvmlReturn_t result = sample_count(samples_of(&call, found), samples->rows, &samples->count);
    if (result == NVML_SUCCESS) memcpy(samples->rows, found, samples->count * sizeof found[0]);
    LEAVE(result);
}
