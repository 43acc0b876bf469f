/* Whether a GPU's memory can be trusted: ECC, row remapping, retired pages, and what the driver
 * wants done about it. */
#include "core.h"

#include <string.h>

enum { CORRECTED = 0, UNCORRECTED = 1, VOLATILE = 0, AGGREGATE = 1, LOCATION_DEVICE_MEMORY = 2 };

/* ---- ECC ---- */

static nvmlReturn_t ecc_errors(const struct sim_gpu *device, unsigned type, unsigned counter,
                               unsigned long long *count)
{
    if (!device->ecc_supported || !device->ecc_current) return NVML_ERROR_NOT_SUPPORTED;
    if (type == UNCORRECTED) {
        *count = counter == AGGREGATE ? device->ecc_aggregate_uncorrected
            : device->ecc_volatile_uncorrected;
    } else {
        *count = counter == AGGREGATE ? device->ecc_aggregate_corrected
            : device->ecc_volatile_corrected;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(void *handle, unsigned *current, unsigned *pending)
{
    ENTER(handle, GPU, current != NULL && pending != NULL);
    if (!call.device->ecc_supported) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *current = call.device->ecc_current;
    *pending = call.device->ecc_pending;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(void *handle, unsigned type, unsigned counter,
                                                  unsigned long long *count)
{
    ENTER(handle, GPU, count != NULL && type <= UNCORRECTED && counter <= AGGREGATE);
    LEAVE(ecc_errors(call.device, type, counter, count));
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(void *handle, unsigned type, unsigned counter,
                                                      unsigned location, unsigned long long *count)
{
    ENTER(handle, GPU, count != NULL && type <= UNCORRECTED && counter <= AGGREGATE);
    nvmlReturn_t result = ecc_errors(call.device, type, counter, count);
    if (result == NVML_SUCCESS && location != LOCATION_DEVICE_MEMORY) *count = 0;
    LEAVE(result);
}

/* ---- row remapping (Ampere and later) ---- */

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected,
                                                unsigned *uncorrected, unsigned *pending,
                                                unsigned *failed)
{
    ENTER(handle, GPU,
          corrected != NULL && uncorrected != NULL && pending != NULL && failed != NULL);
    if (!call.device->remap_supported) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    *corrected = call.device->remap_corrected;
    *uncorrected = call.device->remap_uncorrected;
    *pending = call.device->remap_pending;
    *failed = call.device->remap_failed;
    LEAVE(NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(void *handle, unsigned histogram[5])
{
    ENTER(handle, GPU, histogram != NULL);
    if (!call.device->remap_supported) LEAVE(NVML_ERROR_NOT_SUPPORTED);
    memcpy(histogram, call.device->remap_histogram, sizeof call.device->remap_histogram);
    LEAVE(NVML_SUCCESS);
}

/* ---- page retirement (before Ampere) ---- */

static nvmlReturn_t retired_pages(const char *function, void *handle, unsigned cause,
                                  unsigned *count, unsigned long long *addresses,
                                  unsigned long long *timestamps)
{
    struct sim_call call;
    nvmlReturn_t refused = sim_begin(&call, function, handle, GPU, count != NULL && cause < 2);
    if (refused != NVML_SUCCESS) return sim_end(&call, refused);
    if (call.device->remap_supported || !call.device->ecc_supported)
        return sim_end(&call, NVML_ERROR_NOT_SUPPORTED);
    unsigned room = addresses != NULL ? *count : 0;
    *count = call.device->retired_count[cause];
    if (*count > room) return sim_end(&call, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned page = 0; page < *count; page++) {
        addresses[page] = call.device->retired_address[cause][page];
        if (timestamps != NULL) timestamps[page] = 0;
    }
    return sim_end(&call, NVML_SUCCESS);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages(void *handle, unsigned cause, unsigned *count,
                                                unsigned long long *addresses)
{
    return retired_pages(__func__, handle, cause, count, addresses, NULL);
}

NVML_API nvmlReturn_t nvmlDeviceGetRetiredPages_v2(void *handle, unsigned cause, unsigned *count,
                                                   unsigned long long *addresses,
                                                   unsigned long long *timestamps)
{
    return retired_pages(__func__, handle, cause, count, addresses, timestamps);
}

NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, GPU, unsigned,
       !call.device->remap_supported && call.device->ecc_supported,
       call.device->retired_pending)

/* ---- field values: the only way to the recovery action ---- */

struct field_value {
    uint32_t field;
    uint32_t scope;
    int64_t timestamp_us;
    int64_t latency_us;
    unsigned value_type;
    nvmlReturn_t result;
    union {
        double real;
        unsigned small;
        unsigned long long large;
    } value;
};

enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3 };

/* NVML_FI_DEV_* */
enum {
    FIELD_ECC_CURRENT = 1,
    FIELD_ECC_PENDING = 2,
    FIELD_ECC_VOLATILE_CORRECTED = 3,
    FIELD_ECC_VOLATILE_UNCORRECTED = 4,
    FIELD_ECC_AGGREGATE_CORRECTED = 5,
    FIELD_ECC_AGGREGATE_UNCORRECTED = 6,
    FIELD_RETIRED_CORRECTED = 29,
    FIELD_RETIRED_UNCORRECTED = 30,
    FIELD_RETIRED_PENDING = 31,
    FIELD_TOTAL_ENERGY = 83,
    FIELD_NVLINK_COUNT = 91,
    FIELD_PCIE_REPLAYS = 94,
    FIELD_REMAPPED_CORRECTED = 142,
    FIELD_REMAPPED_UNCORRECTED = 143,
    FIELD_REMAPPED_PENDING = 144,
    FIELD_REMAPPED_FAILED = 145,
    FIELD_RECOVERY_ACTION = 230,
};

static void answer_small(struct field_value *field, bool supported, uint32_t value)
{
    field->value_type = VALUE_UNSIGNED_INT;
    field->value.small = value;
    field->result = supported ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static void answer_large(struct field_value *field, bool supported, uint64_t value)
{
    field->value_type = VALUE_UNSIGNED_LONG_LONG;
    field->value.large = value;
    field->result = supported ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static void answer_field(const struct sim_gpu *device, struct field_value *field)
{
    bool ecc = device->ecc_supported && device->ecc_current;
    bool remaps = device->remap_supported;
    bool retires = device->ecc_supported && !device->remap_supported;
    field->timestamp_us = (int64_t)sim_realtime_us();
    field->latency_us = 0;
    field->value.large = 0;
    switch (field->field) {
    case FIELD_ECC_CURRENT: answer_small(field, device->ecc_supported, device->ecc_current); break;
    case FIELD_ECC_PENDING: answer_small(field, device->ecc_supported, device->ecc_pending); break;
    case FIELD_ECC_VOLATILE_CORRECTED:
        answer_large(field, ecc, device->ecc_volatile_corrected);
        break;
    case FIELD_ECC_VOLATILE_UNCORRECTED:
        answer_large(field, ecc, device->ecc_volatile_uncorrected);
        break;
    case FIELD_ECC_AGGREGATE_CORRECTED:
        answer_large(field, ecc, device->ecc_aggregate_corrected);
        break;
    case FIELD_ECC_AGGREGATE_UNCORRECTED:
        answer_large(field, ecc, device->ecc_aggregate_uncorrected);
        break;
    case FIELD_RETIRED_CORRECTED:
        answer_small(field, retires, device->retired_count[CORRECTED]);
        break;
    case FIELD_RETIRED_UNCORRECTED:
        answer_small(field, retires, device->retired_count[UNCORRECTED]);
        break;
    case FIELD_RETIRED_PENDING: answer_small(field, retires, device->retired_pending); break;
    case FIELD_TOTAL_ENERGY: answer_large(field, true, device->energy_mj); break;
    case FIELD_NVLINK_COUNT: answer_small(field, true, device->link_count); break;
    case FIELD_PCIE_REPLAYS: answer_small(field, true, 0); break;
    case FIELD_REMAPPED_CORRECTED: answer_small(field, remaps, device->remap_corrected); break;
    case FIELD_REMAPPED_UNCORRECTED: answer_small(field, remaps, device->remap_uncorrected); break;
    case FIELD_REMAPPED_PENDING: answer_small(field, remaps, device->remap_pending); break;
    case FIELD_REMAPPED_FAILED: answer_small(field, remaps, device->remap_failed); break;
    case FIELD_RECOVERY_ACTION:
        answer_small(field, device->recovery_action != SIM_NONE, device->recovery_action);
        break;
    default: answer_large(field, false, 0);
    }
}

/* The call succeeds although single fields may not: each carries its own code. */
NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *fields)
{
    ENTER(handle, ANY_DEVICE, fields != NULL && count > 0);
    for (int i = 0; i < count; i++) answer_field(call.device, &fields[i]);
    LEAVE(NVML_SUCCESS);
}
