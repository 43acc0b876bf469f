/* How busy a GPU is. usage.c reports it, power.c depends on it. */
#ifndef VGPU_AGENT_SIM_USAGE_H
#define VGPU_AGENT_SIM_USAGE_H

#include "core.h"

uint32_t sim_utilisation(const struct sim_call *call);

#endif
