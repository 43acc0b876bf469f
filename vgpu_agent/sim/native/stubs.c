/* Everything else that NVML clients look up: exported, because some die of a missing name, and
 * answered "not supported".
 *
 * stubs.inc is written by scripts/generate_nvml_stubs.py from the names that nvidia-ml-py looks up.
 */
#include "core.h"

#define STUB(name)                       \
    NVML_API nvmlReturn_t name(void)     \
    {                                    \
        ENTER(NULL, NO_HANDLE, true);    \
        LEAVE(NVML_ERROR_NOT_SUPPORTED); \
    }

#include "stubs.inc"
