/* Temperature, power, clocks: they follow the utilisation, so that a dashboard on simulated GPUs
 * moves plausibly. */
#include "usage.h"

/* ---- temperature, in degrees Celsius ---- */

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius)
{
    ENTER(handle, GPU, celsius != NULL && sensor == 0);
    *celsius = call.device->temperature;
    LEAVE(NVML_SUCCESS);
}

struct temperature {
    unsigned version, sensor;
    int celsius;
};

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureV(void *handle, struct temperature *temperature)
{
    ENTER(handle, GPU, temperature != NULL);
    if (temperature->version != STRUCT_VERSION(struct temperature, 1))
        LEAVE(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    if (temperature->sensor != 0) LEAVE(NVML_ERROR_INVALID_ARGUMENT);
    temperature->celsius = (int)call.device->temperature;
    LEAVE(NVML_SUCCESS);
}

enum {
    THRESHOLD_SHUTDOWN = 0,
    THRESHOLD_SLOWDOWN = 1,
    THRESHOLD_MEMORY_MAX = 2,
    THRESHOLD_GPU_MAX = 3,
    THRESHOLDS = 8,
};

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(void *handle, unsigned threshold,
                                                        unsigned *celsius)
{
    ENTER(handle, GPU, celsius != NULL && threshold < THRESHOLDS);
    uint32_t known = 0;
    switch (threshold) {
    case THRESHOLD_SHUTDOWN: known = call.device->temperature_shutdown; break;
    case THRESHOLD_SLOWDOWN: known = call.device->temperature_slowdown; break;
    case THRESHOLD_MEMORY_MAX: known = call.device->temperature_memory_max; break;
    case THRESHOLD_GPU_MAX: known = call.device->temperature_gpu_max; break;
    default: break;
    }
    if (known == 0) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *celsius = known;
    LEAVE(NVML_SUCCESS);
}

NUMBER(nvmlDeviceGetFanSpeed, GPU, unsigned, call.device->fan_percent != SIM_NONE,
       call.device->fan_percent)

/* ---- power, in milliwatts ---- */

static uint32_t power_mw(const struct sim_call *call)
{
    uint32_t idle = call->device->power_idle_mw;
    return idle + (call->device->power_limit_mw - idle) / 100 * sim_utilisation(call);
}

NUMBER(nvmlDeviceGetPowerUsage, GPU, unsigned, true, power_mw(&call))
NUMBER(nvmlDeviceGetEnforcedPowerLimit, GPU, unsigned, true, call.device->power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementLimit, GPU, unsigned, true, call.device->power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, GPU, unsigned, true, call.device->power_max_mw)
NUMBER(nvmlDeviceGetPowerManagementMode, GPU, unsigned, true, 1)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, GPU, unsigned long long, true, call.device->energy_mj)

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(
    void *handle, unsigned *minimum, unsigned *maximum)
{
    ENTER(handle, GPU, minimum != NULL && maximum != NULL);
    *minimum = call.device->power_min_mw;
    *maximum = call.device->power_max_mw;
    LEAVE(NVML_SUCCESS);
}

/* ---- clocks ---- */

/* nvmlClocksEventReason* */
enum {
    REASON_NONE = 0,
    REASON_GPU_IDLE = 0x1,
    REASON_SOFTWARE_THERMAL = 0x20,
    REASON_HARDWARE_THERMAL = 0x40,
    REASONS_KNOWN = 0x1ff,
};

static unsigned long long clocks_event_reasons(const struct sim_call *call)
{
    if (call->device->temperature >= call->device->temperature_slowdown)
        return REASON_HARDWARE_THERMAL;
    if (call->device->temperature >= call->device->temperature_gpu_max)
        return REASON_SOFTWARE_THERMAL;
    return sim_utilisation(call) == 0 ? REASON_GPU_IDLE : REASON_NONE;
}

NUMBER(nvmlDeviceGetCurrentClocksEventReasons, GPU, unsigned long long, true,
       clocks_event_reasons(&call))
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, GPU, unsigned long long, true,
       clocks_event_reasons(&call))
NUMBER(nvmlDeviceGetSupportedClocksEventReasons, GPU, unsigned long long, true, REASONS_KNOWN)
NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, GPU, unsigned long long, true, REASONS_KNOWN)

/* Data-centre cards stay in P0; the clocks alone fall when idle. */
NUMBER(nvmlDeviceGetPerformanceState, GPU, unsigned, true, 0)
NUMBER(nvmlDeviceGetPowerState, GPU, unsigned, true, 0)

enum { CLOCK_TYPES = 4, CLOCK_MEMORY = 2 };

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(void *handle, unsigned type, unsigned *mhz)
{
    ENTER(handle, GPU, mhz != NULL && type < CLOCK_TYPES);
    bool busy = sim_utilisation(&call) > 0;
    *mhz = busy ? call.device->clock_max_mhz[type] : call.device->clock_mhz[type];
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(void *handle, unsigned type, unsigned *mhz)
{
    ENTER(handle, GPU, mhz != NULL && type < CLOCK_TYPES);
    *mhz = call.device->clock_max_mhz[type];
    LEAVE(NVML_SUCCESS);
}
