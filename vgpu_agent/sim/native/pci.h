/* A PCI device as NVML describes it: a GPU (identity.c), or what is at the other end of an NVLink
 * (topology.c). */
#ifndef VGPU_AGENT_SIM_PCI_H
#define VGPU_AGENT_SIM_PCI_H

#include <stdint.h>

/* nvmlPciInfo_t */
struct sim_pci_info {
    char bus_id_legacy[16]; /* domain with four digits */
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32]; /* domain with eight digits */
};

struct sim_pci_info sim_pci_info(uint32_t domain, uint32_t bus, uint32_t device,
                                 uint32_t pci_device_id, uint32_t pci_subsystem_id);

#endif
