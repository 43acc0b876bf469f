/* The state file of a simulated node: one fixed layout, mapped by every client.
 *
 * Written by vgpu_agent/sim/layout.py and state.py (the only authors), read by this library in any
 * number of processes. Fixed-width integers and explicit padding only, so that a C compiler
 * and Python's ctypes agree on it; tests/sim/test_layout.py compares both. Whoever changes a field
 * raises SIM_LAYOUT: a client refuses a file of another layout instead of misreading it.
 */
#ifndef VGPU_AGENT_SIM_STATE_H
#define VGPU_AGENT_SIM_STATE_H

#include <stdint.h>

#define SIM_MAGIC     0x314d495355504756ull /* "VGPUSIM1" as little-endian bytes */
/* no NUMA node, no MIG instance, no return code, field not supported */
#define SIM_NONE      0xffffffffu
/* process slots lock single bytes from here on, far beyond the end of the file */
#define SIM_LOCK_BASE 0x40000000l

enum {
    SIM_LAYOUT = 1,
    SIM_GPUS = 16,
    SIM_PROCESSES = 64,
    SIM_LINKS = 18,
    SIM_MIG_DEVICES = 8,
    SIM_PROFILES = 16, /* rows are indexed by NVML_GPU_INSTANCE_PROFILE_* */
    SIM_PLACEMENTS = 8,
    SIM_RETIRED_PAGES = 16,
    SIM_EVENTS = 256,
    SIM_FAULTS = 32,
    SIM_CPU_WORDS = 16,
};

/* sim_gpu.lost */
enum { SIM_ANSWERS = 0, SIM_LOST_BUT_KNOWN = 1, SIM_LOST_ENTIRELY = 2 };

/* sim_process.kind */
enum {
    SIM_PROCESS_FREE = 0,
    SIM_PROCESS_FIXED = 1, /* its pid was written as a number */
    SIM_PROCESS_LIVE = 2,  /* holds its byte lock */
};

struct sim_link {
    uint32_t up;
    uint32_t version;      /* NVML_NVLINK_VERSION_* */
    uint32_t remote_type;  /* NVML_NVLINK_DEVICE_TYPE_* */
    uint32_t capabilities; /* one bit for each NVML_NVLINK_CAP_* */
    uint32_t remote_domain;
    uint32_t remote_bus;
    uint32_t remote_device;
    uint32_t remote_pci_device_id;
};

struct sim_mig_profile {
    uint32_t valid;
    uint32_t id;
    uint32_t slices;
    uint32_t instances;
    uint32_t multiprocessors;
    uint32_t copy_engines;
    uint32_t decoders;
    uint32_t encoders;
    uint32_t jpegs;
    uint32_t ofas;
    uint32_t placement_count;
    uint32_t placement_size;
    uint32_t placement_start[SIM_PLACEMENTS];
    uint64_t memory_mib;
    char name[96];
};

struct sim_mig_device {
    uint32_t used;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t gpu_instance_profile;
    uint32_t compute_instance_profile;
    uint32_t gpu_instance_slices;
    uint32_t compute_instance_slices;
    uint32_t multiprocessors;
    uint32_t copy_engines;
    uint32_t decoders;
    uint32_t encoders;
    uint32_t jpegs;
    uint32_t ofas;
    uint32_t placement_start;
    uint32_t placement_size;
    uint32_t padding;
    uint64_t memory_mib;
    char uuid[96];
    char name[96];
};

struct sim_process {
    uint32_t kind;
    uint32_t pid;  /* FIXED: as given; LIVE: the holder's pid in its own namespace */
    /* 0 compute, 1 graphics, 2 MPS: the modes of nvmlDeviceGetRunningProcessDetailList */
    uint32_t type;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t sm_percent;
    uint32_t memory_percent;
    uint32_t encoder_percent;
    uint32_t decoder_percent;
    uint32_t padding;
    uint64_t pid_namespace; /* LIVE: inode of the holder's /proc/self/ns/pid */
    uint64_t memory_bytes;
    char name[64];
};

struct sim_gpu {
    /* existence and identity */
    uint32_t present;
    uint32_t lost;
    uint32_t minor;
    uint32_t numa_node;
    uint32_t domain;
    uint32_t bus;
    uint32_t device;
    uint32_t pci_device_id;
    uint32_t pci_subsystem_id;
    uint32_t brand;
    uint32_t architecture;
    uint32_t compute_major;
    uint32_t compute_minor;
    uint32_t multiprocessors;
    uint32_t cores_per_multiprocessor;
    uint32_t module_id;
    char uuid[96];
    char name[96];
    char serial[32];
    char vbios[32];
    char board_part[32];
    /* memory and use */
    uint64_t memory_total;
    uint64_t memory_reserved;
    uint64_t memory_unaccounted; /* in use by no process anybody sees */
    uint64_t bar1_total;
    uint64_t bar1_used;
    uint32_t utilisation;        /* percent; SIM_NONE: summed over the processes */
    uint32_t memory_utilisation; /* likewise */
    uint32_t encoder_utilisation;
    uint32_t decoder_utilisation;
    /* temperature, power, clocks */
    uint32_t temperature;
    uint32_t temperature_shutdown;
    uint32_t temperature_slowdown;
    uint32_t temperature_memory_max;
    uint32_t temperature_gpu_max;
    uint32_t fan_percent; /* SIM_NONE: no fan of its own */
    uint32_t power_idle_mw;
    uint32_t power_limit_mw;
    uint32_t power_min_mw;
    uint32_t power_max_mw;
    uint32_t clock_mhz[4]; /* graphics, SM, memory, video */
    uint32_t clock_max_mhz[4];
    uint32_t persistence_mode;
    uint32_t compute_mode;
    uint64_t energy_mj;
    /* memory health */
    uint32_t ecc_supported;
    uint32_t ecc_current;
    uint32_t ecc_pending;
    uint32_t remap_supported; /* row remapping (Ampere and later); page retirement otherwise */
    uint64_t ecc_volatile_corrected;
    uint64_t ecc_volatile_uncorrected;
    uint64_t ecc_aggregate_corrected;
    uint64_t ecc_aggregate_uncorrected;
    uint32_t remap_corrected;
    uint32_t remap_uncorrected;
    uint32_t remap_pending;
    uint32_t remap_failed;
    uint32_t remap_histogram[5]; /* banks by spare rows left: max, high, partial, low, none */
    /* NVML_GPU_RECOVERY_ACTION_*; SIM_NONE: this driver does not know the field */
    uint32_t recovery_action;
    uint32_t retired_pending;
    uint32_t retired_count[2]; /* by cause: multiple single-bit errors, double-bit error */
    uint32_t padding;
    uint64_t retired_address[2][SIM_RETIRED_PAGES];
    /* place in the machine */
    uint32_t pcie_generation;
    uint32_t pcie_generation_max;
    uint32_t pcie_width;
    uint32_t pcie_width_max;
    uint64_t cpus[SIM_CPU_WORDS];
    uint32_t fabric_state; /* NVML_GPU_FABRIC_STATE_* */
    uint32_t fabric_clique;
    uint32_t fabric_status;
    uint32_t fabric_health_mask;
    uint8_t fabric_uuid[16];
    uint32_t link_count;
    uint32_t mig_capable;
    uint32_t mig_current;
    uint32_t mig_pending;
    uint64_t event_types; /* nvmlEventType* bits this GPU can raise */
    struct sim_link links[SIM_LINKS];
    struct sim_mig_profile profiles[SIM_PROFILES];
    struct sim_mig_device mig_devices[SIM_MIG_DEVICES];
    struct sim_process processes[SIM_PROCESSES];
};

struct sim_event {
    uint64_t sequence;
    uint64_t type;
    uint64_t payload; /* an XID for nvmlEventTypeXidCriticalError */
    uint32_t gpu;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    uint32_t padding;
};

struct sim_fault {
    char function[64];  /* an NVML name, or a prefix and "*" */
    uint32_t gpu;       /* SIM_NONE: any, and calls about no GPU */
    uint32_t code;      /* SIM_NONE: only slow */
    int32_t times_left; /* -1 for ever */
    uint32_t delay_ms;
};

struct sim_node {
    uint64_t magic;
    uint32_t layout;
    uint32_t bytes;
    uint32_t gpu_count;
    uint32_t cuda_version;
    char driver_version[80];
    char nvml_version[80];
    char model[64];
    /* how many events were ever posted; the next goes to event_head % SIM_EVENTS */
    uint64_t event_head;
    struct sim_event events[SIM_EVENTS];
    struct sim_fault faults[SIM_FAULTS];
    uint32_t common_ancestor[SIM_GPUS][SIM_GPUS]; /* NVML_TOPOLOGY_* */
    struct sim_gpu gpus[SIM_GPUS];
};

#endif
