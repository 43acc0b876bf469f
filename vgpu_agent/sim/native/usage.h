/* How busy a GPU is, for the files that report it (usage.c) and those that depend on it (power.c). */
#ifndef VGPU_AGENT_SIM_USAGE_H
#define VGPU_AGENT_SIM_USAGE_H

#include "core.h"

uint32_t sim_utilisation(const struct sim_call *call);

#endif
