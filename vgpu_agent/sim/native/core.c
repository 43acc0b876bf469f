/* The mapped node, initialisation, handles, faults and tracing. See core.h for who uses it. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HANDLE_MAGIC = 0x56475055, DELAY_PIECE_NS = 10000000 };

static struct sim_node *node;
static int descriptor = -1;
static dev_t mapped_device;
static ino_t mapped_inode;

static pthread_mutex_t initialisation = PTHREAD_MUTEX_INITIALIZER;
static unsigned references;
static uint32_t visible[SIM_GPUS];
static uint32_t visible_count;

static struct sim_handle gpu_handles[SIM_GPUS];
static struct sim_handle mig_handles[SIM_GPUS][SIM_MIG_DEVICES];
static struct sim_handle gpu_instance_handles[SIM_GPUS][SIM_MIG_DEVICES];
static struct sim_handle compute_instance_handles[SIM_GPUS][SIM_MIG_DEVICES];

static int trace_descriptor = -1;

uint64_t sim_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

uint64_t sim_realtime_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000ull + (uint64_t)now.tv_nsec / 1000u;
}

void sim_sleep_ns(uint64_t nanoseconds)
{
    struct timespec left = {(time_t)(nanoseconds / 1000000000ull),
                            (long)(nanoseconds % 1000000000ull)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}

nvmlReturn_t sim_copy_string(char *to, uint32_t size, const char *from)
{
    if (size < strlen(from) + 1) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, from);
    return NVML_SUCCESS;
}

/* ---- the mapping ---- */

static struct sim_node *map_file(int fd)
{
    struct stat status;
    if (fstat(fd, &status) != 0 || status.st_size < (off_t)sizeof(struct sim_node)) return NULL;
    void *memory = mmap(NULL, sizeof(struct sim_node), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return NULL;
    struct sim_node *found = memory;
    if (found->magic != SIM_MAGIC || found->layout != SIM_LAYOUT ||
        found->bytes != sizeof(struct sim_node)) {
        munmap(memory, sizeof(struct sim_node));
        return NULL;
    }
    mapped_device = status.st_dev;
    mapped_inode = status.st_ino;
    return found;
}

/* Maps the file that the environment names now. A file that was mapped before stays mapped: a
 * thread may still be inside a call on it, and a few hundred sparse kilobytes for each test of a
 * test run are cheaper than a lock around every call. */
static bool map_node(void)
{
    const char *path = getenv("VGPU_AGENT_SIM_STATE");
    struct stat status;
    if (path == NULL || path[0] == '\0' || stat(path, &status) != 0) return false;
    /* The same file is not opened again: closing a second descriptor would drop this process's byte
     * locks on it (POSIX). */
    if (node != NULL && status.st_dev == mapped_device && status.st_ino == mapped_inode)
        return node->magic == SIM_MAGIC;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return false;
    struct sim_node *found = map_file(fd);
    if (found == NULL) {
        close(fd);
        return false;
    }
    if (descriptor >= 0) close(descriptor);
    descriptor = fd;
    node = found;
    return true;
}

int sim_descriptor(void) { return descriptor; }
bool sim_initialized(void) { return __atomic_load_n(&references, __ATOMIC_ACQUIRE) > 0; }

/* ---- tracing: one line for each call, in the file that VGPU_AGENT_SIM_TRACE names ---- */

static void open_trace(void)
{
    const char *path = getenv("VGPU_AGENT_SIM_TRACE");
    if (path != NULL && path[0] != '\0')
        trace_descriptor = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
}

static void trace(const char *function, uint32_t gpu, nvmlReturn_t result)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_trace);
    if (trace_descriptor < 0) return;
    char line[160];
    int length = snprintf(line, sizeof line, "%d %s gpu=%d -> %d\n", (int)getpid(), function,
                          (int)gpu, result);
    if (write(trace_descriptor, line, (size_t)length) < 0) trace_descriptor = -1;
}

/* ---- faults ---- */

/* A row names a function exactly, without its "_v2" suffix, or as a prefix with "*". */
static bool fault_names(const char *row, const char *function)
{
    size_t length = strlen(row);
    if (length == 0) return false;
    if (row[length - 1] == '*') return strncmp(row, function, length - 1) == 0;
    if (strncmp(row, function, length) != 0) return false;
    const char *rest = function + length;
    return rest[0] == '\0' ||
        (rest[0] == '_' && rest[1] == 'v' && rest[2] >= '1' && rest[2] <= '9' && rest[3] == '\0');
}

/* Uses up one of the times a row has left, exactly once among all processes. */
static bool take_one(struct sim_fault *fault)
{
    int32_t left = __atomic_load_n(&fault->times_left, __ATOMIC_ACQUIRE);
    while (left > 0) {
        if (__atomic_compare_exchange_n(&fault->times_left, &left, left - 1, false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return true;
    }
    return left < 0;
}

/* Sleeps in pieces, so that forgetting the fault ends a delay of any length, and a test of a hang
 * decides when it is over. */
static void delay(const struct sim_fault *fault)
{
    uint64_t end = sim_monotonic_ns() + (uint64_t)fault->delay_ms * 1000000ull;
    while (__atomic_load_n(&fault->function[0], __ATOMIC_ACQUIRE) != '\0') {
        uint64_t now = sim_monotonic_ns();
        if (now >= end) return;
        sim_sleep_ns(end - now < DELAY_PIECE_NS ? end - now : DELAY_PIECE_NS);
    }
}

static nvmlReturn_t apply_faults(struct sim_node *state, const char *function, uint32_t gpu)
{
    for (int row = 0; row < SIM_FAULTS; row++) {
        struct sim_fault *fault = &state->faults[row];
        if (fault->function[0] == '\0' || (fault->gpu != SIM_NONE && fault->gpu != gpu)) continue;
        if (!fault_names(fault->function, function) || !take_one(fault)) continue;
        uint32_t code = fault->code;
        delay(fault);
        if (code != SIM_NONE) return (nvmlReturn_t)code;
    }
    return NVML_SUCCESS;
}

/* ---- handles ---- */

static void make_handle(struct sim_handle *handle, uint32_t kind, uint32_t gpu, uint32_t mig)
{
    *handle = (struct sim_handle){.magic = HANDLE_MAGIC, .kind = kind, .gpu = gpu, .mig = mig};
}

static void make_handles(void)
{
    for (uint32_t gpu = 0; gpu < SIM_GPUS; gpu++) {
        make_handle(&gpu_handles[gpu], GPU, gpu, 0);
        for (uint32_t mig = 0; mig < SIM_MIG_DEVICES; mig++) {
            make_handle(&mig_handles[gpu][mig], MIG, gpu, mig);
            make_handle(&gpu_instance_handles[gpu][mig], GPU_INSTANCE, gpu, mig);
            make_handle(&compute_instance_handles[gpu][mig], COMPUTE_INSTANCE, gpu, mig);
        }
    }
}

struct sim_handle *sim_gpu_handle(uint32_t gpu) { return &gpu_handles[gpu]; }
struct sim_handle *sim_mig_handle(uint32_t gpu, uint32_t mig) { return &mig_handles[gpu][mig]; }
struct sim_handle *sim_gpu_instance_handle(uint32_t gpu, uint32_t mig)
{
    return &gpu_instance_handles[gpu][mig];
}
struct sim_handle *sim_compute_instance_handle(uint32_t gpu, uint32_t mig)
{
    return &compute_instance_handles[gpu][mig];
}

uint32_t sim_gpu_of(const void *handle)
{
    const struct sim_handle *known = handle;
    return known != NULL && known->magic == HANDLE_MAGIC ? known->gpu : SIM_NONE;
}

uint32_t sim_visible_count(void) { return visible_count; }
uint32_t sim_visible_gpu(uint32_t index) { return visible[index]; }

uint32_t sim_index_of(uint32_t gpu)
{
    for (uint32_t index = 0; index < visible_count; index++) {
        if (visible[index] == gpu) return index;
    }
    return gpu;
}

/* ---- initialisation ---- */

static nvmlReturn_t initialise(void)
{
    pthread_mutex_lock(&initialisation);
    bool mapped = references > 0 || map_node();
    struct sim_node *state = node;
    pthread_mutex_unlock(&initialisation);
    if (!mapped) {
        trace("nvmlInit_v2", SIM_NONE, NVML_ERROR_DRIVER_NOT_LOADED);
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    /* Without the lock: a fault that delays nvmlInit must not hold up another thread's. */
    nvmlReturn_t result = apply_faults(state, "nvmlInit_v2", SIM_NONE);
    pthread_mutex_lock(&initialisation);
    if (result == NVML_SUCCESS && references++ == 0) {
        make_handles();
        visible_count = 0;
        for (uint32_t gpu = 0; gpu < node->gpu_count && gpu < SIM_GPUS; gpu++) {
            if (node->gpus[gpu].present) visible[visible_count++] = gpu;
        }
    }
    pthread_mutex_unlock(&initialisation);
    trace("nvmlInit_v2", SIM_NONE, result);
    return result;
}

NVML_API nvmlReturn_t nvmlInit(void) { return initialise(); }
NVML_API nvmlReturn_t nvmlInit_v2(void) { return initialise(); }

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    /* NVML_INIT_FLAG_NO_GPUS and _NO_ATTACH change what the driver touches, not what it answers */
    (void)flags;
    return initialise();
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&initialisation);
    nvmlReturn_t result = references > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (references > 0) references--;
    pthread_mutex_unlock(&initialisation);
    trace("nvmlShutdown", SIM_NONE, result);
    return result;
}

/* ---- the way into and out of a call ---- */

/* What the library read when the GPU was still there; a handle held since then answers it from
 * memory (lost = 1). */
static bool is_identity(const char *function)
{
    static const char *const names[] = {
        "nvmlDeviceGetUUID",       "nvmlDeviceGetName",    "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetIndex",      "nvmlDeviceGetBrand",   "nvmlDeviceGetSerial",
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(names[i], function) == 0) return true;
    }
    return false;
}

static nvmlReturn_t loss(const struct sim_gpu *device, const char *function)
{
    if (!device->present || device->lost == SIM_LOST_ENTIRELY) return NVML_ERROR_GPU_IS_LOST;
    if (device->lost == SIM_LOST_BUT_KNOWN && !is_identity(function)) return NVML_ERROR_GPU_IS_LOST;
    return NVML_SUCCESS;
}

nvmlReturn_t sim_begin_lookup(struct sim_call *call, const char *function, bool arguments_ok)
{
    *call = (struct sim_call){.function = function, .gpu = SIM_NONE, .node = node};
    if (!sim_initialized()) return NVML_ERROR_UNINITIALIZED;
    return arguments_ok ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t sim_begin(struct sim_call *call, const char *function, const void *handle,
                       uint32_t kinds, bool arguments_ok)
{
    nvmlReturn_t result = sim_begin_lookup(call, function, arguments_ok);
    if (result != NVML_SUCCESS) return result;
    if (kinds != NO_HANDLE) {
        const struct sim_handle *known = handle;
        if (sim_gpu_of(handle) == SIM_NONE || (known->kind & kinds) == 0)
            return NVML_ERROR_INVALID_ARGUMENT;
        call->gpu = known->gpu;
        call->device = &node->gpus[known->gpu];
        if (known->kind != GPU) call->mig = &call->device->mig_devices[known->mig];
    }
    result = apply_faults(call->node, function, call->gpu);
    if (result == NVML_SUCCESS && call->device != NULL) result = loss(call->device, function);
    if (result == NVML_SUCCESS && call->mig != NULL && !call->mig->used)
        result = NVML_ERROR_NOT_FOUND;
    return result;
}

nvmlReturn_t sim_found(struct sim_call *call, uint32_t gpu, struct sim_handle *handle, void **out)
{
    call->gpu = gpu;
    nvmlReturn_t result = apply_faults(call->node, call->function, gpu);
    if (result == NVML_SUCCESS && gpu == SIM_NONE) result = NVML_ERROR_NOT_FOUND;
    if (result == NVML_SUCCESS) result = loss(&call->node->gpus[gpu], call->function);
    if (result == NVML_SUCCESS) *out = handle;
    return sim_end(call, result);
}

nvmlReturn_t sim_end(const struct sim_call *call, nvmlReturn_t result)
{
    trace(call->function, call->gpu, result);
    return result;
}
