/* The layout of the state file in this build, as a text that Python compares with its own
 * (sim/layout.py).
 *
 * No other libnvidia-ml.so.1 exports this name, which is how the agent knows that its GPUs are
 * simulated and says so.
 */
#include "core.h"

#include <stdio.h>

const char *vgpusim_layout(void);

NVML_API const char *vgpusim_layout(void)
{
    static char text[512];
    snprintf(text, sizeof text,
             "layout=%d node=%zu gpu=%zu process=%zu mig_device=%zu mig_profile=%zu "
             "link=%zu event=%zu fault=%zu "
             "events@%zu faults@%zu gpus@%zu profiles@%zu mig_devices@%zu processes@%zu",
             SIM_LAYOUT, sizeof(struct sim_node), sizeof(struct sim_gpu),
             sizeof(struct sim_process), sizeof(struct sim_mig_device),
             sizeof(struct sim_mig_profile), sizeof(struct sim_link), sizeof(struct sim_event),
             sizeof(struct sim_fault),
             offsetof(struct sim_node, events), offsetof(struct sim_node, faults),
             offsetof(struct sim_node, gpus),
             offsetof(struct sim_gpu, profiles), offsetof(struct sim_gpu, mig_devices),
             offsetof(struct sim_gpu, processes));
    return text;
}
