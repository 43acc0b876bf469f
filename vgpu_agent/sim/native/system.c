/* The driver itself and finding devices: versions, error texts, count, look-ups by index, UUID,
 * serial and PCI bus id. */
#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct {
        nvmlReturn_t code;
        const char *text;
    } texts[] = {
        {0, "Success"},
        {1, "Uninitialized"},
        {2, "Invalid Argument"},
        {3, "Not Supported"},
        {4, "Insufficient Permissions"},
        {5, "Already Initialized"},
        {6, "Not Found"},
        {7, "Insufficient Size"},
        {8, "Insufficient External Power"},
        {9, "Driver Not Loaded"},
        {10, "Timeout"},
        {11, "Interrupt Request Issue"},
        {12, "NVML Shared Library Not Found"},
        {13, "Function Not Found"},
        {14, "Corrupted infoROM"},
        {15, "GPU is lost"},
        {16, "GPU requires reset"},
        {17, "GPU access blocked by the operating system"},
        {18, "Driver/library version mismatch"},
        {19, "In use by another client"},
        {20, "Insufficient Memory"},
        {21, "No data"},
        {23, "Insufficient Resources"},
        {25, "Argument version mismatch"},
        {27, "System is not in ready state"},
        {28, "GPU not found"},
        {29, "Invalid State"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (texts[i].code == result) return texts[i].text;
    }
    return "Unknown Error";
}

/* ---- versions ---- */

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    ENTER(NULL, NO_HANDLE, version != NULL);
    LEAVE(sim_copy_string(version, size, call.node->driver_version));
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    ENTER(NULL, NO_HANDLE, version != NULL);
    LEAVE(sim_copy_string(version, size, call.node->nvml_version));
}

static nvmlReturn_t cuda_version(const char *function, int *version)
{
    struct sim_call call;
    nvmlReturn_t result = sim_begin(&call, function, NULL, NO_HANDLE, version != NULL);
    if (result == NVML_SUCCESS) *version = (int)call.node->cuda_version;
    return sim_end(&call, result);
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return cuda_version(__func__, version);
}
NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return cuda_version(__func__, version);
}

/* The command line of a process, as the driver reports it: read from /proc, so only for processes
 * this one may see. */
NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    ENTER(NULL, NO_HANDLE, name != NULL && size > 0);
    char path[64];
    char command[1024] = "";
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) LEAVE(NVML_ERROR_NOT_FOUND);
    ssize_t length = read(fd, command, sizeof command - 1);
    close(fd);
    if (length <= 0) LEAVE(NVML_ERROR_NOT_FOUND);
    snprintf(name, size, "%s", command);
    LEAVE(NVML_SUCCESS);
}

/* ---- devices ---- */

static nvmlReturn_t device_count(const char *function, unsigned *count)
{
    struct sim_call call;
    nvmlReturn_t result = sim_begin(&call, function, NULL, NO_HANDLE, count != NULL);
    if (result == NVML_SUCCESS) *count = sim_visible_count();
    return sim_end(&call, result);
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned *count) { return device_count(__func__, count); }
NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    return device_count(__func__, count);
}

static nvmlReturn_t by_index(const char *function, unsigned index, void **handle)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin_lookup(&call, function,
                                            handle != NULL && index < sim_visible_count());
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    uint32_t gpu = sim_visible_gpu(index);
    return sim_found(&call, gpu, sim_gpu_handle(gpu), handle);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, void **handle)
{
    return by_index(__func__, index, handle);
}
NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    return by_index(__func__, index, handle);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    ENTER_LOOKUP(uuid != NULL && handle != NULL);
    for (uint32_t index = 0; index < sim_visible_count(); index++) {
        uint32_t gpu = sim_visible_gpu(index);
        const struct sim_gpu *device = &call.node->gpus[gpu];
        if (strcasecmp(device->uuid, uuid) == 0)
            return sim_found(&call, gpu, sim_gpu_handle(gpu), handle);
        for (uint32_t mig = 0; mig < SIM_MIG_DEVICES; mig++) {
            if (device->mig_devices[mig].used &&
                strcasecmp(device->mig_devices[mig].uuid, uuid) == 0) {
                return sim_found(&call, gpu, sim_mig_handle(gpu, mig), handle);
            }
        }
    }
    return sim_found(&call, SIM_NONE, NULL, handle);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, void **handle)
{
    ENTER_LOOKUP(serial != NULL && handle != NULL);
    for (uint32_t index = 0; index < sim_visible_count(); index++) {
        uint32_t gpu = sim_visible_gpu(index);
        if (strcmp(call.node->gpus[gpu].serial, serial) == 0)
            return sim_found(&call, gpu, sim_gpu_handle(gpu), handle);
    }
    return sim_found(&call, SIM_NONE, NULL, handle);
}

/* Takes domain:bus:device.function, the domain with 4 or 8 digits or left out, as NVML does. */
static nvmlReturn_t by_pci_bus_id(const char *function, const char *bus_id, void **handle)
{
    unsigned domain = 0;
    unsigned bus = 0;
    unsigned device = 0;
    bool readable = bus_id != NULL &&
                    (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &device) == 3 ||
                     (domain = 0, sscanf(bus_id, "%x:%x", &bus, &device) == 2));
    struct sim_call call;
    nvmlReturn_t refused = sim_begin_lookup(&call, function, handle != NULL && readable);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    for (uint32_t index = 0; index < sim_visible_count(); index++) {
        uint32_t gpu = sim_visible_gpu(index);
        const struct sim_gpu *found = &call.node->gpus[gpu];
        if (found->domain == domain && found->bus == bus && found->device == device) {
            return sim_found(&call, gpu, sim_gpu_handle(gpu), handle);
        }
    }
    return sim_found(&call, SIM_NONE, NULL, handle);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, void **handle)
{
    return by_pci_bus_id(__func__, id, handle);
}
NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle)
{
    return by_pci_bus_id(__func__, id, handle);
}
