/* Who a device is: names, numbers, PCI address, capabilities that never change. */
#include "core.h"
#include "pci.h"

#include <stdio.h>
#include <string.h>

NVML_API nvmlReturn_t nvmlDeviceGetName(void *handle, char *name, unsigned size)
{
    ENTER(handle, ANY_DEVICE, name != NULL);
    LEAVE(sim_copy_string(name, size, call.mig != NULL ? call.mig->name : call.device->name));
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(void *handle, char *uuid, unsigned size)
{
    ENTER(handle, ANY_DEVICE, uuid != NULL);
    LEAVE(sim_copy_string(uuid, size, call.mig != NULL ? call.mig->uuid : call.device->uuid));
}

#define TEXT(name, field)                                               \
    NVML_API nvmlReturn_t name(void *handle, char *text, unsigned size) \
    {                                                                   \
        ENTER(handle, GPU, text != NULL);                               \
        LEAVE(sim_copy_string(text, size, call.device->field));         \
    }

TEXT(nvmlDeviceGetSerial, serial)
TEXT(nvmlDeviceGetVbiosVersion, vbios)
TEXT(nvmlDeviceGetBoardPartNumber, board_part)

static uint32_t cores_of(const struct sim_gpu *gpu)
{
    return gpu->multiprocessors * gpu->cores_per_multiprocessor;
}

/* A MIG handle answers with its own number within the parent. */
NUMBER(nvmlDeviceGetIndex, ANY_DEVICE, unsigned, true,
       call.mig != NULL ? (uint32_t)(call.mig - call.device->mig_devices) : sim_index_of(call.gpu))
NUMBER(nvmlDeviceGetMinorNumber, ANY_DEVICE, unsigned, true, call.device->minor)
NUMBER(nvmlDeviceGetBrand, ANY_DEVICE, unsigned, true, call.device->brand)
NUMBER(nvmlDeviceGetArchitecture, ANY_DEVICE, unsigned, true, call.device->architecture)
NUMBER(nvmlDeviceGetBoardId, GPU, unsigned, true, call.device->bus << 8)
NUMBER(nvmlDeviceGetMultiGpuBoard, GPU, unsigned, true, 0)
NUMBER(nvmlDeviceGetModuleId, GPU, unsigned, true, call.device->module_id)
NUMBER(nvmlDeviceGetNumGpuCores, GPU, unsigned, true, cores_of(call.device))
NUMBER(nvmlDeviceGetPersistenceMode, ANY_DEVICE, unsigned, true, call.device->persistence_mode)
NUMBER(nvmlDeviceGetComputeMode, ANY_DEVICE, unsigned, true, call.device->compute_mode)
NUMBER(nvmlDeviceGetDisplayMode, GPU, unsigned, true, 0)
NUMBER(nvmlDeviceGetDisplayActive, GPU, unsigned, true, 0)
NUMBER(nvmlDeviceGetVirtualizationMode, GPU, unsigned, true, 0)

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    ENTER(handle, ANY_DEVICE, major != NULL && minor != NULL);
    *major = (int)call.device->compute_major;
    *minor = (int)call.device->compute_minor;
    LEAVE(NVML_SUCCESS);
}

/* ---- PCI ---- */

struct sim_pci_info sim_pci_info(uint32_t domain, uint32_t bus, uint32_t device,
                                 uint32_t pci_device_id, uint32_t pci_subsystem_id)
{
    struct sim_pci_info info = {
        .domain = domain,
        .bus = bus,
        .device = device,
        .pci_device_id = pci_device_id,
        .pci_subsystem_id = pci_subsystem_id,
    };
    snprintf(info.bus_id, sizeof info.bus_id, "%08X:%02X:%02X.0", domain, bus & 0xff,
             device & 0xff);
    snprintf(info.bus_id_legacy, sizeof info.bus_id_legacy, "%04X:%02X:%02X.0", domain & 0xffff,
             bus & 0xff, device & 0xff);
    return info;
}

static struct sim_pci_info own_pci_info(const struct sim_gpu *gpu)
{
    return sim_pci_info(gpu->domain, gpu->bus, gpu->device, gpu->pci_device_id,
                        gpu->pci_subsystem_id);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(void *handle, struct sim_pci_info *info)
{
    ENTER(handle, ANY_DEVICE, info != NULL);
    *info = own_pci_info(call.device);
    LEAVE(NVML_SUCCESS);
}

struct pci_info_v2 {
    char bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id, reserved[4];
};

static nvmlReturn_t pci_info_v2(const char *function, void *handle, struct pci_info_v2 *info)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, ANY_DEVICE, info != NULL);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    struct sim_pci_info own = own_pci_info(call.device);
    *info = (struct pci_info_v2){.domain = own.domain,
                                 .bus = own.bus,
                                 .device = own.device,
                                 .pci_device_id = own.pci_device_id,
                                 .pci_subsystem_id = own.pci_subsystem_id};
    memcpy(info->bus_id, own.bus_id_legacy, sizeof info->bus_id);
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(void *handle, struct pci_info_v2 *info)
{
    return pci_info_v2(__func__, handle, info);
}
NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(void *handle, struct pci_info_v2 *info)
{
    return pci_info_v2(__func__, handle, info);
}

NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, GPU, unsigned, true, call.device->pcie_generation)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, GPU, unsigned, true, call.device->pcie_generation_max)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, GPU, unsigned, true, call.device->pcie_generation_max)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, GPU, unsigned, true, call.device->pcie_width)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, GPU, unsigned, true, call.device->pcie_width_max)
NUMBER(nvmlDeviceGetPcieReplayCounter, GPU, unsigned, true, 0)
